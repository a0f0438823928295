package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/net/netutil"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/util/validation"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"keelson.dev/keelson/csi"
)

const (
	socketName = "kubelet.sock" // the socket at which plugins register
	scanEvery  = 5 * time.Second

	maxConnections = 64       // connections of registering plugins
	maxRequest     = 64 << 10 // bytes of a registration
)

// Run accepts registrations of plugins until ctx ends or an error occurs. It first removes the
// sockets of an earlier process, which is the signal for plugins to register again.
func (m *Manager) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer m.serving.Wait()
	defer cancel()
	m.mu.Lock()
	m.loadRecords()
	m.resetPlugins()
	m.runCtx = ctx
	m.mu.Unlock()
	defer func() {
		m.mu.Lock()
		m.runCtx = nil
		m.mu.Unlock()
	}()
	failed := make(chan error, 1)
	if m.cfg.Dir != "" {
		l, err := m.listenForPlugins()
		if err != nil {
			return fmt.Errorf("accepting registrations of device plugins: %w", err)
		}
		s := grpc.NewServer(grpc.MaxRecvMsgSize(maxRequest), grpc.MaxConcurrentStreams(4),
			grpc.ConnectionTimeout(5*time.Second),
			grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionIdle: time.Minute}))
		api.RegisterRegistrationServer(s, registrationServer{m: m})
		go func() { failed <- s.Serve(netutil.LimitListener(l, maxConnections)) }()
		defer s.Stop()
	}
	folder := m.registrationFolder()
	t := time.NewTicker(scanEvery)
	defer t.Stop()
	for {
		folder.Scan(ctx)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case err := <-failed:
			return fmt.Errorf("accepting registrations of device plugins: %w", err)
		case <-t.C:
		}
	}
}

func (m *Manager) listenForPlugins() (net.Listener, error) {
	if err := os.MkdirAll(m.cfg.Dir, 0o750); err != nil {
		return nil, err
	}
	files, err := os.ReadDir(m.cfg.Dir)
	if err != nil {
		return nil, err
	}
	for _, f := range files {
		if f.Type()&fs.ModeSocket == 0 {
			continue
		}
		if err := os.Remove(filepath.Join(m.cfg.Dir, f.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
	}
	return net.Listen("unix", filepath.Join(m.cfg.Dir, socketName))
}

// registrationServer is the gRPC server at which device plugins register.
type registrationServer struct {
	api.UnimplementedRegistrationServer
	m *Manager
}

// Register registers the plugin that sent the request. It implements the gRPC service Registration.
func (r registrationServer) Register(_ context.Context, q *api.RegisterRequest) (*api.Empty, error) {
	if err := r.m.registerPlugin(q); err != nil {
		r.m.cfg.Log.Warn("the registration of a device plugin is rejected", "resource",
			truncateText(q.GetResourceName()), "err", err)
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	return &api.Empty{}, nil
}

func (m *Manager) registerPlugin(q *api.RegisterRequest) error {
	if !slices.Contains(api.SupportedVersions[:], q.GetVersion()) {
		return fmt.Errorf("version %q of the device plugin API is not supported: want one of %q",
			truncateText(q.GetVersion()), api.SupportedVersions)
	}
	name := q.GetEndpoint()
	if name == "" || name != filepath.Base(name) || name == "." || name == ".." || name == socketName {
		return fmt.Errorf("endpoint %q: want the name of a socket in directory %s", truncateText(name), m.cfg.Dir)
	}
	_, err := m.startPlugin(q.GetResourceName(), filepath.Join(m.cfg.Dir, name), q.GetOptions())
	return err
}

// registrationFolder returns the scanner of Config.Registration, the directory in which plugins
// announce themselves by their sockets.
func (m *Manager) registrationFolder() *csi.RegistrationFolder {
	return &csi.RegistrationFolder{Dir: m.cfg.Registration, Kind: registration.DevicePlugin, Log: m.cfg.Log,
		OnRegister: func(_ context.Context, socket string, info *registration.PluginInfo) error {
			if !slices.ContainsFunc(info.GetSupportedVersions(), func(v string) bool {
				return slices.Contains(api.SupportedVersions[:], v)
			}) {
				return fmt.Errorf("device plugin %s supports versions %q: want %s", truncateText(info.GetName()),
					info.GetSupportedVersions(), api.Version)
			}
			endpoint := filepath.Clean(strings.TrimPrefix(info.GetEndpoint(), "unix://"))
			if !filepath.IsAbs(endpoint) {
				return fmt.Errorf("device plugin %s registers with the endpoint %q: want the absolute path of a "+
					"socket on the node",
					truncateText(info.GetName()), truncateText(info.GetEndpoint()))
			}
			p, err := m.startPlugin(info.GetName(), endpoint, nil)
			if err != nil {
				return err
			}
			m.mu.Lock()
			defer m.mu.Unlock()
			m.sockets[socket] = p
			return nil
		},
		OnRemove: func(socket string) {
			m.mu.Lock()
			defer m.mu.Unlock()
			if p := m.sockets[socket]; p != nil {
				p.stop()
				delete(m.sockets, socket)
			}
		}}
}

// startPlugin registers a plugin for a resource, and starts to watch its devices. endpoint is the
// path of the plugin's socket. If options is nil, startPlugin queries the plugin's options.
func (m *Manager) startPlugin(resource, endpoint string, options *api.DevicePluginOptions) (*registeredPlugin, error) {
	if err := checkResourceName(resource); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.runCtx == nil {
		return nil, errors.New("the agent is stopping")
	}
	if err := m.admitResource(resource); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(m.runCtx)
	p := &registeredPlugin{resource: resource, endpoint: endpoint, stop: cancel, options: options}
	if before := m.pending[resource]; before != nil {
		before.stop()
	}
	m.pending[resource] = p
	m.cfg.Log.Info("a device plugin registers", "resource", resource, "socket", endpoint)
	m.serving.Go(func() {
		defer cancel()
		m.removePlugin(p, m.watchDevices(ctx, p))
	})
	return p, nil
}

// checkResourceName returns an error if a name is not a valid name of an extended resource in
// Kubernetes.
func checkResourceName(name string) error {
	domain, _, ok := strings.Cut(name, "/")
	switch {
	case !ok, strings.Contains(domain, "kubernetes.io"), strings.HasPrefix(name, "requests."):
		return fmt.Errorf("resource %q: want DOMAIN/NAME with a domain other than kubernetes.io", truncateText(name))
	}
	if msgs := validation.IsQualifiedName("requests." + name); len(msgs) > 0 {
		return fmt.Errorf("resource %q: %s", truncateText(name), msgs[0])
	}
	return nil
}

// truncateText truncates a text from a plugin, which may become part of an Event, to 512 bytes.
func truncateText(s string) string {
	const most = 512
	if len(s) > most {
		s = s[:most] + "..."
	}
	return strings.ToValidUTF8(s, "?")
}
