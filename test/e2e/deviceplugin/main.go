// Command deviceplugin is a device plugin for tests. It registers with the agent as with a kubelet,
// again whenever its socket has been removed, and records each request. In some modes it violates
// the protocol.
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
	flag.StringVar(&p.sockets.folder, "folder", "/var/lib/kubelet/device-plugins",
		"folder of the sockets of the agent and this plugin")
	flag.StringVar(&p.sockets.name, "name", "thing", "name of this plugin's socket, without .sock")
	flag.StringVar(&p.sockets.registry, "registry", "",
		"folder of a registration socket that the agent discovers; \"\" = the plugin registers itself")
	flag.StringVar(&p.source.list, "devices", "a,b",
		"names of the devices; a name followed by ! is an unhealthy device")
	flag.StringVar(&p.source.file, "list", "",
		"file with the names of the devices, used instead of -devices; it is read again on SIGUSR1")
	flag.StringVar(&p.allocation.cdi, "cdi", "", "folder for a CDI specification of the devices")
	flag.StringVar(&p.allocation.mount, "mount", "", "HOST:CONTAINER mount of each container")
	flag.StringVar(&p.allocation.device, "device", "/dev/zero",
		"host device that each container may read, at a path with the ID of the allocated device")
	flag.StringVar(&p.log, "log", "", "file to which requests are logged")
	flag.BoolVar(&p.prepare, "prepare", false, "whether the plugin requires PreStartContainer")
	flag.BoolVar(&p.prefer, "prefer", false, "whether the plugin prefers devices: the last ones")
	flag.StringVar(&p.mode, "mode", "", "how the plugin violates the protocol: old, path, endless, huge, bytes, "+
		"unnamed, twice, silent, ends, slow, refuses, short, relative, stranger, unprepared")
	flag.Parse()
	if err := p.serveForever(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// plugin implements the services of a device plugin.
type plugin struct {
	api.UnimplementedDevicePluginServer
	registration.UnimplementedRegistrationServer
	resource, log, mode string
	prepare, prefer     bool
	sockets             socketConfig
	source              deviceSource
	allocation          allocationConfig

	mu       sync.Mutex
	watching map[chan struct{}]bool
}

// socketConfig contains the folder and the name of the plugin's socket, and the path of the agent's
// registration socket.
type socketConfig struct{ folder, name, registry string }

// deviceSource is the list of the devices, or a file with the list.
type deviceSource struct{ list, file string }

// allocationConfig contains the directory for CDI specifications, the mount and the host device
// that an allocation adds to a container.
type allocationConfig struct{ cdi, mount, device string }

func (p *plugin) socketPath() string { return filepath.Join(p.sockets.folder, p.sockets.name+".sock") }

// serveForever serves the plugin, and restarts it when its socket has been removed.
func (p *plugin) serveForever() error {
	if err := p.writeSpec(); err != nil {
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
		s, err := listenAndServe(p.socketPath(), failed, func(s *grpc.Server) { api.RegisterDevicePluginServer(s, p) })
		if err != nil {
			return err
		}
		if p.sockets.registry == "" {
			err = p.registerAtAgent()
		} else {
			_, err = listenAndServe(filepath.Join(p.sockets.registry, p.sockets.name+"-reg.sock"), failed,
				func(s *grpc.Server) {
					registration.RegisterRegistrationServer(s, p)
				})
		}
		if status.Code(err) == codes.Unavailable {
			// the agent exited before its response, or does not serve yet: register again with the
			// next agent
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
			_, err := os.Lstat(p.socketPath())
			present = !errors.Is(err, os.ErrNotExist)
		}
		s.Stop()
	}
}

func listenAndServe(socket string, failed chan<- error, register func(*grpc.Server)) (*grpc.Server, error) {
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

// registerAtAgent registers the plugin with the agent. It waits until the agent serves, at most 30
// s.
func (p *plugin) registerAtAgent() error {
	conn, err := grpc.NewClient("unix://"+filepath.Join(p.sockets.folder, "kubelet.sock"),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	q := &api.RegisterRequest{Version: api.Version, Endpoint: p.sockets.name + ".sock", ResourceName: p.resource,
		Options: p.pluginOptions()}
	switch p.mode {
	case "old":
		q.Version = "v1alpha"
	case "path":
		q.Endpoint = "../" + q.Endpoint
	}
	_, err = api.NewRegistrationClient(conn).Register(ctx, q, grpc.WaitForReady(true))
	if status.Code(err) == codes.Unavailable {
		return err // the result of the registration is not known
	}
	return errors.Join(err, p.appendLog("registered %v", err == nil))
}

func (p *plugin) pluginOptions() *api.DevicePluginOptions {
	return &api.DevicePluginOptions{PreStartRequired: p.prepare, GetPreferredAllocationAvailable: p.prefer}
}

// GetInfo implements the registration service of a plugin that the agent discovers by its socket.
func (p *plugin) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return &registration.PluginInfo{Type: registration.DevicePlugin, Name: p.resource, Endpoint: p.socketPath(),
		SupportedVersions: []string{api.Version}}, nil
}

// NotifyRegistrationStatus implements the registration service.
func (p *plugin) NotifyRegistrationStatus(
	_ context.Context, s *registration.RegistrationStatus,
) (*registration.RegistrationStatusResponse, error) {
	return &registration.RegistrationStatusResponse{}, p.appendLog("registered %v", s.PluginRegistered)
}

func (p *plugin) appendLog(format string, args ...any) error {
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
	return p.pluginOptions(), nil
}

func (p *plugin) listDevices() (out []*api.Device) {
	names := p.source.list
	if p.source.file != "" {
		b, err := os.ReadFile(p.source.file)
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
		list := p.listDevices()
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
func (p *plugin) GetPreferredAllocation(_ context.Context, q *api.PreferredAllocationRequest) (
	*api.PreferredAllocationResponse, error,
) {
	out := &api.PreferredAllocationResponse{}
	for _, c := range q.ContainerRequests {
		ids := slices.Sorted(slices.Values(c.AvailableDeviceIDs))
		ids = ids[len(ids)-int(c.AllocationSize):]
		if p.mode == "stranger" {
			ids = []string{"nobody", ids[0], ids[0], ""}
		}
		if err := p.appendLog("prefer %d of %s with %s", c.AllocationSize, joinIDs(c.AvailableDeviceIDs),
			joinIDs(c.MustIncludeDeviceIDs)); err != nil {
			return nil, err
		}
		out.ContainerResponses = append(out.ContainerResponses,
			&api.ContainerPreferredAllocationResponse{DeviceIDs: ids})
	}
	return out, nil
}

func joinIDs(ids []string) string { return strings.Join(slices.Sorted(slices.Values(ids)), ",") }

// Allocate implements the plugin service.
func (p *plugin) Allocate(ctx context.Context, q *api.AllocateRequest) (*api.AllocateResponse, error) {
	out := &api.AllocateResponse{}
	for _, c := range q.ContainerRequests {
		if err := p.appendLog("allocate %s", joinIDs(c.DevicesIds)); err != nil {
			return nil, err
		}
		out.ContainerResponses = append(out.ContainerResponses, p.containerResponse(c.DevicesIds))
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

func (p *plugin) containerResponse(ids []string) *api.ContainerAllocateResponse {
	r := &api.ContainerAllocateResponse{Envs: map[string]string{"THINGS": joinIDs(ids)},
		Annotations: map[string]string{p.resource: joinIDs(ids)}}
	if host, container, ok := strings.Cut(p.allocation.mount, ":"); ok {
		r.Mounts = []*api.Mount{{HostPath: host, ContainerPath: container, ReadOnly: true}}
	}
	for _, id := range ids {
		r.Devices = append(r.Devices, &api.DeviceSpec{HostPath: p.allocation.device, ContainerPath: "/dev/thing-" + id,
			Permissions: "r"})
		if p.allocation.cdi != "" {
			r.CdiDevices = append(r.CdiDevices, &api.CDIDevice{Name: p.cdiKind() + "=" + id})
		}
	}
	return r
}

func (p *plugin) cdiKind() string { return p.resource }

// writeSpec writes a CDI specification in which each device sets an environment variable of its
// name.
func (p *plugin) writeSpec() error {
	if p.allocation.cdi == "" {
		return nil
	}
	var all []any
	for _, d := range p.listDevices() {
		all = append(all, map[string]any{"name": d.ID,
			"containerEdits": map[string]any{"env": []string{"CDI_" + d.ID + "=yes"}}})
	}
	b, err := json.Marshal(map[string]any{"cdiVersion": "0.6.0", "kind": p.cdiKind(), "devices": all})
	if err != nil {
		return err
	}
	return durable.Write(filepath.Join(p.allocation.cdi, p.sockets.name+".json"), b, durable.Atomic)
}

// PreStartContainer implements the plugin service.
func (p *plugin) PreStartContainer(_ context.Context, q *api.PreStartContainerRequest) (
	*api.PreStartContainerResponse, error,
) {
	if err := p.appendLog("prepare %s", joinIDs(q.DevicesIds)); err != nil {
		return nil, err
	}
	if p.mode == "unprepared" {
		return nil, errors.New("it is too hot")
	}
	return &api.PreStartContainerResponse{}, nil
}
