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
)

// ErrNoDriver says that no driver of that name runs on the node.
var ErrNoDriver = errors.New("driver name not found in the list of registered CSI drivers")

// RegistryConfig says where drivers are looked for.
type RegistryConfig struct {
	Plugins      string // folders NAME/csi.sock below it are drivers
	Registration string // sockets below it speak the kubelet's plugin registration; "" = none
	Every        time.Duration
	Log          *slog.Logger // may be nil
}

// Registry knows the drivers of this node.
type Registry struct {
	cfg RegistryConfig

	scanning sync.Mutex // one scan at a time
	mu       sync.Mutex
	drivers  map[string]*Driver // by name
	identity map[string]string  // socket → inode and time of the file that was dialled
	told     map[string]plugin  // registration sockets that were answered; of the scan
	refused  map[string]string  // socket → fileID of drivers whose name another one has
	changed  chan struct{}
	looked   bool // a scan has ended
}

// NewRegistry starts nothing.
func NewRegistry(cfg RegistryConfig) *Registry {
	if cfg.Every == 0 {
		cfg.Every = 5 * time.Second
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return &Registry{cfg: cfg, drivers: map[string]*Driver{}, identity: map[string]string{}, told: map[string]plugin{},
		refused: map[string]string{}, changed: make(chan struct{}, 1)}
}

// Run looks for drivers that come and go until ctx ends.
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

// Changed delivers a note after drivers came or went, and after the first look.
func (r *Registry) Changed() <-chan struct{} { return r.changed }

// Drivers lists what is registered, by name; nil until the folders have been looked at for the first time.
func (r *Registry) Drivers() []*Driver {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.looked {
		return nil
	}
	out := []*Driver{}
	for _, name := range slices.Sorted(maps.Keys(r.drivers)) {
		out = append(out, r.drivers[name])
	}
	return out
}

// Driver returns a driver, looking for it now when it is not known yet. The error is ErrNoDriver with the name and where
// it was looked for.
func (r *Registry) Driver(ctx context.Context, name string) (*Driver, error) {
	if d := r.get(name); d != nil {
		return d, nil
	}
	r.Scan(ctx)
	if d := r.get(name); d != nil {
		return d, nil
	}
	where := filepath.Join(r.cfg.Plugins, "*", "csi.sock")
	if r.cfg.Registration != "" {
		where += " and " + filepath.Join(r.cfg.Registration, "*.sock")
	}
	return nil, fmt.Errorf("%w: %s (looked for in %s)", ErrNoDriver, name, where)
}

// Known returns a driver that has been found, and nil where there is none of that name.
func (r *Registry) Known(name string) *Driver { return r.get(name) }

func (r *Registry) get(name string) *Driver {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.drivers[name]
}

// Scan looks at the folders once. What does not answer is logged and tried again at the next scan.
func (r *Registry) Scan(ctx context.Context) {
	r.scanning.Lock()
	defer r.scanning.Unlock()
	found := map[string]string{} // socket → name it has to have, "" = any
	if socks, err := filepath.Glob(filepath.Join(r.cfg.Plugins, "*", "csi.sock")); err == nil {
		for _, s := range socks {
			found[s] = ""
		}
	}
	if r.cfg.Registration != "" {
		r.registrations(ctx, found)
	}
	changed := r.drop(found)
	for _, socket := range slices.Sorted(maps.Keys(found)) {
		changed = r.look(ctx, socket, found[socket]) || changed
	}
	r.mu.Lock()
	changed = changed || !r.looked
	r.looked = true
	r.mu.Unlock()
	if changed {
		select {
		case r.changed <- struct{}{}:
		default:
		}
	}
}

// look asks who is behind a socket, unless that is known. name is the one it has to have, "" = any.
func (r *Registry) look(ctx context.Context, socket, name string) (changed bool) {
	id := fileID(socket)
	r.mu.Lock()
	known := id == "" || r.identity[socket] == id || r.refused[socket] == id
	r.mu.Unlock()
	if known {
		return false
	}
	d, err := Dial(ctx, socket)
	if err == nil && name != "" && name != d.Name {
		err = fmt.Errorf("CSI driver at %s calls itself %s, registered as %s", socket, d.Name, name)
		d.Close()
	}
	if err != nil {
		r.cfg.Log.Warn("CSI driver does not answer", "socket", socket, "err", err)
		return false
	}
	if old := r.get(d.Name); old != nil && old.answers(ctx) {
		r.cfg.Log.Warn("two CSI drivers have one name: the one that was first stays", "driver", d.Name, "socket",
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

// drop forgets drivers whose socket is gone or was made anew.
func (r *Registry) drop(found map[string]string) (changed bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for name, d := range r.drivers {
		if _, ok := found[d.socket]; ok && fileID(d.socket) == r.identity[d.socket] {
			continue
		}
		r.cfg.Log.Info("CSI driver is gone", "driver", name)
		d.Close()
		delete(r.identity, d.socket)
		delete(r.drivers, name)
		clear(r.refused) // one of them may have its name
		changed = true
	}
	maps.DeleteFunc(r.refused, func(socket, _ string) bool { _, ok := found[socket]; return !ok })
	return changed
}

// fileID tells one socket file from the next of the same name; "" when there is none. Times that
// mere use changes have no part in it: a connection to a socket is an access of its file.
func fileID(path string) string {
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
