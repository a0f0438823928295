// Command devicedriver is a DRA driver for tests. It registers as with a kubelet, records each
// request, and describes each device that it prepares in a CDI specification. In some modes it
// violates the protocol.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"

	"google.golang.org/grpc"
	drahealth "k8s.io/kubelet/pkg/apis/dra-health/v1"
	drahealthalpha "k8s.io/kubelet/pkg/apis/dra-health/v1alpha1"
	dra "k8s.io/kubelet/pkg/apis/dra/v1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"keelson.dev/keelson/internal/durable"
)

func main() {
	d := &driver{}
	flag.StringVar(&d.name, "name", "gpu.example.com", "name of the driver")
	flag.StringVar(&d.registry, "registry", "", "folder of the registration socket")
	flag.StringVar(&d.socket, "socket", "", "socket at which the driver prepares devices, as a path on the node")
	flag.StringVar(&d.cdi, "cdi", "", "folder for CDI specifications; \"\" = no specifications")
	flag.StringVar(&d.log, "log", "", "file to which requests are logged")
	flag.StringVar(&d.mode, "mode", "", "how the driver violates the protocol: old, hangs, silent, refuses, floods, "+
		"huge, path, keeps, health-floods, health-huge, health-nameless, health-raves")
	flag.StringVar(&d.services, "services", "",
		"health services that the driver names when it registers, separated by commas")
	flag.StringVar(&d.health, "health", "", "file of lines DEVICE HEALTHY|UNHEALTHY|UNKNOWN SECONDS MESSAGE, "+
		"reported when it changes; \"\" = no health is reported")
	flag.Parse()
	failed := make(chan error, 2)
	serveSocket(failed, d.socket, func(s *grpc.Server) {
		dra.RegisterDRAPluginServer(s, d)
		if d.health != "" {
			drahealth.RegisterDRAResourceHealthServer(s, d)
			drahealthalpha.RegisterDRAResourceHealthServer(s, drahealth.V1ServerWrapper{Server: d})
		}
	})
	// The driver listens on its endpoint before it listens for the registration.
	serveSocket(failed, filepath.Join(d.registry, d.name+"-reg.sock"), func(s *grpc.Server) {
		registration.RegisterRegistrationServer(s, d)
	})
	fmt.Fprintln(os.Stderr, <-failed)
	os.Exit(1)
}

// serveSocket starts a gRPC server on the Unix socket, with the services that register adds, and
// returns when it listens. It sends a later failure to failed.
func serveSocket(failed chan<- error, socket string, register func(*grpc.Server)) {
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		failed <- err
		return
	}
	l, err := net.Listen("unix", socket)
	if err != nil {
		failed <- err
		return
	}
	s := grpc.NewServer()
	register(s)
	go func() { failed <- s.Serve(l) }()
}

type driver struct {
	dra.UnimplementedDRAPluginServer
	registration.UnimplementedRegistrationServer
	drahealth.UnimplementedDRAResourceHealthServer
	name, registry, socket, cdi, log, mode, services, health string
}

// GetInfo implements the registration service.
func (d *driver) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	version := dra.DRAPluginService
	if d.mode == "old" {
		version = "v1beta1.DRAPlugin"
	}
	return &registration.PluginInfo{Type: registration.DRAPlugin, Name: d.name, Endpoint: d.socket,
		SupportedVersions: append([]string{version}, strings.FieldsFunc(d.services, func(r rune) bool {
			return r == ','
		})...)}, nil
}

// NotifyRegistrationStatus implements the registration service.
func (d *driver) NotifyRegistrationStatus(
	_ context.Context, s *registration.RegistrationStatus,
) (*registration.RegistrationStatusResponse, error) {
	return &registration.RegistrationStatusResponse{}, d.appendLog("registered %v %s", s.PluginRegistered, s.Error)
}

