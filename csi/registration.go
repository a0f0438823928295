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

// plugin is what a registration socket said.
type plugin struct {
	id       string // of the socket that said it
	endpoint string // the driver's socket; "" for what is no CSI driver
	name     string
}

// registrations asks the sockets of the registration folder for the drivers behind them.
func (r *Registry) registrations(ctx context.Context, found map[string]string) {
	socks, err := filepath.Glob(filepath.Join(r.cfg.Registration, "*.sock"))
	if err != nil {
		return
	}
	for s := range r.told {
		if !slices.Contains(socks, s) {
			delete(r.told, s)
		}
	}
	for _, s := range socks {
		id := fileID(s)
		if id == "" {
			continue
		}
		p, ok := r.told[s]
		if !ok || p.id != id {
			var is bool
			is, err = Register(ctx, s, registration.CSIPlugin, func(ctx context.Context, info *registration.PluginInfo) (err error) {
				p, err = usable(ctx, info)
				return err
			})
			if !is {
				p = plugin{}
			}
			if err != nil {
				r.cfg.Log.Warn("plugin does not register", "socket", s, "err", err)
				continue
			}
			p.id = id
			r.told[s] = p
		}
		if p.endpoint != "" {
			found[p.endpoint] = p.name
		}
	}
}

// Register asks what is behind a registration socket. What is of the kind is looked at whether it can be used, and told:
// who registers a plugin waits for that answer, and ends and begins again when it is no. is is false for another kind.
func Register(ctx context.Context, socket, kind string, usable func(context.Context, *registration.PluginInfo) error) (is bool, err error) {
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
	err = usable(ctx, info)
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

// FileID tells one socket file from the next of the same name; "" when there is none.
func FileID(path string) string { return fileID(path) }

// usable dials the driver that registers and looks whether it is what it was registered as.
func usable(ctx context.Context, info *registration.PluginInfo) (plugin, error) {
	one := func(v string) bool { v = strings.TrimPrefix(v, "v"); return v == "1" || strings.HasPrefix(v, "1.") }
	if !slices.ContainsFunc(info.GetSupportedVersions(), one) {
		return plugin{}, fmt.Errorf("CSI driver %s speaks versions %q of the interface, none of which is 1.x", info.GetName(),
			info.GetSupportedVersions())
	}
	p := plugin{endpoint: filepath.Clean(strings.TrimPrefix(info.GetEndpoint(), "unix://")), name: info.GetName()}
	if !filepath.IsAbs(p.endpoint) {
		return plugin{}, fmt.Errorf("CSI driver %s registers with the endpoint %q: it has to be the path of a socket on the node", p.name, info.GetEndpoint())
	}
	d, err := Dial(ctx, p.endpoint)
	if err != nil {
		return plugin{}, err
	}
	defer d.Close()
	if d.Name != p.name {
		return plugin{}, fmt.Errorf("CSI driver at %s calls itself %s, registered as %s", p.endpoint, d.Name, p.name)
	}
	return p, nil
}
