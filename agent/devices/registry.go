package devices

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	dra "k8s.io/kubelet/pkg/apis/dra/v1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/csi"
)

// ErrNoDriver is returned if no driver with the name is registered on the node.
var ErrNoDriver = errors.New("driver name not found in the list of registered DRA drivers")

// scanEvery is the interval between scans of the directory in which DRA drivers register.
const scanEvery = 5 * time.Second

// driverRegistry tracks the DRA drivers of this node by their registration sockets, as kubelet
// does.
type driverRegistry struct {
	folder csi.RegistrationFolder
	log    *slog.Logger

	health *healthCache

	mu       sync.Mutex
	plugins  map[string]*driverPlugin // by registration socket
	order    int
	runCtx   context.Context // context of Run; nil while Run is not active
	serving  sync.WaitGroup
	notifier agent.ChangeNotifier
}

// driverPlugin is one registered plugin process of a DRA driver.
type driverPlugin struct {
	name     string
	endpoint string
	services []string
	// registration order; of several plugin processes of one driver, the newest is used, because
	// the others are about to exit
	order int

	connected bool
	stop      context.CancelFunc // nil while no connection is maintained
}

func newRegistry(dir string, log *slog.Logger) *driverRegistry {
	r := &driverRegistry{log: log, plugins: map[string]*driverPlugin{}}
	r.health = newHealth(r.notifier.Notify)
	r.folder = csi.RegistrationFolder{Dir: dir, Kind: registration.DRAPlugin, OnRegister: r.addDriver,
		OnRemove: r.removeDriver, Log: log}
	return r
}

// Run scans the registration directory for DRA drivers until ctx ends, and maintains connections to
// them.
func (r *driverRegistry) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer r.serving.Wait()
	defer cancel()
	r.mu.Lock()
	r.runCtx = ctx
	for _, p := range r.plugins {
		r.startFollowing(p)
	}
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.runCtx = nil
		for _, p := range r.plugins {
			p.stop = nil
		}
	}()
	t := time.NewTicker(scanEvery)
	defer t.Stop()
	for {
		r.folder.Scan(ctx)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-t.C:
		}
	}
}

// startFollowing starts to maintain the connection to a plugin and to read its health reports. It
// does nothing while Run is not active. The caller holds the lock.
func (r *driverRegistry) startFollowing(p *driverPlugin) {
	if r.runCtx == nil {
		return
	}
	ctx, cancel := context.WithCancel(r.runCtx)
	p.stop = cancel
	r.serving.Go(func() {
		defer cancel()
		r.maintainConnection(ctx, p)
	})
}

func (r *driverRegistry) addDriver(_ context.Context, socket string, info *registration.PluginInfo) error {
	p, err := parseRegistration(info)
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.dropSocket(socket)
	r.order++
	p.order = r.order
	r.plugins[socket] = p
	r.startFollowing(p)
	r.log.Info("DRA driver found", "driver", p.name, "socket", p.endpoint)
	return nil
}

func (r *driverRegistry) removeDriver(socket string) {
	r.mu.Lock()
	r.dropSocket(socket)
	r.mu.Unlock()
	r.notifier.Notify()
}

// dropSocket removes the plugin that registered with this socket. The caller holds the lock.
func (r *driverRegistry) dropSocket(socket string) {
	if p := r.plugins[socket]; p != nil && p.stop != nil {
		p.stop()
	}
	delete(r.plugins, socket)
}

func (r *driverRegistry) setConnected(p *driverPlugin, is bool) {
	r.mu.Lock()
	news := p.connected != is
	p.connected = is
	r.mu.Unlock()
	if news {
		r.notifier.Notify()
	}
}

// Drivers returns the names of the connected DRA drivers, sorted.
func (r *driverRegistry) Drivers() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := map[string]bool{}
	for _, p := range r.plugins {
		if p.connected {
			all[p.name] = true
		}
	}
	return slices.Sorted(maps.Keys(all))
}

// Changes returns a channel that is signaled until ctx ends when a driver registers or unregisters,
// or when the reported health changes. It implements agent.Devices.
func (r *driverRegistry) Changes(ctx context.Context) <-chan struct{} {
	return r.notifier.Subscribe(ctx)
}

// parseRegistration validates the registration of a DRA driver and returns the plugin.
func parseRegistration(info *registration.PluginInfo) (*driverPlugin, error) {
	name := info.GetName()
	if msgs := validation.IsDNS1123Subdomain(name); len(msgs) > 0 || len(name) > resourcev1.DriverNameMaxLength {
		return nil, fmt.Errorf("a DRA driver registers as %q: a driver name is a DNS subdomain of at most %d bytes",
			truncateText(name), resourcev1.DriverNameMaxLength)
	}
	if !slices.Contains(info.GetSupportedVersions(), dra.DRAPluginService) {
		return nil,
			fmt.Errorf("DRA driver %s supports versions %q, and %s is required: install a newer release of the driver",
				name,
				info.GetSupportedVersions(), dra.DRAPluginService)
	}
	endpoint := filepath.Clean(strings.TrimPrefix(info.GetEndpoint(), "unix://"))
	if !filepath.IsAbs(endpoint) {
		return nil,
			fmt.Errorf("DRA driver %s registers with the endpoint %q: want the absolute path of a socket on the node",
				name, truncateText(info.GetEndpoint()))
	}
	return &driverPlugin{name: name, endpoint: endpoint, services: info.GetSupportedVersions()}, nil
}

// findEndpoint returns the path of a driver's socket. If the last scan of the registration
// directory did not find the driver, it scans again.
func (r *driverRegistry) findEndpoint(ctx context.Context, driver string) (string, error) {
	if e := r.newestEndpoint(driver); e != "" {
		return e, nil
	}
	r.folder.Scan(ctx)
	if e := r.newestEndpoint(driver); e != "" {
		return e, nil
	}
	return "", fmt.Errorf("%w: %s", ErrNoDriver, driver)
}

func (r *driverRegistry) newestEndpoint(name string) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	best := &driverPlugin{}
	for _, p := range r.plugins {
		if p.name == name && p.order > best.order {
			best = p
		}
	}
	return best.endpoint
}
