package session

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"

	kbackoff "keelson.dev/keelson/internal/backoff"
	"keelson.dev/keelson/internal/wait"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

const (
	maxMessage   = 16 << 20
	replicasFile = "replicas.json"
	// streamWindow is the number of unread bytes that a replica may send on a stream; connWindow,
	// on a connection.
	streamWindow = 1 << 20
	connWindow   = 4 << 20
)

var (
	// tcpKeepAlive makes the kernel detect connections to a peer that has vanished. clientKeepalive
	// also detects a hung peer process; its interval is longer because its messages cost more.
	tcpKeepAlive    = net.KeepAliveConfig{Enable: true, Idle: 2 * time.Second, Interval: time.Second, Count: 3}
	clientKeepalive = keepalive.ClientParameters{Time: 30 * time.Second, Timeout: 5 * time.Second,
		PermitWithoutStream: true}
	connectParams = grpc.ConnectParams{
		Backoff: backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.3,
			MaxDelay: 2 * time.Second},
		MinConnectTimeout: 2 * time.Second,
	}
)

// replicaList is the list of control-plane replicas, with a connection to each of them. The
// replicas report the addresses, which are stored in replicasFile.
type replicaList struct {
	log  *slog.Logger
	file string
	seed []string // configured addresses

	mu       sync.Mutex
	reported map[*replicaLink][]string // addresses that each replica reports on its open standby stream
	learned  []string                  // union of the reported addresses
	// no learned replica responds: also connect to the configured addresses
	useSeed            bool
	changed            chan struct{} // closed and replaced when learned or useSeed changes
	linkByAddress      map[string]*replicaLink
	addressesByReplica map[string][]string // key: fleet address; values: addresses on which that replica listens
}

// replicaLink is the gRPC connection to one replica. It carries the standby stream, tunnels, and
// possibly the session.
type replicaLink struct {
	address string
	conn    *grpc.ClientConn
	stop    context.CancelFunc

	mu           sync.Mutex
	avoidedUntil time.Time // until then, the session prefers another replica
}

func newReplicaList(log *slog.Logger, dir string, seed []string) *replicaList {
	return &replicaList{log: log, file: filepath.Join(dir, replicasFile), seed: seed, changed: make(chan struct{}),
		linkByAddress: make(map[string]*replicaLink), reported: make(map[*replicaLink][]string),
		addressesByReplica: make(map[string][]string)}
}

// loadFiles loads the addresses of replicas from replicasFile and replicaAddressesFile. A missing
// file is not an error.
func (r *replicaList) loadFiles() error {
	data, err := os.ReadFile(r.file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read list of replicas: %w", err)
	}
	var list []string
	if err := json.Unmarshal(data, &list); err != nil {
		return fmt.Errorf("read list of replicas %s: %w", r.file, err)
	}
	listens, err := loadAddresses(r.addressesPath())
	r.mu.Lock()
	defer r.mu.Unlock()
	r.learned = list
	if err == nil {
		r.addressesByReplica = listens
	}
	return err
}

// recordReplicas stores replicas as the list that the replica sender reports, and updates the
// learned addresses, in memory and on disk. sender is nil for an enrollment response. The learned
// addresses are the union of all reports, because a replica that lags behind or is partitioned
// omits new replicas. An address is dropped only when no replica reports it. An empty list is
// ignored.
func (r *replicaList) recordReplicas(sender *replicaLink, replicas []*fleetv1.Replica) {
	var addresses []string
	for _, x := range replicas {
		if x.FleetAddress != "" {
			addresses = append(addresses, x.FleetAddress)
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.storeAddresses(replicas)
	if sender != nil {
		if r.reported[sender] = addresses; len(addresses) == 0 {
			delete(r.reported, sender)
		}
		addresses = slices.Concat(slices.Collect(maps.Values(r.reported))...)
	}
	slices.Sort(addresses)
	addresses = slices.Compact(addresses)
	if len(addresses) == 0 || slices.Equal(addresses, r.learned) {
		return
	}
	r.log.Info("the list of replicas has changed", "replicas", addresses, "before", r.learned)
	r.learned = addresses
	close(r.changed)
	r.changed = make(chan struct{})
	data, err := json.Marshal(addresses)
	if err == nil {
		err = writeFile(r.file, data)
	}
	if err != nil {
		r.log.Warn("the list of replicas could not be stored", "err", err)
	}
}

// dropReport drops the list that the replica sender reported. It must be called when the replica's
// standby stream has ended. Addresses that no other replica reported are dropped when the next
// replica reports.
func (r *replicaList) dropReport(sender *replicaLink) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.reported, sender)
}

