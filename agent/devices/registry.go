package devices

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	dra "k8s.io/kubelet/pkg/apis/dra/v1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"keelson.dev/keelson/csi"
)

// ErrNoDriver says that no driver of that name is registered on the node.
var ErrNoDriver = errors.New("driver name not found in the list of registered DRA drivers")

// scanEvery is the time between two looks at the registration folder.
const scanEvery = 5 * time.Second

// maxPlugins is how many sockets of the registration folder are looked at.
const maxPlugins = 256

// registry knows the DRA drivers of this node by the sockets at which they register, as they do with a kubelet.
type registry struct {
	dir string // where they register; "" = nowhere
	log *slog.Logger

	scanning sync.Mutex // one scan at a time
	mu       sync.Mutex
	known    map[string]plugin // by registration socket
	order    int
}

// plugin is what is behind a registration socket.
type plugin struct {
	id       string // of the socket's file
	name     string // "" for what is no DRA driver
	endpoint string
	order    int // the newest of a name is used: the older one is about to end
}

// Run looks for drivers that come and go until ctx ends.
func (r *registry) Run(ctx context.Context) error {
	t := time.NewTicker(scanEvery)
	defer t.Stop()
	for {
		r.scan(ctx)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-t.C:
		}
	}
}

// scan looks at the folder once. What does not answer is logged and tried again at the next scan.
func (r *registry) scan(ctx context.Context) {
	if r.dir == "" {
		return
	}
	r.scanning.Lock()
	defer r.scanning.Unlock()
	sockets, err := filepath.Glob(filepath.Join(r.dir, "*.sock"))
	if err != nil {
		return
	}
	if len(sockets) > maxPlugins {
		r.log.Warn("too many plugins register: the rest is not looked at", "folder", r.dir, "sockets", len(sockets), "most", maxPlugins)
		sockets = sockets[:maxPlugins]
	}
	r.mu.Lock()
	for s := range r.known {
		if !slices.Contains(sockets, s) {
			delete(r.known, s)
		}
	}
	r.mu.Unlock()
	for _, s := range sockets {
		id := csi.FileID(s)
		r.mu.Lock()
		same := r.known[s].id == id
		r.mu.Unlock()
		if id == "" || same {
			continue
		}
		p := plugin{id: id}
		is, err := csi.Register(ctx, s, registration.DRAPlugin, func(_ context.Context, info *registration.PluginInfo) (err error) {
			p.name, p.endpoint, err = usable(info)
			return err
		})
		if err != nil {
			r.log.Warn("DRA driver does not register", "socket", s, "err", err)
			continue
		}
		r.mu.Lock()
		if is {
			r.order++
			p.order = r.order
			r.log.Info("DRA driver found", "driver", p.name, "socket", p.endpoint)
		}
		r.known[s] = p
		r.mu.Unlock()
	}
}

// usable judges what a driver says of itself.
func usable(info *registration.PluginInfo) (name, endpoint string, err error) {
	if !slices.Contains(info.GetSupportedVersions(), dra.DRAPluginService) {
		return "", "", fmt.Errorf("DRA driver %s speaks %q, of which none is %s: a newer release of the driver is needed", info.GetName(),
			info.GetSupportedVersions(), dra.DRAPluginService)
	}
	if info.GetName() == "" {
		return "", "", errors.New("a DRA driver registers without a name")
	}
	endpoint = filepath.Clean(strings.TrimPrefix(info.GetEndpoint(), "unix://"))
	if !filepath.IsAbs(endpoint) {
		return "", "", fmt.Errorf("DRA driver %s registers with the endpoint %q: it has to be the path of a socket on the node", info.GetName(), info.GetEndpoint())
	}
	return info.GetName(), endpoint, nil
}

// endpoint is the socket of a driver. One that the last look at the folder did not find is looked for.
func (r *registry) endpoint(ctx context.Context, name string) (string, error) {
	if e := r.newest(name); e != "" {
		return e, nil
	}
	r.scan(ctx)
	if e := r.newest(name); e != "" {
		return e, nil
	}
	return "", fmt.Errorf("%w: %s", ErrNoDriver, name)
}

func (r *registry) newest(name string) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var best plugin
	for _, p := range r.known {
		if p.name == name && p.order > best.order {
			best = p
		}
	}
	return best.endpoint
}
