package membership

import (
	"bytes"
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
	"keelson.dev/keelson/controlplane/api/clusterhttp"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/internal/wait"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
	"keelson.dev/keelson/raftstore"
)

// Peers sends requests to the other replicas, at their addresses in the raft configuration. Its
// method Run checks every second which replicas are ready. All methods are safe for concurrent use.
type Peers struct {
	selfName      string
	cluster       datadir.Cluster
	sharedAddress string           // virtual IP address of the API; may be empty
	identities    *identityChecker // records the cluster identities in responses; may be nil
	listMembers   func() []raftstore.Member
	currentTLS    func() *tls.Config // returns the current client configuration
	clients       atomic.Pointer[peerClients]
	log           *slog.Logger

	mu          sync.Mutex
	replicas    []*fleetv1.Replica
	probeErrors map[string]error     // the error of the last probe by replica name; nil if the replica was ready
	lastContact map[string]time.Time // the time of the last successful probe, by replica name
	changed     chan struct{}        // closed and replaced when replicas or the readiness of a replica changes
}

const (
	probeInterval = time.Second     // pause between the end of one round of probes and the next round
	probeTimeout  = 2 * time.Second // timeout of a request to which a replica responds immediately
)

func newPeers(
	self string, cluster datadir.Cluster, listMembers func() []raftstore.Member, currentTLS func() *tls.Config,
	log *slog.Logger,
) *Peers {
	r := &Peers{
		selfName: self, cluster: cluster, listMembers: listMembers, log: log, currentTLS: currentTLS,
		probeErrors: map[string]error{},
		changed:     make(chan struct{}),
	}
	r.Reconnect()
	return r
}

// peerClients are the two HTTP clients for requests to other replicas. They differ in the timeout,
// and use the same TLS configuration.
type peerClients struct {
	shortTimeout *http.Client // for requests to which a replica responds immediately; with probeTimeout
	noTimeout    *http.Client // for all other requests; the context of a request limits its duration
}

// Reconnect replaces the HTTP clients, so that new connections use the current TLS configuration.
// Connections of the previous clients are closed as soon as they are idle.
func (r *Peers) Reconnect() {
	tlsConfig := r.currentTLS()
	transport := &http.Transport{TLSClientConfig: tlsConfig, ForceAttemptHTTP2: true, MaxIdleConnsPerHost: 2,
		IdleConnTimeout: time.Minute}
	// Probes use HTTP/1.1. When a replica shuts down, its HTTP server waits one second longer for
	// an idle HTTP/2 connection, because the client may just have sent a request.
	http1Config := tlsConfig.Clone()
	http1Config.NextProtos = []string{"http/1.1"}
	http1Transport := &http.Transport{TLSClientConfig: http1Config, MaxIdleConnsPerHost: 2,
		IdleConnTimeout: time.Minute}
	previous :=
		r.clients.Swap(&peerClients{shortTimeout: &http.Client{Timeout: probeTimeout,
			Transport: identityTransport{http1Transport, r.identities}},
			noTimeout: &http.Client{Transport: identityTransport{transport, r.identities}}})
	if previous != nil {
		previous.shortTimeout.CloseIdleConnections()
		previous.noTimeout.CloseIdleConnections()
	}
}

// ListReplicas returns all replicas, including this replica. The channel is closed when the list or
// the readiness of a replica changes.
func (r *Peers) ListReplicas() ([]*fleetv1.Replica, <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.replicas, r.changed
}

