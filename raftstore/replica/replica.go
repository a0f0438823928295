// Package replica is one replica of the store: hashicorp/raft around the state
// machine of mvcc and the hub of watch, with batching, forwarding to the
// leader, linearizable reads on every replica, and membership.
//
// raftstore/DESIGN.md tells the guarantees and lists every goroutine.
package replica

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/disk"
	"keelson.dev/keelson/raftstore/mvcc"
)

const (
	transferTimeout = 2 * time.Second
	// retryPause is how long a call waits before it tries again when nothing
	// has happened that would let it succeed sooner.
	retryPause = 15 * time.Millisecond
)

// Replica implements raftstore.Store and raftstore.Leader. Its methods may be
// called from any goroutine, also before Run: they wait for it.
type Replica struct {
	cfg Config
	log *slog.Logger

	fsm      *fsm
	role     role
	lately   lately
	ids      identities
	queue    queue
	peers    peers
	reads    coalescer
	lead     leaderships
	hints    hinter
	installs installs
	early    early
	heard    hearsay
	usage    usage
	group    group
	levels   sync.Mutex // held while somebody is added or promoted, and while HoldMembers decides
	clock    clock

	forwards forwards

	meters meters
	roles  roleLog
	alarms []raftstore.Alarm // last seen by noteState

	running chan struct{} // closed when raft is up
	stopped chan struct{} // closed when Run has returned
	// raftDown is closed when raft has shut down: its futures stay silent from then on.
	raftDown chan struct{}
	ctx      context.Context
	cancel   context.CancelCauseFunc // ends Run with a failure
	once     sync.Once
	address  advertised // set before running is closed, as are the next four
	raft     *raft.Raft
	trans    *raft.NetworkTransport
	unpooled *raft.NetworkTransport // which makes a connection for each call, and accepts none
	disk     *disk.Data
	port     *peerPort

	caughtUp     atomic.Bool
	tuning       sync.Mutex // held while raft's configuration is read and replaced
	hasty        bool       // raft's timeouts are those of look; tuning is held
	snapshotNow  chan struct{}
	removals     chan removal
	expiryMoved  chan struct{}
	historyGrown chan struct{}
	spaceMoved   chan struct{}
	compareNow   chan struct{}
	hashing      chan struct{} // a place for the one hash that is computed at a time
	word         word
	looking      chan struct{} // places for those who look whether a leader's process has ended
}

var (
	_ raftstore.Store  = (*Replica)(nil)
	_ raftstore.Leader = (*Replica)(nil)
)

// New checks the configuration. It starts nothing and touches no disk.
func New(c Config) (*Replica, error) {
	if err := c.check(); err != nil {
		return nil, err
	}
	c = c.withDefaults()
	r := &Replica{
		cfg:          c,
		log:          c.Logger.With("replica", c.Name),
		running:      make(chan struct{}),
		stopped:      make(chan struct{}),
		raftDown:     make(chan struct{}),
		snapshotNow:  make(chan struct{}, 1),
		removals:     make(chan removal),
		expiryMoved:  make(chan struct{}, 1),
		historyGrown: make(chan struct{}, 1),
		spaceMoved:   make(chan struct{}, 1),
		compareNow:   make(chan struct{}, 1),
		hashing:      make(chan struct{}, 1),
		looking:      make(chan struct{}, lookers),
	}
	r.ctx, r.cancel = context.WithCancelCause(context.Background())
	r.fsm = newFSM(r.ctx, r.fail)
	r.fsm.cluster = c.Cluster
	r.fsm.committed = r.noteCommitted
	r.fsm.changed = r.noteChanged
	r.fsm.applied = r.noteApplied
	r.clock.init(c.Now)
	r.meters.init()
	r.role.init()
	r.ids = identities{incarnation: rand.Uint64() | 1, waiting: make(map[uint64]struct{})}
	r.queue.init()
	r.peers.init(c)
	r.forwards.peers = &r.peers
	r.peers.dial = giveUpUnheard(c.Dial)
	r.lead.init()
	r.reads.round = r.readIndexRound
	return r, nil
}

// errAborted is why Run ended after Abort.
var errAborted = errors.New("aborted")

// Abort ends Run at once, as a crash would: leadership is not handed over.
func (r *Replica) Abort() { r.cancel(errAborted) }

// fail ends Run with an error: the replica can no longer be trusted.
func (r *Replica) fail(err error) {
	r.log.Error("replica stops", "error", err)
	r.cancel(err)
}

