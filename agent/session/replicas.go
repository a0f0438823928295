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
	// streamWindow is what a replica may send on a stream before it is read; connWindow on all of a connection.
	streamWindow = 1 << 20
	connWindow   = 4 << 20
)

var (
	// vanished has the kernel find connections whose other end is gone without a word; clientKeepalive finds programs that
	// hang, which costs much more.
	vanished        = net.KeepAliveConfig{Enable: true, Idle: 2 * time.Second, Interval: time.Second, Count: 3}
	clientKeepalive = keepalive.ClientParameters{Time: 30 * time.Second, Timeout: 5 * time.Second, PermitWithoutStream: true}
	connectParams   = grpc.ConnectParams{
		Backoff:           backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.3, MaxDelay: 2 * time.Second},
		MinConnectTimeout: 2 * time.Second,
	}
)

// replicas is the list of replicas, as learnt from the control plane and kept on disk, with a connection to each.
type replicas struct {
	log  *slog.Logger
	file string
	seed []string // configured addresses

	mu      sync.Mutex
	said    map[*link][]string // what each replica says that is listened to
	learned []string           // all that they name
	widened bool               // nothing learnt answers: try what is configured as well
	changed chan struct{}      // closed and replaced when learned changes
	open    map[string]*link
	listens map[string][]string // by fleet address: the addresses on which that replica listens
}

// link is the connection to one replica.
type link struct {
	address string
	conn    *grpc.ClientConn
	stop    context.CancelFunc

	mu      sync.Mutex
	shunned time.Time // the session is not to come here before, if it can go elsewhere
}

func newReplicas(log *slog.Logger, dir string, seed []string) *replicas {
	return &replicas{log: log, file: filepath.Join(dir, replicasFile), seed: seed, changed: make(chan struct{}), open: make(map[string]*link), said: make(map[*link][]string), listens: make(map[string][]string)}
}

// load reads the stored list; none is no error.
func (r *replicas) load() error {
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
	listens, err := loadListens(r.listensFile())
	r.mu.Lock()
	defer r.mu.Unlock()
	r.learned = list
	if err == nil {
		r.listens = listens
	}
	return err
}

// learn takes what a replica says of all of them; from is nil for what a node hears as it enrols. A replica that lags
// behind the others, or is cut off from them, leaves out those that came since: what any replica names is connected to,
// and only what none of them names is let go. An empty list says that the replica has no word in it.
func (r *replicas) learn(from *link, list []*fleetv1.Replica) {
	var addresses []string
	for _, x := range list {
		if x.FleetAddress != "" {
			addresses = append(addresses, x.FleetAddress)
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.learnListens(list)
	if from != nil {
		if r.said[from] = addresses; len(addresses) == 0 {
			delete(r.said, from)
		}
		addresses = slices.Concat(slices.Collect(maps.Values(r.said))...)
	}
	slices.Sort(addresses)
	addresses = slices.Compact(addresses)
	if len(addresses) == 0 || slices.Equal(addresses, r.learned) {
		return
	}
	r.log.Info("the replicas are others now", "replicas", addresses, "before", r.learned)
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

// forget takes no more notice of what a replica said that is not listened to any more. What it named is let go with the
// next word of another one.
func (r *replicas) forget(from *link) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.said, from)
}

// wanted is the list to be connected to: what the control plane says, and what is configured until it has spoken.
func (r *replicas) wanted() ([]string, <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case len(r.learned) == 0:
		return r.seed, r.changed
	case r.widened:
		all := append(slices.Clone(r.learned), r.seed...)
		slices.Sort(all)
		return slices.Compact(all), r.changed
	}
	return r.learned, r.changed
}

// widen says whether to try the configured addresses besides the learnt ones.
func (r *replicas) widen(on bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.widened == on {
		return
	}
	r.widened = on
	close(r.changed)
	r.changed = make(chan struct{})
}

func (r *replicas) links() []*link {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := make([]*link, 0, len(r.open))
	for _, l := range r.open {
		out = append(out, l)
	}
	return out
}

