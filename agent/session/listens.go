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

// replicaAddressesFile stores all host:port addresses on which each replica listens. It is separate
// from replicasFile, because earlier releases read replicasFile and cannot parse additional fields.
const replicaAddressesFile = "replica-addresses.json"

// storedAddresses is the JSON content of replicaAddressesFile.
type storedAddresses struct {
	Version   int                 `json:"version"` // currently 1
	Addresses map[string][]string `json:"listens"` // key: fleet address; values: host:port
}

func (r *replicaList) addressesPath() string {
	return filepath.Join(filepath.Dir(r.file), replicaAddressesFile)
}

// loadAddresses reads replicaAddressesFile at path. The result has the addresses on which each
// replica listens; its keys are fleet addresses. It is empty if the file is missing or has a later
// version.
func loadAddresses(path string) (map[string][]string, error) {
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return map[string][]string{}, nil
	}
	var stored storedAddresses
	if err == nil {
		err = json.Unmarshal(data, &stored)
	}
	if err != nil {
		return nil, fmt.Errorf("read addresses of replicas: %w", err)
	}
	if stored.Version != 1 || stored.Addresses == nil {
		return map[string][]string{}, nil
	}
	return stored.Addresses, nil
}

// maxStoredReplicas limits the replicas in replicaAddressesFile. If there are more, replicas that
// the current list does not contain are dropped.
const maxStoredReplicas = 64

// storeAddresses updates the addresses of the replicas in list, in memory and in
// replicaAddressesFile. The caller holds the lock. Replicas that are not in list are kept, because
// a replica that lags behind omits new replicas. They are dropped when the file would contain more
// than maxStoredReplicas.
func (r *replicaList) storeAddresses(list []*fleetv1.Replica) {
	changed := false
	next := maps.Clone(r.addressesByReplica)
	for _, x := range list {
		addresses := slices.DeleteFunc(slices.Concat([]string{x.FleetAddress, x.ApiAddress}, x.OtherAddresses),
			func(a string) bool { return a == "" })
		if x.FleetAddress == "" || slices.Equal(next[x.FleetAddress], addresses) {
			continue
		}
		if len(x.OtherAddresses) == 0 && len(next[x.FleetAddress]) > len(addresses) {
			continue // a replica of the previous release does not send OtherAddresses
		}
		next[x.FleetAddress], changed = addresses, true
	}
	if len(next) > maxStoredReplicas {
		maps.DeleteFunc(next, func(fleet string, _ []string) bool {
			return !slices.ContainsFunc(list, func(x *fleetv1.Replica) bool { return x.FleetAddress == fleet })
		})
	}
	if !changed {
		return
	}
	r.addressesByReplica = next
	data, err := json.Marshal(storedAddresses{Version: 1, Addresses: next})
	if err == nil {
		err = writeFile(r.addressesPath(), data)
	}
	if err != nil {
		r.log.Warn("the addresses of replicas could not be stored", "err", err)
	}
}

// ReplicaAddresses returns the addresses on which replicas listen: the addresses that replicas
// reported and the configured addresses. It implements agent.ControlPlane.
func (s *Session) ReplicaAddresses() []netip.AddrPort { return s.replicas.allAddresses() }

func (r *replicaList) allAddresses() []netip.AddrPort {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := slices.Concat(r.seed, r.learned)
	for _, list := range r.addressesByReplica {
		all = append(all, list...)
	}
	var out []netip.AddrPort
	for _, text := range all {
		if ap, err := netip.ParseAddrPort(text); err == nil {
			// host names are not resolved: replicas report their addresses
			out = append(out, netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port()))
		}
	}
	slices.SortFunc(out, netip.AddrPort.Compare)
	return slices.Compact(out)
}

// connectionState records whether a session with a replica is open, and the time of the last
// change.
type connectionState struct {
	mu        sync.Mutex
	connected bool
	since     time.Time
}

func newConnectionState(now time.Time) *connectionState { return &connectionState{since: now} }

func (o *connectionState) setConnected(up bool, now time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.connected, o.since = up, now
}

// Disconnected returns how long there has been no session with a replica, or 0 if a session is
// open. It implements agent.ControlPlane.
func (s *Session) Disconnected() time.Duration { return s.connection.disconnectedFor(time.Now()) }

func (o *connectionState) disconnectedFor(now time.Time) time.Duration {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.connected {
		return 0
	}
	return max(now.Sub(o.since), 0)
}