// Run takes part in the group until ctx ends, then hands leadership over and
// stops. It returns nil after an orderly stop. Run may be called once.
func (r *Replica) Run(ctx context.Context) error {
	first := false
	r.once.Do(func() { first = true })
	if !first {
		return fmt.Errorf("replica %s has run already: %w", r.cfg.Name, raftstore.ErrClosed)
	}
	defer close(r.stopped)
	defer r.cancel(nil)
	if err := r.open(); err != nil {
		return err
	}
	defer r.disk.Close()

	// Ends when Run is asked to stop; r.ctx goes on until the hand-over is done.
	asked, release := context.WithCancel(ctx)
	defer release()
	stop := context.AfterFunc(r.ctx, release)
	defer stop()

	var g errgroup.Group
	if err := r.start(&g); err != nil {
		r.cancel(err)
		r.shutdown(&g)
		return err
	}
	close(r.running)
	<-asked.Done()
	if r.ctx.Err() == nil {
		r.handOver()
	}
	cause := context.Cause(r.ctx)
	r.roles.stop(cause)
	r.cancel(nil)
	r.shutdown(&g)
	if cause != nil && cause != errAborted {
		return fmt.Errorf("replica %s: %w", r.cfg.Name, cause)
	}
	return nil
}

// open opens the disk and the peer port.
func (r *Replica) open() error {
	d, err := disk.Open(r.cfg.Disk(), r.fail)
	if err != nil {
		return err
	}
	l := r.cfg.Listener
	if l == nil {
		if l, err = net.Listen("tcp", r.cfg.ListenAddr); err != nil {
			d.Close()
			return fmt.Errorf("peer port of replica %s: %w", r.cfg.Name, err)
		}
	}
	r.disk = d
	r.address = advertised(r.cfg.Advertise)
	if r.address == "" {
		r.address = advertised(l.Addr().String())
	}
	r.port = newPeerPort(l, r.address, r.cfg.ServerTLS, r.log)
	if r.cfg.Bootstrap {
		err = d.StartOver()
	}
	empty, isEmpty := d.Empty()
	if err = errors.Join(err, isEmpty); err == nil {
		err = r.group.load(d.Votes(), empty, r.log)
	}
	if err != nil {
		l.Close()
		d.Close()
		return fmt.Errorf("group of replica %s: %w", r.cfg.Name, err)
	}
	return nil
}

// transport makes a transport that keeps so many connections to each peer.
func (r *Replica) transport(accepts *queueListener, keeps int) *raft.NetworkTransport {
	return raft.NewNetworkTransportWithConfig(&raft.NetworkTransportConfig{
		Stream: &groupStreams{group: &r.group, StreamLayer: &raftStreams{
			queueListener: accepts, client: r.cfg.ClientTLS, dial: r.cfg.Dial, life: r.ctx,
		}},
		MaxPool: keeps,
		// No pipelining: while it pipelines, raft sends a follower that is
		// behind one request per new entry or CommitTimeout, and no more. One
		// request at a time goes on until the follower has everything, and
		// each carries what has gathered meanwhile.
		MaxRPCsInFlight: 1,
		Timeout:         max(2*time.Second, 4*r.cfg.ElectionTimeout),
		Logger:          newLogger(r.cfg.Logger.With("component", "raft-net")),
	})
}

func (r *Replica) closeTransports() {
	for _, t := range []*raft.NetworkTransport{r.trans, r.unpooled} {
		t.Close()
		t.CloseStreams()
	}
}

// start brings raft up and starts every goroutine of the replica.
func (r *Replica) start(g *errgroup.Group) error {
	g.Go(func() error { return r.port.run(r.ctx) })
	r.trans, r.unpooled = r.transport(r.port.raft, 5), r.transport(newQueueListener(r.port.raft.Addr()), 0)
	r.hints.init(r)
	r.early.init(r.trans.AppendEntries, r.hints.commitIndex, &r.meters)
	notify := make(chan bool, 16)
	var err error
	conf := r.cfg.raft(notify)
	r.roles.init(r, conf)
	patient := &patientTransport{NetworkTransport: r.trans, unpooled: r.unpooled, worth: r.worthWaiting, early: &r.early, installs: &r.installs}
	trans := newHandOvers(&silentWhenHung{&overheard{patient, &r.roles}, r.hangs}, r)
	g.Go(func() error { return trans.run(r.ctx) })
	r.raft, err = r.disk.StartRaft(func() (*raft.Raft, error) {
		return raft.NewRaft(conf, r.fsm, &earlyLogs{&meteredLogs{r.disk.Log, &r.meters}, r.early.announce}, &meteredVotes{r.disk.Votes(), &r.meters},
			&meteredSnapshots{r.disk.Paced(), &r.meters}, trans)
	})
	if err != nil {
		r.closeTransports()
		return fmt.Errorf("starting raft of replica %s: %w", r.cfg.Name, err)
	}
	r.roles.watch(r.raft)
	r.hints.raft.Store(r.raft)
	r.watchRole(g, notify)
	if err := r.bootstrap(); err != nil {
		return err
	}
	server := grpc.NewServer(peerServerOptions()...)
	storev1.RegisterPeerServer(server, &peerServer{r: r})
	g.Go(func() error { return ignoreClosed(server.Serve(r.port.grpc)) })
	g.Go(func() error { <-r.ctx.Done(); server.Stop(); return nil })
	g.Go(func() error { return r.fsm.hub.Run(r.ctx) })
	g.Go(func() error { return r.runQueue(r.ctx) })
	g.Go(func() error { return r.runSnapshots(r.ctx) })
	g.Go(func() error { return r.catchUp(r.ctx) })
	g.Go(func() error { return r.watchLeader(r.ctx) })
	g.Go(func() error { return r.watchProcess(r.ctx) })
	g.Go(func() error { return r.clock.run(r.ctx) })
	return nil
}