// connections keeps a link, with its standby stream, to every wanted replica until ctx ends.
func (s *Session) connections(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	r := s.replicas
	for {
		list, changed := r.wanted()
		for _, l := range r.links() {
			if !slices.Contains(list, l.address) {
				r.mu.Lock()
				delete(r.open, l.address)
				r.mu.Unlock()
				l.stop()
			}
		}
		// In an order of this node's own: the one that is reached first gets the session, and must not be the same for all.
		list = slices.Clone(list)
		rand.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
		for _, address := range list {
			r.mu.Lock()
			have := r.open[address]
			r.mu.Unlock()
			if have != nil {
				continue
			}
			host, _, err := net.SplitHostPort(address)
			var conn *grpc.ClientConn
			if err == nil {
				conn, err = s.dial(address, credentials.NewTLS(s.id.tls(host)))
			}
			if err != nil {
				s.log.Error("replica skipped", "err", err)
				continue
			}
			lctx, stop := context.WithCancel(ctx)
			l := &link{address: address, conn: conn, stop: stop}
			r.mu.Lock()
			r.open[address] = l
			r.mu.Unlock()
			conn.Connect()
			wg.Go(func() {
				defer conn.Close()
				s.standby(lctx, l)
			})
		}
		s.linksChanged()
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// candidates orders the links for a session: connected ones first, shunned ones last, else at random so that
// the nodes of a dead replica spread over the others.
func (r *replicas) candidates(now time.Time) []*link {
	links := r.links()
	rand.Shuffle(len(links), func(i, j int) { links[i], links[j] = links[j], links[i] })
	rank := func(l *link) int {
		n := 0
		if l.conn.GetState() != connectivity.Ready {
			n++
		}
		l.mu.Lock()
		defer l.mu.Unlock()
		if now.Before(l.shunned) {
			n += 2
		}
		return n
	}
	slices.SortStableFunc(links, func(a, b *link) int { return rank(a) - rank(b) })
	return links
}

func (l *link) shun(until time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.shunned = until
}

// standby keeps the standby stream of a link until ctx ends.
func (s *Session) standby(ctx context.Context, l *link) {
	delay := kbackoff.Backoff{Min: 100 * time.Millisecond, Max: 3 * time.Second, Jitter: 0.5}
	for ctx.Err() == nil {
		began := time.Now()
		err := s.standbyOnce(ctx, l)
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

func (s *Session) standbyOnce(linked context.Context, l *link) error {
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
	up := &standbyUp{stream: stream}
	defer s.replicas.forget(l)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() { s.sendProxyRevision(ctx, up) })
	wg.Go(func() { s.sendUsed(ctx, up) })
	for {
		m, err := stream.Recv()
		if err != nil {
			return err
		}
		switch k := m.Kind.(type) {
		case *fleetv1.StandbyDown_Replicas:
			s.replicas.learn(l, k.Replicas.Replicas)
		case *fleetv1.StandbyDown_Ask:
			s.children.Go(func() { s.answer(linked, l, up, k.Ask) }) // a tunnel outlives the stream that asked for it
		}
	}
}

// standbyUp serialises what is sent up.
type standbyUp struct {
	mu     sync.Mutex
	stream fleetv1.Fleet_StandbyClient
}

func (u *standbyUp) send(m *fleetv1.StandbyUp) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.stream.Send(m)
}

// sendProxyRevision tells the replica what the node's proxy shows, whenever it has moved.
func (s *Session) sendProxyRevision(ctx context.Context, up *standbyUp) {
	sent, first := uint64(0), true
	for {
		rev, moved := s.proxy.get()
		if first || rev > sent {
			if up.send(&fleetv1.StandbyUp{Kind: &fleetv1.StandbyUp_ProxyRevision{ProxyRevision: rev}}) != nil {
				return // the receiving side reports it
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

// progress is a number that grows and wakes who waits for it.
type progress struct {
	mu    sync.Mutex
	value uint64
	moved chan struct{}
}

func newProgress() *progress { return &progress{moved: make(chan struct{})} }

func (p *progress) set(v uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if v <= p.value {
		return
	}
	p.value = v
	close(p.moved)
	p.moved = make(chan struct{})
}

func (p *progress) get() (uint64, <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.value, p.moved
}
