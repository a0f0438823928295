// Command devicedriver is a DRA driver for tests: it registers as drivers do with a kubelet, writes down what it is asked,
// and describes each device that it prepares in a CDI specification. In some modes it is no good driver.
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
	flag.StringVar(&d.name, "name", "gpu.example.com", "of the driver")
	flag.StringVar(&d.registry, "registry", "", "folder of the socket at which it registers")
	flag.StringVar(&d.socket, "socket", "", "at which it prepares devices, as the node sees it")
	flag.StringVar(&d.cdi, "cdi", "", "folder for CDI specifications; none are written without it")
	flag.StringVar(&d.log, "log", "", "file for what it is asked")
	flag.StringVar(&d.mode, "mode", "", "what it does wrong: old, hangs, silent, refuses, floods, huge, path, keeps, health-floods, health-huge, health-nameless, health-raves")
	flag.StringVar(&d.services, "services", "", "of health, that it names when it registers, with commas")
	flag.StringVar(&d.health, "health", "", "file of lines DEVICE HEALTHY|UNHEALTHY|UNKNOWN SECONDS MESSAGE, told when it changes; nothing is told of health without it")
	flag.Parse()
	failed := make(chan error, 2)
	serve(failed, d.socket, func(s *grpc.Server) {
		dra.RegisterDRAPluginServer(s, d)
		if d.health != "" {
			drahealth.RegisterDRAResourceHealthServer(s, d)
			drahealthalpha.RegisterDRAResourceHealthServer(s, drahealth.V1ServerWrapper{Server: d})
		}
	})
	// It listens where it is called before it is known to be there.
	serve(failed, filepath.Join(d.registry, d.name+"-reg.sock"), func(s *grpc.Server) { registration.RegisterRegistrationServer(s, d) })
	fmt.Fprintln(os.Stderr, <-failed)
	os.Exit(1)
}

// serve listens at a socket when it returns; what comes in its way it tells failed.
func serve(failed chan<- error, socket string, register func(*grpc.Server)) {
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
	return &registration.PluginInfo{Type: registration.DRAPlugin, Name: d.name, Endpoint: d.socket, SupportedVersions: append([]string{version}, strings.FieldsFunc(d.services, func(r rune) bool { return r == ',' })...)}, nil
}

// NotifyRegistrationStatus implements the registration service.
func (d *driver) NotifyRegistrationStatus(_ context.Context, s *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	return &registration.RegistrationStatusResponse{}, d.note("registered %v %s", s.PluginRegistered, s.Error)
}

func (d *driver) note(format string, args ...any) error {
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
func (d *driver) NodePrepareResources(ctx context.Context, q *dra.NodePrepareResourcesRequest) (*dra.NodePrepareResourcesResponse, error) {
	out := &dra.NodePrepareResourcesResponse{Claims: map[string]*dra.NodePrepareResourceResponse{}}
	for _, c := range q.Claims {
		if err := d.note("prepare %s/%s %s", c.Namespace, c.Name, c.Uid); err != nil {
			return nil, err
		}
		switch d.mode {
		case "hangs":
			<-ctx.Done()
			return nil, ctx.Err()
		case "silent":
		default:
			out.Claims[c.Uid] = d.prepared(c)
		}
	}
	return out, nil
}

func (d *driver) prepared(c *dra.Claim) *dra.NodePrepareResourceResponse {
	one := func(id string) *dra.NodePrepareResourceResponse {
		return &dra.NodePrepareResourceResponse{Devices: []*dra.Device{{RequestNames: []string{"r"}, PoolName: "w1", DeviceName: "gpu-0", CdiDeviceIds: []string{id}}}}
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
	if err := d.describe(c); err != nil {
		return &dra.NodePrepareResourceResponse{Error: err.Error()}
	}
	return one(d.name + "/gpu=" + c.Uid)
}

func (d *driver) file(c *dra.Claim) string { return filepath.Join(d.cdi, d.name+"-"+c.Uid+".json") }

// describe gives the device of a claim a node, /dev/gpu, and a variable of its name.
func (d *driver) describe(c *dra.Claim) error {
	if d.cdi == "" {
		return nil
	}
	b, err := json.Marshal(map[string]any{"cdiVersion": "0.6.0", "kind": d.name + "/gpu", "devices": []any{map[string]any{
		"name": c.Uid, "containerEdits": map[string]any{
			"env":         []string{"GPU_OF=" + c.Name},
			"deviceNodes": []any{map[string]any{"path": "/dev/gpu", "hostPath": "/dev/null"}},
		}}}})
	if err != nil {
		return err
	}
	return durable.Replace(d.file(c), b)
}

// NodeUnprepareResources implements the plugin service.
func (d *driver) NodeUnprepareResources(_ context.Context, q *dra.NodeUnprepareResourcesRequest) (*dra.NodeUnprepareResourcesResponse, error) {
	out := &dra.NodeUnprepareResourcesResponse{Claims: map[string]*dra.NodeUnprepareResourceResponse{}}
	for _, c := range q.Claims {
		if err := d.note("unprepare %s/%s %s", c.Namespace, c.Name, c.Uid); err != nil {
			return nil, err
		}
		out.Claims[c.Uid] = &dra.NodeUnprepareResourceResponse{}
		if d.mode == "keeps" {
			out.Claims[c.Uid].Error = "in use"
		} else if err := os.Remove(d.file(c)); d.cdi != "" && err != nil && !errors.Is(err, os.ErrNotExist) {
			out.Claims[c.Uid].Error = err.Error()
		}
	}
	return out, nil
}
