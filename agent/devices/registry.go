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

// scanEvery is the interval between scans of the registration directory.
const scanEvery = 5 * time.Second

// registry tracks the DRA drivers of this node by their registration sockets, as kubelet does.
type registry struct {
	folder csi.RegistrationFolder
	log    *slog.Logger

	health *health

	mu       sync.Mutex
	known    map[string]*plugin // by registration socket
	order    int
	run      context.Context // context of Run; nil while Run is not active
	serving  sync.WaitGroup
	watchers agent.Watchers
}

// plugin is a registered driver.
type plugin struct {
	name     string
	endpoint string
	services []string
	order    int // registration order; of several plugins with one name, the newest is used, because the others are about to exit

	connected bool
	end       context.CancelFunc // nil while no connection is maintained
}

func newRegistry(dir string, log *slog.Logger) *registry {
	r := &registry{log: log, known: map[string]*plugin{}}
	r.health = newHealth(r.watchers.Tell)
	r.folder = csi.RegistrationFolder{Dir: dir, Kind: registration.DRAPlugin, OnRegister: r.came, OnRemove: r.gone, Log: log}
	return r
}

// Run scans for drivers until ctx ends, and maintains connections to them.
func (r *registry) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer r.serving.Wait()
	defer cancel()
	r.mu.Lock()
	r.run = ctx
	for _, p := range r.known {
		r.begin(p)
	}
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.run = nil
		for _, p := range r.known {
			p.end = nil
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

// begin starts maintaining the connection to a plugin if Run is active. The caller holds the lock.
func (r *registry) begin(p *plugin) {
	if r.run == nil {
		return
	}
	ctx, cancel := context.WithCancel(r.run)
	p.end = cancel
	r.serving.Go(func() {
		defer cancel()
		r.follow(ctx, p)
	})
}

func (r *registry) came(_ context.Context, socket string, info *registration.PluginInfo) error {
	p, err := usable(info)
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.drop(socket)
	r.order++
	p.order = r.order
	r.known[socket] = p
	r.begin(p)
	r.log.Info("DRA driver found", "driver", p.name, "socket", p.endpoint)
	return nil
}

func (r *registry) gone(socket string) {
	r.mu.Lock()
	r.drop(socket)
	r.mu.Unlock()
	r.watchers.Tell()
}

// drop removes the plugin that registered at a socket. The caller holds the lock.
func (r *registry) drop(socket string) {
	if p := r.known[socket]; p != nil && p.end != nil {
		p.end()
	}
	delete(r.known, socket)
}

func (r *registry) connected(p *plugin, is bool) {
	r.mu.Lock()
	news := p.connected != is
	p.connected = is
	r.mu.Unlock()
	if news {
		r.watchers.Tell()
	}
}

// Drivers returns the names of the connected drivers, in order.
func (r *registry) Drivers() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := map[string]bool{}
	for _, p := range r.known {
		if p.connected {
			all[p.name] = true
		}
	}
	return slices.Sorted(maps.Keys(all))
}

// Changes implements agent.Devices.
func (r *registry) Changes(ctx context.Context) <-chan struct{} { return r.watchers.Changes(ctx) }

// usable validates the registration of a driver.
func usable(info *registration.PluginInfo) (*plugin, error) {
	name := info.GetName()
	if msgs := validation.IsDNS1123Subdomain(name); len(msgs) > 0 || len(name) > resourcev1.DriverNameMaxLength {
		return nil, fmt.Errorf("a DRA driver registers as %q: a driver name is a DNS subdomain of at most %d bytes", shortened(name), resourcev1.DriverNameMaxLength)
	}
	if !slices.Contains(info.GetSupportedVersions(), dra.DRAPluginService) {
		return nil, fmt.Errorf("DRA driver %s supports versions %q, and %s is required: install a newer release of the driver", name,
			info.GetSupportedVersions(), dra.DRAPluginService)
	}
	endpoint := filepath.Clean(strings.TrimPrefix(info.GetEndpoint(), "unix://"))
	if !filepath.IsAbs(endpoint) {
		return nil, fmt.Errorf("DRA driver %s registers with the endpoint %q: want the absolute path of a socket on the node", name, shortened(info.GetEndpoint()))
	}
	return &plugin{name: name, endpoint: endpoint, services: info.GetSupportedVersions()}, nil
}

// endpoint returns the socket of a driver. If the last scan did not find the driver, it scans
// again.
func (r *registry) endpoint(ctx context.Context, name string) (string, error) {
	if e := r.newest(name); e != "" {
		return e, nil
	}
	r.folder.Scan(ctx)
	if e := r.newest(name); e != "" {
		return e, nil
	}
	return "", fmt.Errorf("%w: %s", ErrNoDriver, name)
}

func (r *registry) newest(name string) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	best := &plugin{}
	for _, p := range r.known {
		if p.name == name && p.order > best.order {
			best = p
		}
	}
	return best.endpoint
}
