package server

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/internal/wait"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
	"keelson.dev/keelson/raftstore"
)

// replicas knows the other replicas: where they are, from the raft membership,
// and whether they answer, by asking. It knows nothing that is not asked for
// again a second later.
type replicas struct {
	self    string
	cluster datadir.Cluster
	shared  string      // Config.SharedAPI
	ids     *identities // nil: identities are not compared
	members func() []raftstore.Member
	tls     func() *tls.Config // of now
	clients atomic.Pointer[replicaClients]
	log     *slog.Logger

	mu      sync.Mutex
	list    []*fleetv1.Replica
	ready   map[string]error     // name → nil when ready
	heard   map[string]time.Time // when a replica was ready the last time
	changed chan struct{}        // closed and replaced when list or ready changes
}

const (
	probeEvery = time.Second     // between the responses of all replicas and the next requests
	probeTime  = 2 * time.Second // of a request that a replica answers at once
)

func newReplicas(self string, cluster datadir.Cluster, members func() []raftstore.Member, client func() *tls.Config, log *slog.Logger) *replicas {
	r := &replicas{
		self: self, cluster: cluster, members: members, log: log, tls: client,
		ready:   map[string]error{},
		changed: make(chan struct{}),
	}
	r.renew()
	return r
}

// replicaClients are how the other replicas are asked.
type replicaClients struct {
	http    *http.Client // for questions that a replica answers at once
	patient *http.Client // for those that take their time; bounded by their context
}

// renew has new connections made by what is believed now. Those that there are end when what is under way has.
func (r *replicas) renew() {
	client := r.tls()
	transport := &http.Transport{TLSClientConfig: client, ForceAttemptHTTP2: true, MaxIdleConnsPerHost: 2, IdleConnTimeout: time.Minute}
	// What is asked every second is asked by HTTP/1.1: for each idle connection of HTTP/2 a replica that ends waits a second
	// longer, in case that a request is on its way.
	old := client.Clone()
	old.NextProtos = []string{"http/1.1"}
	quick := &http.Transport{TLSClientConfig: old, MaxIdleConnsPerHost: 2, IdleConnTimeout: time.Minute}
	was := r.clients.Swap(&replicaClients{http: &http.Client{Timeout: probeTime, Transport: identified{quick, r.ids}}, patient: &http.Client{Transport: identified{transport, r.ids}}})
	if was != nil {
		was.http.CloseIdleConnections()
		was.patient.CloseIdleConnections()
	}
}

// List returns the replicas and a channel that is closed when the answer has changed.
func (r *replicas) List() ([]*fleetv1.Replica, <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.list, r.changed
}

// Alive says whether a replica answered the last time it was asked; the replica itself is.
func (r *replicas) Alive(name string) bool {
	if name == r.self {
		return true
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	err, known := r.ready[name]
	return known && err == nil
}

// Problem says why a replica did not answer the last time it was asked; nil when it did.
func (r *replicas) Problem(name string) error {
	if name == r.self {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	err, known := r.ready[name]
	if !known {
		return errors.New("it has not been asked yet")
	}
	return err
}

// heardOf is when a replica was ready the last time that it was asked; zero when it never was.
func (r *replicas) heardOf(name string) time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.heard[name]
}

// otherAddresses returns where a replica listens besides its ports for clients and agents: its port for replicas, and
// the shared API address, which any replica may hold.
func otherAddresses(c datadir.Cluster, host, shared string) []string {
	out := []string{datadir.HostPort(host, c.PeerPort)}
	if shared != "" {
		out = append(out, datadir.HostPort(shared, c.APIPort))
	}
	return out
}

// listening returns every address and TCP port on which a replica listens.
func (r *replicas) listening() []netip.AddrPort {
	list, _ := r.List()
	var out []netip.AddrPort
	for _, m := range list {
		for _, text := range slices.Concat([]string{m.ApiAddress, m.FleetAddress}, m.OtherAddresses) {
			if ap, err := netip.ParseAddrPort(text); err == nil {
				out = append(out, netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port()))
			}
		}
	}
	return out
}