func ignoreClosed(err error) error {
	if errors.Is(err, net.ErrClosed) || errors.Is(err, grpc.ErrServerStopped) {
		return nil
	}
	return err
}

// bootstrap founds a group of one when asked to and never done before.
func (r *Replica) bootstrap() error {
	if !r.cfg.Bootstrap {
		return nil
	}
	empty, err := r.disk.Empty()
	if err != nil || !empty {
		return err
	}
	id, err := r.disk.Found()
	if err != nil {
		return err
	}
	r.group.hold(id)
	err = r.raft.BootstrapCluster(raft.Configuration{Servers: []raft.Server{{
		ID: raft.ServerID(r.cfg.Name), Address: raft.ServerAddress(r.address),
	}}}).Error()
	if err != nil && !errors.Is(err, raft.ErrCantBootstrap) {
		return fmt.Errorf("bootstrapping with replica %s: %w", r.cfg.Name, err)
	}
	r.log.Info("founded a group", "address", r.address)
	return nil
}

// handOver gives leadership to another voter, so that writes pause for
// milliseconds and not for an election.
func (r *Replica) handOver() {
	if r.raft.State() != raft.Leader || len(r.voters()) < 2 {
		return
	}
	ctx, cancel := context.WithTimeout(r.ctx, transferTimeout)
	defer cancel()
	if _, err := r.transfer(ctx, "", "stopping"); err != nil {
		r.log.Warn("leadership not handed over", "error", err)
	}
}

// shutdown stops raft and waits for everything that start started.
func (r *Replica) shutdown(g *errgroup.Group) {
	if r.raft != nil {
		if err := r.raft.Shutdown().Error(); err != nil {
			r.log.Warn("stopping raft", "error", err)
		}
	}
	close(r.raftDown)
	r.closeTransports()
	if err := g.Wait(); err != nil {
		r.log.Warn("stopping", "error", err)
	}
	r.queue.drain()
	r.hints.wait()
	r.early.close()
	r.lead.wait()
	r.peers.close()
	r.fsm.hub.Close()
}

// up waits until Run has raft up.
func (r *Replica) up(ctx context.Context) error {
	select {
	case <-r.running:
	default:
		select {
		case <-r.running:
		case <-r.stopped:
			return raftstore.ErrClosed
		case <-ctx.Done():
			return fmt.Errorf("%w: replica %s is not running: %w", raftstore.ErrUnavailable, r.cfg.Name, ctx.Err())
		}
	}
	if r.ctx.Err() != nil {
		return raftstore.ErrClosed
	}
	return nil
}

// noteCommitted is told by the state machine of what it is about to apply.
func (r *Replica) noteCommitted(index, term uint64) { r.hints.committed(index, term) }

// noteChanged is told by the state machine of every new view. It must not block.
func (r *Replica) noteChanged(v *mvcc.View) {
	r.noteState(v)
	r.lead.mu.Lock()
	expiry := v.NextExpiry()
	moved := expiry != r.lead.expiry
	r.lead.expiry = expiry
	r.lead.mu.Unlock()
	if moved {
		nudge(r.expiryMoved)
	}
	if int(v.Revision()-v.Compacted()) > r.cfg.HistoryRevisions+historySlack(r.cfg.HistoryRevisions) ||
		v.HistoryBytes() > r.cfg.HistoryBytes {
		nudge(r.historyGrown)
	}
	// A snapshot costs as much as the state is large: a large state waits for
	// a log in proportion.
	if r.fsm.bytes.Load() > r.installs.stretch()*r.fsm.delayed(max(r.cfg.SnapshotBytes, v.Bytes()/2)) {
		nudge(r.snapshotNow)
	}
}

// nudge sets a flag that someone waits for.
func nudge(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// catchUp makes the replica ready: one linearizable read shows that it has a
// leader and has applied what was committed when it started.
func (r *Replica) catchUp(ctx context.Context) error {
	for ctx.Err() == nil {
		if _, err := r.syncIndex(ctx); err == nil {
			r.caughtUp.Store(true)
			r.log.Info("caught up", "revision", r.Applied())
			return nil
		}
	}
	return nil
}

// Ready reports whether the replica knows a leader, has applied everything that
// was committed when it started, and has a disk that answers.
func (r *Replica) Ready() bool {
	_, known := r.role.leader()
	return r.caughtUp.Load() && known && r.ctx.Err() == nil && !r.hangs()
}

// Address is where the other replicas reach this one; "" before Run.
func (r *Replica) Address() string {
	select {
	case <-r.running:
		return string(r.address)
	default:
		return r.cfg.Advertise
	}
}