// IsReady reports whether the replica with the given name was ready when it was last checked. It
// always returns true for this replica.
func (r *Peers) IsReady(name string) bool {
	if name == r.selfName {
		return true
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	err, known := r.probeErrors[name]
	return known && err == nil
}

// ReadinessError returns the reason why the replica with the given name was not ready when it was
// last checked. It returns nil if the replica was ready, or if it is this replica. A replica that
// was not checked yet is not ready.
func (r *Peers) ReadinessError(name string) error {
	if name == r.selfName {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	err, known := r.probeErrors[name]
	if !known {
		return errors.New("it has not been probed yet")
	}
	return err
}

// LastContact returns when the replica with the given name was last found to be ready. It returns
// the zero time if it never was.
func (r *Peers) LastContact(name string) time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.lastContact[name]
}

// otherListenAddresses returns addresses on which the replica at host listens, in addition to its
// API port and its port for agents. These are its peer port, and the API port at sharedAddress, the
// virtual IP address of the API. Any replica can have that address; it may be empty.
func otherListenAddresses(c datadir.Cluster, host, sharedAddress string) []string {
	out := []string{datadir.HostPort(host, c.PeerPort)}
	if sharedAddress != "" {
		out = append(out, datadir.HostPort(sharedAddress, c.APIPort))
	}
	return out
}

// ListenAddresses returns the address and the TCP port of every listener of every replica.
func (r *Peers) ListenAddresses() []netip.AddrPort {
	list, _ := r.ListReplicas()
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

// ReadyAPIs returns the addresses of the APIs of all ready replicas, sorted. The channel is closed
// when the list of replicas or the readiness of a replica changes.
func (r *Peers) ReadyAPIs() ([]netip.AddrPort, <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []netip.AddrPort
	for _, m := range r.replicas {
		if err, known := r.probeErrors[m.Name]; known && err == nil {
			if ap, err := netip.ParseAddrPort(m.ApiAddress); err == nil {
				out = append(out, ap)
			}
		}
	}
	slices.SortFunc(out, netip.AddrPort.Compare)
	return out, r.changed
}

// Run checks every second which replicas are ready, by a request to each of them, until ctx ends.
func (r *Peers) Run(ctx context.Context) error {
	for {
		r.probeAll(ctx)
		if err := wait.Delay(ctx, probeInterval); err != nil {
			return err
		}
	}
}

func (r *Peers) probeAll(ctx context.Context) {
	members := r.listMembers()
	list := make([]*fleetv1.Replica, 0, len(members))
	for _, m := range members {
		host, _, err := net.SplitHostPort(m.Address)
		if err != nil {
			r.log.Error("the address of a member is invalid", "replica", m.ID, "address", m.Address, "err", err)
			continue
		}
		list = append(list, &fleetv1.Replica{Name: m.ID, FleetAddress: datadir.HostPort(host, r.cluster.FleetPort),
			ApiAddress:     datadir.HostPort(host, r.cluster.APIPort),
			OtherAddresses: otherListenAddresses(r.cluster, host, r.sharedAddress)})
	}
	slices.SortFunc(list, func(a, b *fleetv1.Replica) int { return compareNames(a.Name, b.Name) })
	var wg sync.WaitGroup
	errs := make([]error, len(list))
	for i, m := range list {
		wg.Go(func() { errs[i] = r.probeReady(ctx, m.ApiAddress) })
	}
	wg.Wait()
	if ctx.Err() == nil {
		r.recordProbes(list, errs)
	}
}

func compareNames(a, b string) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

// recordProbes stores which replicas were ready in one round of checks. errs[i] is the reason why
// replicas[i] was not ready, or nil. If the list or the readiness of a replica has changed,
// recordProbes closes the channel that ListReplicas returned.
func (r *Peers) recordProbes(replicas []*fleetv1.Replica, errs []error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	same := slices.EqualFunc(replicas, r.replicas, func(a, b *fleetv1.Replica) bool {
		return a.Name == b.Name && a.ApiAddress == b.ApiAddress && a.FleetAddress == b.FleetAddress &&
			slices.Equal(a.OtherAddresses, b.OtherAddresses)
	})
	probeErrors, lastContact := make(map[string]error, len(replicas)), make(map[string]time.Time, len(replicas))
	for i, m := range replicas {
		probeErrors[m.Name], lastContact[m.Name] = errs[i], r.lastContact[m.Name]
		if errs[i] == nil {
			lastContact[m.Name] = time.Now()
		}
		if was, known := r.probeErrors[m.Name]; !known || (was == nil) != (errs[i] == nil) {
			same = false
			r.log.Info("replica readiness", "replica", m.Name, "ready", errs[i] == nil, "reason", errs[i])
		}
	}
	r.probeErrors, r.lastContact = probeErrors, lastContact
	if same {
		return
	}
	r.replicas = replicas
	close(r.changed)
	r.changed = make(chan struct{})
}

func (r *Peers) probeReady(ctx context.Context, address string) error {
	resp, err := r.getAPI(ctx, address, "/readyz")
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

func (r *Peers) getAPI(ctx context.Context, address, path string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+address+path, nil)
	if err != nil {
		return nil, err
	}
	return r.clients.Load().shortTimeout.Do(req)
}

// FetchStages requests the stages of a trace from the other ready replicas, and returns them as one
// list. A stage is a measured step in the processing of a request (api.Stage).
func (r *Peers) FetchStages(ctx context.Context, traceID string) []api.Stage {
	list, _ := r.ListReplicas()
	parts := make([][]api.Stage, len(list))
	var wg sync.WaitGroup
	for i, m := range list {
		if m.Name == r.selfName || !r.IsReady(m.Name) {
			continue
		}
		wg.Go(func() {
			stages, err := r.fetchStages(ctx, m.ApiAddress, traceID)
			if err != nil {
				r.log.Warn("cannot fetch the timeline from a replica", "replica", m.Name, "err", err)
			}
			parts[i] = stages
		})
	}
	wg.Wait()
	return slices.Concat(parts...)
}

func (r *Peers) fetchStages(ctx context.Context, address, traceID string) ([]api.Stage, error) {
	resp, err := r.getAPI(ctx, address, "/timeline/"+traceID+"?local=true")
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

// maxHeartbeats is the maximum size of a response with the heartbeats of nodes, in bytes. Each node
// needs its name and about 20 bytes.
const maxHeartbeats = 4 << 20

// FetchHeartbeats requests the time of the last heartbeat of each node from the other ready
// replicas. The result contains one map from node names to times for each replica. The map of a
// replica is nil if the replica is not ready, did not respond, or is this replica.
func (r *Peers) FetchHeartbeats(ctx context.Context) []map[string]time.Time {
	list, _ := r.ListReplicas()
	parts := make([]map[string]time.Time, len(list))
	var wg sync.WaitGroup
	for i, m := range list {
		if m.Name == r.selfName || !r.IsReady(m.Name) {
			continue
		}
		wg.Go(func() {
			part, err := r.fetchHeartbeats(ctx, m.ApiAddress)
			if err != nil {
				r.log.Debug("cannot fetch the heartbeats from a replica", "replica", m.Name, "err", err)
			}
			parts[i] = part
		})
	}
	wg.Wait()
	return parts
}

func (r *Peers) fetchHeartbeats(ctx context.Context, address string) (map[string]time.Time, error) {
	resp, err := r.getAPI(ctx, address, api.PathClusterHeartbeats)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %s", api.PathClusterHeartbeats, resp.Status)
	}
	var millis map[string]int64
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxHeartbeats)).Decode(&millis); err != nil {
		return nil, fmt.Errorf("%s: %w", api.PathClusterHeartbeats, err)
	}
	out := make(map[string]time.Time, len(millis))
	for node, m := range millis {
		out[node] = time.UnixMilli(m)
	}
	return out, nil
}

// SendRequest sends a request to the API server of another replica. The API server has the same
// host as peerAddress, which is the replica's peer address. The request has no timeout except the
// end of ctx. headers contains further headers as alternating names and values.
func (r *Peers) SendRequest(ctx context.Context, method, peerAddress, path string, body []byte, headers ...string) (
	*http.Response, error,
) {
	host, _, err := net.SplitHostPort(peerAddress)
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, method, "https://"+datadir.HostPort(host, r.cluster.APIPort)+path,
		bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set(clusterhttp.HeaderForwarded, r.selfName)
	for i := 0; i+1 < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	return r.clients.Load().noTimeout.Do(req)
}

// GetFromPeer sends a GET request to the API server of another replica. The API server has the same
// host as peerAddress, which is the replica's peer address. The request fails after probeTimeout,
// so it is for paths to which a replica responds immediately.
func (r *Peers) GetFromPeer(ctx context.Context, peerAddress, path string) (*http.Response, error) {
	host, _, err := net.SplitHostPort(peerAddress)
	if err != nil {
		return nil, err
	}
	return r.getAPI(ctx, datadir.HostPort(host, r.cluster.APIPort), path)
}
