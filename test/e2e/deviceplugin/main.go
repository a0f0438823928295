// Command deviceplugin is a device plugin for tests: it registers with the agent as plugins do with a kubelet, again
// whenever its socket has been removed, and writes down what it is asked. In some modes it is no good plugin.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"keelson.dev/keelson/internal/durable"
)

func main() {
	p := &plugin{watching: map[chan struct{}]bool{}}
	flag.StringVar(&p.resource, "resource", "example.com/thing", "name of the devices")
	flag.StringVar(&p.folder, "folder", "/var/lib/kubelet/device-plugins", "where the agent and this plugin have their sockets")
	flag.StringVar(&p.name, "name", "thing", "of this plugin's socket, without .sock")
	flag.StringVar(&p.registry, "registry", "", "folder in which it waits for the agent instead of registering by itself")
	flag.StringVar(&p.list, "devices", "a,b", "names of the devices; those with a ! behind are not healthy")
	flag.StringVar(&p.file, "list", "", "file that holds the names instead; it is read again on SIGUSR1")
	flag.StringVar(&p.cdi, "cdi", "", "folder for a CDI specification of the devices")
	flag.StringVar(&p.mount, "mount", "", "HOST:CONTAINER that each container gets")
	flag.StringVar(&p.device, "device", "/dev/zero", "of the host that each container may read, by the name of what it was given")
	flag.StringVar(&p.log, "log", "", "file for what it is asked")
	flag.BoolVar(&p.prepare, "prepare", false, "whether it is asked before each start of a container")
	flag.BoolVar(&p.prefer, "prefer", false, "whether it says which devices it would take: the last ones")
	flag.StringVar(&p.mode, "mode", "", "what it does wrong: old, path, endless, huge, bytes, unnamed, twice, silent, ends, slow, refuses, short, "+
		"relative, stranger, unprepared")
	flag.Parse()
	if err := p.run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

type plugin struct {
	api.UnimplementedDevicePluginServer
	registration.UnimplementedRegistrationServer
	resource, folder, name, registry, list, file, cdi, mount, device, log, mode string
	prepare, prefer                                                             bool

	mu       sync.Mutex
	watching map[chan struct{}]bool
}

func (p *plugin) socket() string { return filepath.Join(p.folder, p.name+".sock") }

// run serves, and begins again whenever the socket is gone.
func (p *plugin) run() error {
	if err := p.describe(); err != nil {
		return err
	}
	again := make(chan os.Signal, 1)
	signal.Notify(again, syscall.SIGUSR1)
	go func() {
		for range again {
			p.mu.Lock()
			for c := range p.watching {
				c <- struct{}{}
			}
			p.mu.Unlock()
		}
	}()
	for {
		failed := make(chan error, 2)
		s, err := serve(p.socket(), failed, func(s *grpc.Server) { api.RegisterDevicePluginServer(s, p) })
		if err != nil {
			return err
		}
		if p.registry == "" {
			err = p.register()
		} else {
			_, err = serve(filepath.Join(p.registry, p.name+"-reg.sock"), failed, func(s *grpc.Server) { registration.RegisterRegistrationServer(s, p) })
		}
		if status.Code(err) == codes.Unavailable { // the agent ended before it had answered, or does not serve yet: the next one is told
			s.Stop()
			continue
		}
		if err != nil {
			return err
		}
		for present := true; present; {
			select {
			case err := <-failed:
				return err
			case <-time.After(50 * time.Millisecond):
			}
			_, err := os.Lstat(p.socket())
			present = !errors.Is(err, os.ErrNotExist)
		}
		s.Stop()
	}
}

func serve(socket string, failed chan<- error, register func(*grpc.Server)) (*grpc.Server, error) {
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	l, err := net.Listen("unix", socket)
	if err != nil {
		return nil, err
	}
	s := grpc.NewServer()
	register(s)
	go func() {
		if err := s.Serve(l); err != nil {
			failed <- err
		}
	}()
	return s, nil
}

// register waits for the agent, which may be about to begin.
func (p *plugin) register() error {
	conn, err := grpc.NewClient("unix://"+filepath.Join(p.folder, "kubelet.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	q := &api.RegisterRequest{Version: api.Version, Endpoint: p.name + ".sock", ResourceName: p.resource, Options: p.options()}
	switch p.mode {
	case "old":
		q.Version = "v1alpha"
	case "path":
		q.Endpoint = "../" + q.Endpoint
	}
	_, err = api.NewRegistrationClient(conn).Register(ctx, q, grpc.WaitForReady(true))
	if status.Code(err) == codes.Unavailable {
		return err // nobody said what became of it
	}
	return errors.Join(err, p.note("registered %v", err == nil))
}

func (p *plugin) options() *api.DevicePluginOptions {
	return &api.DevicePluginOptions{PreStartRequired: p.prepare, GetPreferredAllocationAvailable: p.prefer}
}

// GetInfo implements the registration service of a plugin that waits.
func (p *plugin) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return &registration.PluginInfo{Type: registration.DevicePlugin, Name: p.resource, Endpoint: p.socket(), SupportedVersions: []string{api.Version}}, nil
}

// NotifyRegistrationStatus implements it.
func (p *plugin) NotifyRegistrationStatus(_ context.Context, s *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	return &registration.RegistrationStatusResponse{}, p.note("registered %v", s.PluginRegistered)
}

func (p *plugin) note(format string, args ...any) error {
	if p.log == "" {
		return nil
	}
	f, err := os.OpenFile(p.log, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(f, format+"\n", args...)
	return errors.Join(err, f.Close())
}

// GetDevicePluginOptions implements the plugin service.
func (p *plugin) GetDevicePluginOptions(context.Context, *api.Empty) (*api.DevicePluginOptions, error) {
	return p.options(), nil
}

func (p *plugin) devices() (out []*api.Device) {
	names := p.list
	if p.file != "" {
		b, err := os.ReadFile(p.file)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return nil
		}
		names = strings.TrimSpace(string(b))
	}
	for name := range strings.SplitSeq(names, ",") {
		d := &api.Device{ID: name, Health: api.Healthy, Topology: &api.TopologyInfo{Nodes: []*api.NUMANode{{ID: 0}}}}
		if id, bad := strings.CutSuffix(name, "!"); bad {
			d.ID, d.Health = id, api.Unhealthy
		}
		if d.ID != "" {
			out = append(out, d)
		}
	}
	return out
}

// ListAndWatch implements the plugin service.
func (p *plugin) ListAndWatch(_ *api.Empty, s grpc.ServerStreamingServer[api.ListAndWatchResponse]) error {
	many := func(n, bytes int) (out []*api.Device) {
		for i := range n {
			out = append(out, &api.Device{ID: fmt.Sprintf("%0*d", bytes, i), Health: api.Healthy})
		}
		return out
	}
	news := make(chan struct{}, 8)
	p.mu.Lock()
	p.watching[news] = true
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		delete(p.watching, news)
		p.mu.Unlock()
	}()
	for n := 0; ; n++ {
		list := p.devices()
		switch p.mode {
		case "silent":
			<-s.Context().Done()
		case "endless":
			list = many(1+n%2, 1)
		case "huge":
			list = many(100_000, 6)
		case "bytes":
			list = many(16_000, 400)
		case "unnamed":
			list = append(list, &api.Device{Health: api.Healthy})
		case "twice":
			list = append(list, list[0])
		}
		if err := s.Send(&api.ListAndWatchResponse{Devices: list}); err != nil {
			return err
		}
		switch p.mode {
		case "endless":
			continue
		case "ends":
			return nil
		}
		select {
		case <-s.Context().Done():
			return s.Context().Err()
		case <-news:
		}
	}
}

// GetPreferredAllocation implements the plugin service.
func (p *plugin) GetPreferredAllocation(_ context.Context, q *api.PreferredAllocationRequest) (*api.PreferredAllocationResponse, error) {
	out := &api.PreferredAllocationResponse{}
	for _, c := range q.ContainerRequests {
		ids := slices.Sorted(slices.Values(c.AvailableDeviceIDs))
		ids = ids[len(ids)-int(c.AllocationSize):]
		if p.mode == "stranger" {
			ids = []string{"nobody", ids[0], ids[0], ""}
		}
		if err := p.note("prefer %d of %s with %s", c.AllocationSize, joined(c.AvailableDeviceIDs), joined(c.MustIncludeDeviceIDs)); err != nil {
			return nil, err
		}
		out.ContainerResponses = append(out.ContainerResponses, &api.ContainerPreferredAllocationResponse{DeviceIDs: ids})
	}
	return out, nil
}

func joined(ids []string) string { return strings.Join(slices.Sorted(slices.Values(ids)), ",") }

// Allocate implements the plugin service.
func (p *plugin) Allocate(ctx context.Context, q *api.AllocateRequest) (*api.AllocateResponse, error) {
	out := &api.AllocateResponse{}
	for _, c := range q.ContainerRequests {
		if err := p.note("allocate %s", joined(c.DevicesIds)); err != nil {
			return nil, err
		}
		out.ContainerResponses = append(out.ContainerResponses, p.allocated(c.DevicesIds))
	}
	switch p.mode {
	case "slow":
		<-ctx.Done()
		return nil, ctx.Err()
	case "refuses":
		return nil, errors.New(strings.Repeat("no ", 1000))
	case "short":
		return &api.AllocateResponse{}, nil
	case "relative":
		out.ContainerResponses[0].Mounts = []*api.Mount{{ContainerPath: "etc", HostPath: "../../etc"}}
	}
	return out, nil
}

func (p *plugin) allocated(ids []string) *api.ContainerAllocateResponse {
	r := &api.ContainerAllocateResponse{Envs: map[string]string{"THINGS": joined(ids)}, Annotations: map[string]string{p.resource: joined(ids)}}
	if host, container, ok := strings.Cut(p.mount, ":"); ok {
		r.Mounts = []*api.Mount{{HostPath: host, ContainerPath: container, ReadOnly: true}}
	}
	for _, id := range ids {
		r.Devices = append(r.Devices, &api.DeviceSpec{HostPath: p.device, ContainerPath: "/dev/thing-" + id, Permissions: "r"})
		if p.cdi != "" {
			r.CdiDevices = append(r.CdiDevices, &api.CDIDevice{Name: p.kind() + "=" + id})
		}
	}
	return r
}

func (p *plugin) kind() string { return p.resource }

// describe writes a CDI specification by which each device gives a variable of its name.
func (p *plugin) describe() error {
	if p.cdi == "" {
		return nil
	}
	var all []any
	for _, d := range p.devices() {
		all = append(all, map[string]any{"name": d.ID, "containerEdits": map[string]any{"env": []string{"CDI_" + d.ID + "=yes"}}})
	}
	b, err := json.Marshal(map[string]any{"cdiVersion": "0.6.0", "kind": p.kind(), "devices": all})
	if err != nil {
		return err
	}
	return durable.Replace(filepath.Join(p.cdi, p.name+".json"), b)
}

// PreStartContainer implements the plugin service.
func (p *plugin) PreStartContainer(_ context.Context, q *api.PreStartContainerRequest) (*api.PreStartContainerResponse, error) {
	if err := p.note("prepare %s", joined(q.DevicesIds)); err != nil {
		return nil, err
	}
	if p.mode == "unprepared" {
		return nil, errors.New("it is too hot")
	}
	return &api.PreStartContainerResponse{}, nil
}
