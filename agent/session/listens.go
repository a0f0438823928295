package session

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// listensFile keeps the addresses on which replicas listen, beside replicasFile, whose form earlier releases read.
const listensFile = "replica-addresses.json"

// storedListens is the content of listensFile.
type storedListens struct {
	Version int                 `json:"version"` // 1
	Listens map[string][]string `json:"listens"` // by fleet address: host:port
}

func (r *replicas) listensFile() string { return filepath.Join(filepath.Dir(r.file), listensFile) }

// loadListens reads listensFile. A missing file, and a file of a later version, hold no addresses.
func loadListens(path string) (map[string][]string, error) {
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return map[string][]string{}, nil
	}
	var stored storedListens
	if err == nil {
		err = json.Unmarshal(data, &stored)
	}
	if err != nil {
		return nil, fmt.Errorf("read addresses of replicas: %w", err)
	}
	if stored.Version != 1 || stored.Listens == nil {
		return map[string][]string{}, nil
	}
	return stored.Listens, nil
}

// maxListens bounds the replicas whose addresses are kept.
const maxListens = 64

// learnListens stores the addresses on which replicas listen. It is called with the lock held. Addresses of a replica
// that the list does not name are kept until there are too many: a replica that lags behind leaves out new ones.
func (r *replicas) learnListens(list []*fleetv1.Replica) {
	changed := false
	next := maps.Clone(r.listens)
	for _, x := range list {
		addresses := slices.DeleteFunc(slices.Concat([]string{x.FleetAddress, x.ApiAddress}, x.OtherAddresses), func(a string) bool { return a == "" })
		if x.FleetAddress == "" || slices.Equal(next[x.FleetAddress], addresses) {
			continue
		}
		if len(x.OtherAddresses) == 0 && len(next[x.FleetAddress]) > len(addresses) {
			continue // a replica of the previous release does not name them
		}
		next[x.FleetAddress], changed = addresses, true
	}
	if len(next) > maxListens {
		maps.DeleteFunc(next, func(fleet string, _ []string) bool {
			return !slices.ContainsFunc(list, func(x *fleetv1.Replica) bool { return x.FleetAddress == fleet })
		})
	}
	if !changed {
		return
	}
	r.listens = next
	data, err := json.Marshal(storedListens{Version: 1, Listens: next})
	if err == nil {
		err = writeFile(r.listensFile(), data)
	}
	if err != nil {
		r.log.Warn("the addresses of replicas could not be stored", "err", err)
	}
}

// ReplicaAddresses implements agent.ControlPlane: what replicas have said, and the configured addresses.
func (s *Session) ReplicaAddresses() []netip.AddrPort { return s.replicas.addresses() }

func (r *replicas) addresses() []netip.AddrPort {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := slices.Concat(r.seed, r.learned)
	for _, list := range r.listens {
		all = append(all, list...)
	}
	var out []netip.AddrPort
	for _, text := range all {
		if ap, err := netip.ParseAddrPort(text); err == nil { // names are not resolved: they lead to learned addresses
			out = append(out, netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port()))
		}
	}
	slices.SortFunc(out, netip.AddrPort.Compare)
	return slices.Compact(out)
}

// online records whether there is a session, and since when not.
type online struct {
	mu    sync.Mutex
	up    bool
	since time.Time
}

func newOnline(now time.Time) *online { return &online{since: now} }

func (o *online) set(up bool, now time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.up, o.since = up, now
}

// Disconnected implements agent.ControlPlane.
func (s *Session) Disconnected() time.Duration { return s.online.disconnected(time.Now()) }

func (o *online) disconnected(now time.Time) time.Duration {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.up {
		return 0
	}
	return max(now.Sub(o.since), 0)
}