// readyAPIs are the API addresses of the ready replicas, in order, and a channel
// that is closed when that has changed.
func (r *replicas) readyAPIs() ([]netip.AddrPort, <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []netip.AddrPort
	for _, m := range r.list {
		if err, known := r.ready[m.Name]; known && err == nil {
			if ap, err := netip.ParseAddrPort(m.ApiAddress); err == nil {
				out = append(out, ap)
			}
		}
	}
	slices.SortFunc(out, netip.AddrPort.Compare)
	return out, r.changed
}

// Run asks every replica for readiness once a second, until ctx ends.
func (r *replicas) Run(ctx context.Context) error {
	for {
		r.round(ctx)
		if err := wait.Delay(ctx, probeEvery); err != nil {
			return err
		}
	}
}

func (r *replicas) round(ctx context.Context) {
	members := r.members()
	list := make([]*fleetv1.Replica, 0, len(members))
	for _, m := range members {
		host, _, err := net.SplitHostPort(m.Address)
		if err != nil {
			r.log.Error("a member's address", "replica", m.ID, "address", m.Address, "err", err)
			continue
		}
		list = append(list, &fleetv1.Replica{Name: m.ID, FleetAddress: datadir.HostPort(host, r.cluster.FleetPort), ApiAddress: datadir.HostPort(host, r.cluster.APIPort),
			OtherAddresses: otherAddresses(r.cluster, host, r.shared)})
	}
	slices.SortFunc(list, func(a, b *fleetv1.Replica) int { return compare(a.Name, b.Name) })
	var wg sync.WaitGroup
	errs := make([]error, len(list))
	for i, m := range list {
		wg.Go(func() { errs[i] = r.probe(ctx, m.ApiAddress) })
	}
	wg.Wait()
	if ctx.Err() == nil {
		r.learn(list, errs)
	}
}

func compare(a, b string) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

func (r *replicas) learn(list []*fleetv1.Replica, errs []error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	same := slices.EqualFunc(list, r.list, func(a, b *fleetv1.Replica) bool {
		return a.Name == b.Name && a.ApiAddress == b.ApiAddress && a.FleetAddress == b.FleetAddress &&
			slices.Equal(a.OtherAddresses, b.OtherAddresses)
	})
	ready, heard := make(map[string]error, len(list)), make(map[string]time.Time, len(list))
	for i, m := range list {
		ready[m.Name], heard[m.Name] = errs[i], r.heard[m.Name]
		if errs[i] == nil {
			heard[m.Name] = time.Now()
		}
		if was, known := r.ready[m.Name]; !known || (was == nil) != (errs[i] == nil) {
			same = false
			r.log.Info("replica readiness", "replica", m.Name, "ready", errs[i] == nil, "reason", errs[i])
		}
	}
	r.ready, r.heard = ready, heard
	if same {
		return
	}
	r.list = list
	close(r.changed)
	r.changed = make(chan struct{})
}

func (r *replicas) probe(ctx context.Context, address string) error {
	resp, err := r.get(ctx, address, "/readyz")
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, 4096))
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("/readyz: %s", resp.Status)
	}
	return nil
}

func (r *replicas) get(ctx context.Context, address, path string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+address+path, nil)
	if err != nil {
		return nil, err
	}
	return r.clients.Load().http.Do(req)
}

// Stages asks the other ready replicas for their part of a timeline.
func (r *replicas) Stages(ctx context.Context, traceID string) []api.Stage {
	list, _ := r.List()
	parts := make([][]api.Stage, len(list))
	var wg sync.WaitGroup
	for i, m := range list {
		if m.Name == r.self || !r.Alive(m.Name) {
			continue
		}
		wg.Go(func() {
			stages, err := r.stagesOf(ctx, m.ApiAddress, traceID)
			if err != nil {
				r.log.Warn("asking a replica for its part of a timeline", "replica", m.Name, "err", err)
			}
			parts[i] = stages
		})
	}
	wg.Wait()
	return slices.Concat(parts...)
}

func (r *replicas) stagesOf(ctx context.Context, address, traceID string) ([]api.Stage, error) {
	resp, err := r.get(ctx, address, "/timeline/"+traceID+"?local=true")
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("/timeline: %s", resp.Status)
	}
	var out []api.Stage
	if err := json.NewDecoder(io.LimitReader(resp.Body, 8<<20)).Decode(&out); err != nil {
		return nil, fmt.Errorf("/timeline: %w", err)
	}
	return out, nil
}
