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

// registry knows the DRA drivers of this node by the sockets at which they register, as they do with a kubelet.
type registry struct {
	folder csi.Folder
	log    *slog.Logger

	mu    sync.Mutex
	known map[string]plugin // by registration socket
	order int
}

// plugin is a driver that registered.
type plugin struct {
	name     string
	endpoint string
	order    int // the newest of a name is used: the older one is about to end
}

func newRegistry(dir string, log *slog.Logger) *registry {
	r := &registry{log: log, known: map[string]plugin{}}
	r.folder = csi.Folder{Dir: dir, Kind: registration.DRAPlugin, Came: r.came, Gone: r.gone, Log: log}
	return r
}

// Run looks for drivers that come and go until ctx ends.
func (r *registry) Run(ctx context.Context) error {
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

func (r *registry) came(_ context.Context, socket string, info *registration.PluginInfo) error {
	name, endpoint, err := usable(info)
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.order++
	r.known[socket] = plugin{name: name, endpoint: endpoint, order: r.order}
	r.log.Info("DRA driver found", "driver", name, "socket", endpoint)
	return nil
}

func (r *registry) gone(socket string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.known, socket)
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
	r.folder.Scan(ctx)
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
