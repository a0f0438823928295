package csi

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// registeredPlugin is a plugin that has registered through a socket in the registration folder.
type registeredPlugin struct {
	id       string // FileID of the socket at which it registered
	endpoint string // path of the CSI driver's own socket; "" for another kind of plugin
	name     string
}

// scanRegistrations registers the plugins at new sockets in the registration folder. For each
// registered CSI driver, it adds the path of the driver's own socket to found, with the driver's
// name.
func (r *Registry) scanRegistrations(ctx context.Context, found map[string]string) {
	socks, err := filepath.Glob(filepath.Join(r.cfg.Registration, "*.sock"))
	if err != nil {
		return
	}
	for s := range r.registered {
		if !slices.Contains(socks, s) {
			delete(r.registered, s)
		}
	}
	for _, s := range socks {
		id := socketFileID(s)
		if id == "" {
			continue
		}
		p, ok := r.registered[s]
		if !ok || p.id != id {
			var is bool
			is, err = Register(ctx, s, registration.CSIPlugin,
				func(ctx context.Context, info *registration.PluginInfo) (err error) {
					p, err = checkDriver(ctx, info)
					return err
				})
			if !is {
				p = registeredPlugin{}
			}
			if err != nil {
				r.cfg.Log.Warn("plugin registration failed", "socket", s, "err", err)
				continue
			}
			p.id = id
			r.registered[s] = p
		}
		if p.endpoint != "" {
			found[p.endpoint] = p.name
		}
	}
}

// Register performs the kubelet's plugin registration with the plugin at a socket. If the plugin
// has the given kind, Register calls accept and reports its error, if any, to the plugin. The
// node-driver-registrar waits for this status; after an error it exits and is restarted. The first
// result is false for a plugin of another kind.
func Register(ctx context.Context, socket, kind string, accept func(context.Context, *registration.PluginInfo) error) (
	is bool, err error,
) {
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return false, err
	}
	defer conn.Close()
	c := registration.NewRegistrationClient(conn)
	asking, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	info, err := c.GetInfo(asking, &registration.InfoRequest{})
	if err != nil {
		return false, fmt.Errorf("GetInfo: %w", err)
	}
	if info.GetType() != kind {
		return false, nil
	}
	err = accept(ctx, info)
	answer := &registration.RegistrationStatus{PluginRegistered: err == nil}
	if err != nil {
		answer.Error = err.Error()
	}
	telling, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if _, lost := c.NotifyRegistrationStatus(telling, answer); lost != nil && err == nil {
		err = fmt.Errorf("NotifyRegistrationStatus: %w", lost)
	}
	return true, err
}

// FileID returns an ID of the socket file at path, or "" if no file exists. A later socket at the
// same path has another ID.
func FileID(path string) string { return socketFileID(path) }

// checkDriver connects to the CSI driver that registers with info, and returns it as a plugin. It
// returns an error if the driver does not respond, has another name, or does not support CSI 1.x.
func checkDriver(ctx context.Context, info *registration.PluginInfo) (registeredPlugin, error) {
	one := func(v string) bool { v = strings.TrimPrefix(v, "v"); return v == "1" || strings.HasPrefix(v, "1.") }
	if !slices.ContainsFunc(info.GetSupportedVersions(), one) {
		return registeredPlugin{},
			fmt.Errorf("CSI driver %s supports versions %q of the interface, none of which is 1.x", info.GetName(),
				info.GetSupportedVersions())
	}
	p := registeredPlugin{endpoint: filepath.Clean(strings.TrimPrefix(info.GetEndpoint(), "unix://")),
		name: info.GetName()}
	if !filepath.IsAbs(p.endpoint) {
		return registeredPlugin{},
			fmt.Errorf("CSI driver %s registers with the endpoint %q: it has to be the path of a socket on the node",
				p.name, info.GetEndpoint())
	}
	d, err := Dial(ctx, p.endpoint)
	if err != nil {
		return registeredPlugin{}, err
	}
	defer d.Close()
	if d.Name != p.name {
		return registeredPlugin{}, fmt.Errorf("CSI driver at %s has the name %s, but is registered as %s", p.endpoint,
			d.Name, p.name)
	}
	return p, nil
}
