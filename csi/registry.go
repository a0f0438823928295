package csi

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"keelson.dev/keelson/internal/wakeup"
)

// ErrNoDriver is returned if a Registry has not found a CSI driver with the requested name on this
// node.
var ErrNoDriver = errors.New("driver name not found in the list of registered CSI drivers")

// RegistryConfig contains the folders in which a Registry searches for CSI drivers. Every is the
// interval of the scans.
type RegistryConfig struct {
	Plugins      string // folder with the sockets of drivers as NAME/csi.sock
	Registration string // folder for the kubelet's plugin registration; "": none
	Every        time.Duration
	Log          *slog.Logger // may be nil
}

// Registry finds the CSI drivers of this node, and keeps a connection to each of them. It is safe
// for concurrent use.
type Registry struct {
	cfg RegistryConfig

	scanning   sync.Mutex // serializes scans
	mu         sync.Mutex
	drivers    map[string]*Driver          // by driver name
	identity   map[string]string           // socket path → FileID of the socket that is connected
	registered map[string]registeredPlugin // by the path of the registration socket
	refused    map[string]string           // socket path → FileID, if the driver's name is in use
	changed    wakeup.Signal
	scanned    bool // at least one scan has finished
}

// NewRegistry returns a Registry for the folders in cfg. It scans nothing.
func NewRegistry(cfg RegistryConfig) *Registry {
	if cfg.Every == 0 {
		cfg.Every = 5 * time.Second
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return &Registry{cfg: cfg, drivers: map[string]*Driver{}, identity: map[string]string{},
		registered: map[string]registeredPlugin{},
		refused:    map[string]string{}, changed: wakeup.New()}
}

// Run scans the folders repeatedly until ctx is canceled. Then it closes the connections to all
// drivers.
func (r *Registry) Run(ctx context.Context) error {
	t := time.NewTicker(r.cfg.Every)
	defer t.Stop()
	for {
		r.Scan(ctx)
		select {
		case <-ctx.Done():
			r.mu.Lock()
			defer r.mu.Unlock()
			for name, d := range r.drivers {
				d.Close()
				delete(r.drivers, name)
			}
			clear(r.identity)
			return ctx.Err()
		case <-t.C:
		}
	}
}

// Changed returns a channel that receives a value after drivers were added or removed, and after
// the first scan. Several changes may cause only one value.
func (r *Registry) Changed() <-chan struct{} { return r.changed }

// Drivers returns the CSI drivers of this node, sorted by name. It returns nil before the first
// scan.
func (r *Registry) Drivers() []*Driver {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.scanned {
		return nil
	}
	out := []*Driver{}
	for _, name := range slices.Sorted(maps.Keys(r.drivers)) {
		out = append(out, r.drivers[name])
	}
	return out
}

// Driver returns the CSI driver with the given name. If no scan has found the driver, it scans
// again. If the driver is still missing, the error wraps ErrNoDriver and lists the searched
// folders.
func (r *Registry) Driver(ctx context.Context, name string) (*Driver, error) {
	if d := r.driverByName(name); d != nil {
		return d, nil
	}
	r.Scan(ctx)
	if d := r.driverByName(name); d != nil {
		return d, nil
	}
	where := filepath.Join(r.cfg.Plugins, "*", "csi.sock")
	if r.cfg.Registration != "" {
		where += " and " + filepath.Join(r.cfg.Registration, "*.sock")
	}
	return nil, fmt.Errorf("%w: %s (looked for in %s)", ErrNoDriver, name, where)
}

// FoundDriver returns the CSI driver with the given name if a scan has found it, otherwise nil. It
// does not scan.
func (r *Registry) FoundDriver(name string) *Driver { return r.driverByName(name) }

func (r *Registry) driverByName(name string) *Driver {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.drivers[name]
}

// Scan scans the folders once. It connects to new drivers, and removes drivers without a socket
// file. A driver that does not respond is logged, and the next Scan tries it again.
func (r *Registry) Scan(ctx context.Context) {
	r.scanning.Lock()
	defer r.scanning.Unlock()
	found := map[string]string{} // socket path → required driver name; "": any name
	if socks, err := filepath.Glob(filepath.Join(r.cfg.Plugins, "*", "csi.sock")); err == nil {
		for _, s := range socks {
			found[s] = ""
		}
	}
	if r.cfg.Registration != "" {
		r.scanRegistrations(ctx, found)
	}
	changed := r.dropMissing(found)
	for _, socket := range slices.Sorted(maps.Keys(found)) {
		changed = r.probeSocket(ctx, socket, found[socket]) || changed
	}
	r.mu.Lock()
	changed = changed || !r.scanned
	r.scanned = true
	r.mu.Unlock()
	if changed {
		r.changed.Send()
	}
}

// probeSocket connects to the CSI driver at a socket and adds it, unless it is already connected.
// If name is not "", the driver must have this name. probeSocket reports whether the set of drivers
// has changed.
func (r *Registry) probeSocket(ctx context.Context, socket, name string) (changed bool) {
	id := socketFileID(socket)
	r.mu.Lock()
	known := id == "" || r.identity[socket] == id || r.refused[socket] == id
	r.mu.Unlock()
	if known {
		return false
	}
	d, err := Dial(ctx, socket)
	if err == nil && name != "" && name != d.Name {
		err = fmt.Errorf("CSI driver at %s has the name %s, but is registered as %s", socket, d.Name, name)
		d.Close()
	}
	if err != nil {
		r.cfg.Log.Warn("CSI driver does not answer", "socket", socket, "err", err)
		return false
	}
	if old := r.driverByName(d.Name); old != nil && old.isAlive(ctx) {
		r.cfg.Log.Warn("two CSI drivers have the same name: the first one is kept", "driver", d.Name, "socket",
			old.socket, "other", socket)
		d.Close()
		r.mu.Lock()
		defer r.mu.Unlock()
		r.refused[socket] = id
		return false
	}
	r.cfg.Log.Info("CSI driver found", "driver", d.Name, "socket", socket, "node", d.NodeID)
	r.mu.Lock()
	defer r.mu.Unlock()
	if old := r.drivers[d.Name]; old != nil {
		r.refused[old.socket] = r.identity[old.socket]
		delete(r.identity, old.socket)
		old.Close()
	}
	r.drivers[d.Name], r.identity[socket] = d, id
	delete(r.refused, socket)
	return true
}

// dropMissing removes each driver with a socket that is not in found or was replaced by a new
// socket file. It reports whether the set of drivers has changed.
func (r *Registry) dropMissing(found map[string]string) (changed bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for name, d := range r.drivers {
		if _, ok := found[d.socket]; ok && socketFileID(d.socket) == r.identity[d.socket] {
			continue
		}
		r.cfg.Log.Info("CSI driver is gone", "driver", name)
		d.Close()
		delete(r.identity, d.socket)
		delete(r.drivers, name)
		clear(r.refused) // a refused driver may have the name of the removed one
		changed = true
	}
	maps.DeleteFunc(r.refused, func(socket, _ string) bool { _, ok := found[socket]; return !ok })
	return changed
}

// socketFileID returns an ID of the socket file at path, or "" if no file exists. A later socket at
// the same path has another ID. Connections to the socket do not change the ID.
func socketFileID(path string) string {
	st, err := os.Stat(path)
	if err != nil || st.Mode()&os.ModeSocket == 0 {
		return ""
	}
	sys, ok := st.Sys().(*syscall.Stat_t)
	if !ok {
		return fmt.Sprint(st.ModTime().UnixNano())
	}
	return fmt.Sprint(sys.Dev, sys.Ino, st.ModTime().UnixNano())
}