// wantedAddresses returns the replica addresses to connect to, and a channel that is closed when
// these addresses change. It returns the learned addresses. If useSeed is set or no address is
// learned, it adds the configured addresses.
func (r *replicaList) wantedAddresses() ([]string, <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case len(r.learned) == 0:
		return r.seed, r.changed
	case r.useSeed:
		all := append(slices.Clone(r.learned), r.seed...)
		slices.Sort(all)
		return slices.Compact(all), r.changed
	}
	return r.learned, r.changed
}

// setUseSeed sets whether to connect to the configured replica addresses in addition to the learned
// addresses.
func (r *replicaList) setUseSeed(enabled bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.useSeed == enabled {
		return
	}
	r.useSeed = enabled
	close(r.changed)
	r.changed = make(chan struct{})
}

func (r *replicaList) allLinks() []*replicaLink {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := make([]*replicaLink, 0, len(r.linkByAddress))
	for _, l := range r.linkByAddress {
		out = append(out, l)
	}
	return out
}

// maintainLinks keeps a connection (replicaLink) with a standby stream to every wanted replica
// address, until ctx ends.
func (s *Session) maintainLinks(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	r := s.replicas
	for {
		list, changed := r.wantedAddresses()
		for _, l := range r.allLinks() {
			if !slices.Contains(list, l.address) {
				r.mu.Lock()
				delete(r.linkByAddress, l.address)
				r.mu.Unlock()
				l.stop()
			}
		}
		// Random order per node: the first connected replica gets the session, and the nodes must
		// spread over the replicas.
		list = slices.Clone(list)
		rand.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
		for _, address := range list {
			r.mu.Lock()
			have := r.linkByAddress[address]
			r.mu.Unlock()
			if have != nil {
				continue
			}
			host, _, err := net.SplitHostPort(address)
			var conn *grpc.ClientConn
			if err == nil {
				conn, err = s.dialReplica(address, credentials.NewTLS(s.creds.id.tlsConfig(host)))
			}
			if err != nil {
				s.log.Error("replica skipped", "err", err)
				continue
			}
			lctx, stop := context.WithCancel(ctx)
			l := &replicaLink{address: address, conn: conn, stop: stop}
			r.mu.Lock()
			r.linkByAddress[address] = l
			r.mu.Unlock()
			conn.Connect()
			wg.Go(func() {
				defer conn.Close()
				s.maintainStandby(lctx, l)
			})
		}
		s.signalLinks()
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// sessionCandidates returns the replica connections in the order in which to try them for a
// session. Established connections come first, and replicas that are avoided after a failure come
// last. Connections of the same rank are in random order, so that the nodes of a failed replica
// spread over the other replicas.
func (r *replicaList) sessionCandidates(now time.Time) []*replicaLink {
	links := r.allLinks()
	rand.Shuffle(len(links), func(i, j int) { links[i], links[j] = links[j], links[i] })
	rank := func(l *replicaLink) int {
		n := 0
		if l.conn.GetState() != connectivity.Ready {
			n++
		}
		l.mu.Lock()
		defer l.mu.Unlock()
		if now.Before(l.avoidedUntil) {
			n += 2
		}
		return n
	}
	slices.SortStableFunc(links, func(a, b *replicaLink) int { return rank(a) - rank(b) })
	return links
}

func (l *replicaLink) avoidUntil(until time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.avoidedUntil = until
}

// maintainStandby keeps a standby stream open on the replica connection l until ctx ends, and opens
// it again after a failure. On this stream, a replica sends its list of replicas and requests for
// tunnels.
func (s *Session) maintainStandby(ctx context.Context, l *replicaLink) {
	delay := kbackoff.Backoff{Min: 100 * time.Millisecond, Max: 3 * time.Second, Jitter: 0.5}
	for ctx.Err() == nil {
		began := time.Now()
		err := s.runStandby(ctx, l)
		if ctx.Err() != nil {
			return
		}
		s.log.Debug("standby ended", "replica", l.address, "err", err)
		if time.Since(began) > 5*time.Second {
			delay.Reset()
		}
		if wait.Delay(ctx, delay.Next()) != nil {
			return
		}
	}
}

func (s *Session) runStandby(linked context.Context, l *replicaLink) error {
	ctx, cancel := context.WithCancel(linked)
	defer cancel()
	stream, err := fleetv1.NewFleetClient(l.conn).Standby(ctx, grpc.WaitForReady(true))
	if err != nil {
		return fmt.Errorf("open standby: %w", err)
	}
	hello := &fleetv1.StandbyUp{Kind: &fleetv1.StandbyUp_Hello{Hello: &fleetv1.StandbyHello{NodeName: s.cfg.NodeName}}}
	if err := stream.Send(hello); err != nil {
		return fmt.Errorf("open standby: %w", err)
	}
	up := &standbySender{stream: stream}
	defer s.replicas.dropReport(l)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() { s.sendProxyRevision(ctx, up) })
	wg.Go(func() { s.sendUsage(ctx, up) })
	for {
		m, err := stream.Recv()
		if err != nil {
			return err
		}
		switch k := m.Kind.(type) {
		case *fleetv1.StandbyDown_Replicas:
			s.replicas.recordReplicas(l, k.Replicas.Replicas)
		case *fleetv1.StandbyDown_Ask:
			// not bound to ctx: a tunnel may outlive the standby stream on which it was requested
			s.children.Go(func() { s.openTunnel(linked, l, up, k.Ask) })
		}
	}
}

// standbySender sends messages on a standby stream, one at a time. It is safe for concurrent use.
type standbySender struct {
	mu     sync.Mutex
	stream fleetv1.Fleet_StandbyClient
}

func (u *standbySender) sendUp(m *fleetv1.StandbyUp) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.stream.Send(m)
}

// sendProxyRevision sends, on a standby stream, the revision that the node's Service proxy has
// applied. It sends each time the revision increases, until ctx ends or sending fails.
func (s *Session) sendProxyRevision(ctx context.Context, up *standbySender) {
	sent, first := uint64(0), true
	for {
		rev, moved := s.reports.proxy.currentRevision()
		if first || rev > sent {
			if up.sendUp(&fleetv1.StandbyUp{Kind: &fleetv1.StandbyUp_ProxyRevision{ProxyRevision: rev}}) != nil {
				return // the receiving goroutine reports the error
			}
			sent, first = rev, false
		}
		select {
		case <-moved:
		case <-ctx.Done():
			return
		}
	}
}

// revisionProgress is a revision that only increases, with a channel that signals each increase.
type revisionProgress struct {
	mu      sync.Mutex
	value   uint64
	changed chan struct{}
}

func newRevisionProgress() *revisionProgress { return &revisionProgress{changed: make(chan struct{})} }

func (p *revisionProgress) advanceTo(v uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if v <= p.value {
		return
	}
	p.value = v
	close(p.changed)
	p.changed = make(chan struct{})
}

func (p *revisionProgress) currentRevision() (uint64, <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.value, p.changed
}