func (d *driver) appendLog(format string, args ...any) error {
	if d.log == "" {
		return nil
	}
	f, err := os.OpenFile(d.log, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(f, format+"\n", args...)
	return errors.Join(err, f.Close())
}

// NodePrepareResources implements the plugin service.
func (d *driver) NodePrepareResources(ctx context.Context, q *dra.NodePrepareResourcesRequest) (
	*dra.NodePrepareResourcesResponse, error,
) {
	out := &dra.NodePrepareResourcesResponse{Claims: map[string]*dra.NodePrepareResourceResponse{}}
	for _, c := range q.Claims {
		if err := d.appendLog("prepare %s/%s %s", c.Namespace, c.Name, c.Uid); err != nil {
			return nil, err
		}
		switch d.mode {
		case "hangs":
			<-ctx.Done()
			return nil, ctx.Err()
		case "silent":
		default:
			out.Claims[c.Uid] = d.prepareClaim(c)
		}
	}
	return out, nil
}

func (d *driver) prepareClaim(c *dra.Claim) *dra.NodePrepareResourceResponse {
	one := func(id string) *dra.NodePrepareResourceResponse {
		return &dra.NodePrepareResourceResponse{Devices: []*dra.Device{{RequestNames: []string{"r"}, PoolName: "w1",
			DeviceName: "gpu-0", CdiDeviceIds: []string{id}}}}
	}
	switch d.mode {
	case "refuses":
		return &dra.NodePrepareResourceResponse{Error: strings.Repeat("no ", 1000)}
	case "huge":
		return &dra.NodePrepareResourceResponse{Error: strings.Repeat("x", 2<<20)}
	case "floods":
		r := &dra.NodePrepareResourceResponse{}
		for i := range 200 {
			r.Devices = append(r.Devices, &dra.Device{DeviceName: fmt.Sprint(i)})
		}
		return r
	case "path":
		return one("../../etc/shadow")
	}
	if err := d.writeSpec(c); err != nil {
		return &dra.NodePrepareResourceResponse{Error: err.Error()}
	}
	return one(d.name + "/gpu=" + c.Uid)
}

func (d *driver) specFile(c *dra.Claim) string { return filepath.Join(d.cdi, d.name+"-"+c.Uid+".json") }

// writeSpec writes the CDI specification of the device of a claim: a device node, /dev/gpu, and an
// environment variable with its name.
func (d *driver) writeSpec(c *dra.Claim) error {
	if d.cdi == "" {
		return nil
	}
	b, err := json.Marshal(map[string]any{"cdiVersion": "0.6.0", "kind": d.name + "/gpu",
		"devices": []any{map[string]any{
			"name": c.Uid, "containerEdits": map[string]any{
				"env":         []string{"GPU_OF=" + c.Name},
				"deviceNodes": []any{map[string]any{"path": "/dev/gpu", "hostPath": "/dev/null"}},
			}}}})
	if err != nil {
		return err
	}
	return durable.Write(d.specFile(c), b, durable.Atomic)
}

// NodeUnprepareResources implements the plugin service.
func (d *driver) NodeUnprepareResources(_ context.Context, q *dra.NodeUnprepareResourcesRequest) (
	*dra.NodeUnprepareResourcesResponse, error,
) {
	out := &dra.NodeUnprepareResourcesResponse{Claims: map[string]*dra.NodeUnprepareResourceResponse{}}
	for _, c := range q.Claims {
		if err := d.appendLog("unprepare %s/%s %s", c.Namespace, c.Name, c.Uid); err != nil {
			return nil, err
		}
		out.Claims[c.Uid] = &dra.NodeUnprepareResourceResponse{}
		if d.mode == "keeps" {
			out.Claims[c.Uid].Error = "in use"
		} else if err := os.Remove(d.specFile(c)); d.cdi != "" && err != nil && !errors.Is(err, os.ErrNotExist) {
			out.Claims[c.Uid].Error = err.Error()
		}
	}
	return out, nil
}
