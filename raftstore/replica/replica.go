// Package replica is one replica of the store. It combines hashicorp/raft, the state machine of
// mvcc and the hub of watch. It adds batching, forwarding to the leader, linearizable reads on
// every replica, and membership.
//
// raftstore/DESIGN.md lists its guarantees and goroutines. The subpackages: failover decides about
// elections, replication sends entries and commit notices, peernet connects the replicas, raftfsm
// applies entries, proposals queues proposals, forwarding sends them to the leader, readindex
// confirms leadership, rolelog explains role changes, storeclock counts the store time, diskmeter
// measures the disk, and hclogger adapts raft's log.
package replica

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/hashicorp/raft"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/disk"
	"keelson.dev/keelson/raftstore/mvcc"
	"keelson.dev/keelson/raftstore/replica/hclogger"
	"keelson.dev/keelson/raftstore/replica/peernet"
	"keelson.dev/keelson/raftstore/replica/raftfsm"
	"keelson.dev/keelson/raftstore/replica/replication"
)

const (
	transferTimeout = 2 * time.Second
	// retryPause is how long a call waits before it retries if no event wakes it earlier.
	retryPause = 15 * time.Millisecond
)

// Replica implements raftstore.Store and raftstore.Leader. Its methods may be called from any
// goroutine. Calls before Run has started raft wait until it has.
//
// A Replica consists of parts. Each part uses the parts listed before it, and no part that is
// listed after it.
type Replica struct {
	node      *node
	net       *network
	reads     *reader
	commits   *committer
	elections *elections
	members   *membership
	comparer  *comparer
	snapshots *snapshotter
	tasks     *leaderTasks
	once      sync.Once // Run may be called once
}

var (
	_ raftstore.Store  = (*Replica)(nil)
	_ raftstore.Leader = (*Replica)(nil)
)

// New checks the configuration and returns a replica for it. It starts no goroutine and opens no
// file.
func New(c Config) (*Replica, error) {
	if err := c.validate(); err != nil {
		return nil, err
	}
	c = c.withDefaults()
	n := newNode(c)
	links := newNetwork(n)
	reads := newReader(n, links)
	commits := newCommitter(n, links, reads)
	elections := newElections(n, links)
	members := &membership{node: n, net: links, elections: elections}
	comparer := newComparer(n, links)
	snapshots := newSnapshotter(n)
	tasks := newLeaderTasks(n, links, commits, members, comparer, snapshots)
	n.fsm.Observer = raftfsm.Observer{Committed: links.observeCommitted, Changed: tasks.observeView,
		Applied: n.observeApplied}
	r := &Replica{
		node: n, net: links, reads: reads, commits: commits, elections: elections, members: members,
		comparer: comparer, snapshots: snapshots, tasks: tasks,
	}
	return r, nil
}

// errAborted is the cause with which Abort ends Run.
var errAborted = errors.New("aborted")

// Abort ends Run immediately, like a crash: leadership is not transferred.
func (r *Replica) Abort() { r.node.cancel(errAborted) }

// failReplica ends Run with the given error, because the replica can no longer be trusted.
func (n *node) failReplica(err error) {
	n.log.Error("replica stops", "error", err)
	n.cancel(err)
}

// Run runs this replica as a member of the raft cluster until ctx ends. Then it transfers its
// leadership and stops. It returns nil after an orderly stop. Run may be called once.
func (r *Replica) Run(ctx context.Context) error {
	first := false
	r.once.Do(func() { first = true })
	if !first {
		return fmt.Errorf("Run of replica %s was called before: %w", r.node.cfg.Name, raftstore.ErrClosed)
	}
	defer close(r.node.stopped)
	defer r.node.cancel(nil)
	if err := r.openDisk(); err != nil {
		return err
	}
	defer r.node.disk.Close()

	// asked ends when Run is requested to stop; node.ctx ends after the leadership transfer.
	asked, release := context.WithCancel(ctx)
	defer release()
	stop := context.AfterFunc(r.node.ctx, release)
	defer stop()

	var g errgroup.Group
	if err := r.startRaft(&g); err != nil {
		r.node.cancel(err)
		r.stopParts(&g)
		return err
	}
	close(r.node.running)
	<-asked.Done()
	if r.node.ctx.Err() == nil {
		r.elections.transferBeforeStop()
	}
	cause := context.Cause(r.node.ctx)
	r.elections.roles.EndRole(cause)
	r.node.cancel(nil)
	r.stopParts(&g)
	if cause != nil && cause != errAborted {
		return fmt.Errorf("replica %s: %w", r.node.cfg.Name, cause)
	}
	return nil
}

// openDisk opens the data directory and the peer port.
func (r *Replica) openDisk() error {
	d, err := disk.Open(r.node.cfg.Disk(), r.node.failReplica)
	if err != nil {
		return err
	}
	l := r.node.cfg.Network.Listener
	if l == nil {
		if l, err = net.Listen("tcp", r.node.cfg.Network.ListenAddr); err != nil {
			d.Close()
			return fmt.Errorf("peer port of replica %s: %w", r.node.cfg.Name, err)
		}
	}
	r.node.disk = d
	r.net.address = peernet.Advertised(r.node.cfg.Network.Advertise)
	if r.net.address == "" {
		r.net.address = peernet.Advertised(l.Addr().String())
	}
	r.net.port = peernet.NewPeerPort(l, r.net.address, r.node.cfg.Network.ServerTLS, r.node.log)
	if r.node.cfg.Bootstrap {
		err = d.ResetInterruptedBootstrap()
	}
	empty, isEmpty := d.IsEmpty()
	if err = errors.Join(err, isEmpty); err == nil {
		err = r.net.group.LoadID(d.StableStore(), empty, r.node.log)
	}
	if err != nil {
		l.Close()
		d.Close()
		return fmt.Errorf("raft cluster of replica %s: %w", r.node.cfg.Name, err)
	}
	return nil
}

// newTransport returns a raft transport that accepts the connections of listener. It keeps up to
// maxIdle idle outgoing connections per peer.
func (n *network) newTransport(listener *peernet.QueueListener, maxIdle int) *raft.NetworkTransport {
	return raft.NewNetworkTransportWithConfig(&raft.NetworkTransportConfig{
		Stream: &peernet.IdentifiedStreams{Group: &n.group, StreamLayer: &peernet.RaftStreams{
			QueueListener: listener, Client: n.node.cfg.Network.ClientTLS, DialTCP: n.node.cfg.Network.Dial,
			Life: n.node.ctx,
		}},
		MaxPool: maxIdle,
		// No pipelining. While raft pipelines, it sends a follower that lags one request per new
		// entry or per CommitTimeout only. Without it, requests follow one another until the
		// follower has everything, and each carries all entries that have accumulated.
		MaxRPCsInFlight: 1,
		Timeout:         max(2*time.Second, 4*n.node.cfg.Timeouts.ElectionTimeout),
		Logger:          hclogger.New(n.node.cfg.Logger.With("component", "raft-net")),
	})
}

func (n *network) closeTransports() {
	for _, t := range []*raft.NetworkTransport{n.trans, n.unpooled} {
		t.Close()
		t.CloseStreams()
	}
}

// startRaft starts raft and every goroutine of the replica.
func (r *Replica) startRaft(g *errgroup.Group) error {
	g.Go(func() error { return r.net.port.Run(r.node.ctx) })
	r.net.trans, r.net.unpooled = r.net.newTransport(r.net.port.Raft, 5),
		r.net.newTransport(peernet.NewQueueListener(r.net.port.Raft.Addr()), 0)
	r.net.hints.Initialize(replication.NotifierConfig{
		Life: r.node.ctx, Self: raft.ServerID(r.node.cfg.Name), Fallback: r.node.cfg.Timeouts.CommitTimeout,
		Header: r.net.rpcHeader, Send: r.net.trans.AppendEntries, Early: &r.net.early,
	})
	r.net.early.Initialize(r.net.trans.AppendEntries, r.net.hints.CommitIndex)
	notify := make(chan bool, 16)
	var err error
	conf := r.node.cfg.raftConfig(notify)
	r.elections.roles.Initialize(r.node.cfg.Name, r.node.cfg.Timeouts.HeartbeatTimeout-time.Microsecond,
		conf.LeaderLeaseTimeout, func() { r.node.meters.elections.Add(1) },
		func(from, to, reason string) {
			r.node.log.Info("role changed", "from", from, "to", to, "reason", reason)
		})
	patient := &replication.PatientTransport{NetworkTransport: r.net.trans, Unpooled: r.net.unpooled,
		Worth: r.net.worthWaiting, Early: &r.net.early, Installs: &r.net.installs}
	trans := newTransferGuard(&stallGuard{&observedTransport{patient, &r.elections.roles}, r.node.isDiskStalled},
		r.elections)
	g.Go(func() error { return trans.run(r.node.ctx) })
	r.node.raft, err = r.node.disk.StartRaft(func() (*raft.Raft, error) {
		return raft.NewRaft(conf, r.node.fsm, r.net.early.AnnounceLogs(r.node.meters.disk.MeterLogs(r.node.disk.Log)),
			r.node.meters.disk.MeterVotes(r.node.disk.StableStore()),
			r.node.meters.disk.MeterSnapshots(r.node.disk.PacedSnapshots()), trans)
	})
	if err != nil {
		r.net.closeTransports()
		return fmt.Errorf("starting raft of replica %s: %w", r.node.cfg.Name, err)
	}
	r.elections.roles.WatchRaft(r.node.raft)
	r.net.hints.Raft.Store(r.node.raft)
	r.tasks.watchLeadership(g, notify)
	if err := r.bootstrapCluster(); err != nil {
		return err
	}
	server := grpc.NewServer(peernet.PeerServerOptions()...)
	storev1.RegisterPeerServer(server, &peerServer{r: r})
	g.Go(func() error { return ignoreClosed(server.Serve(r.net.port.Grpc)) })
	g.Go(func() error { <-r.node.ctx.Done(); server.Stop(); return nil })
	g.Go(func() error { return r.node.fsm.Hub.Run(r.node.ctx) })
	g.Go(func() error { return r.commits.runQueue(r.node.ctx) })
	g.Go(func() error { return r.snapshots.runSnapshots(r.node.ctx) })
	g.Go(func() error { return r.reads.awaitCaughtUp(r.node.ctx) })
	g.Go(func() error { return r.elections.watchLeader(r.node.ctx) })
	g.Go(func() error { return r.elections.watchLeaderProcess(r.node.ctx) })
	g.Go(func() error { return r.node.clock.Run(r.node.ctx) })
	return nil
}

func ignoreClosed(err error) error {
	if errors.Is(err, net.ErrClosed) || errors.Is(err, grpc.ErrServerStopped) {
		return nil
	}
	return err
}

// bootstrapCluster creates a raft cluster with this replica as its only member, if Config.Bootstrap
// is set and the disk is empty.
func (r *Replica) bootstrapCluster() error {
	if !r.node.cfg.Bootstrap {
		return nil
	}
	empty, err := r.node.disk.IsEmpty()
	if err != nil || !empty {
		return err
	}
	id, err := r.node.disk.CreateRaftClusterID()
	if err != nil {
		return err
	}
	r.net.group.SetID(id)
	err = r.node.raft.BootstrapCluster(raft.Configuration{Servers: []raft.Server{{
		ID: raft.ServerID(r.node.cfg.Name), Address: raft.ServerAddress(r.net.address),
	}}}).Error()
	if err != nil && !errors.Is(err, raft.ErrCantBootstrap) {
		return fmt.Errorf("bootstrapping with replica %s: %w", r.node.cfg.Name, err)
	}
	r.node.log.Info("founded a raft cluster", "address", r.net.address)
	return nil
}

// transferBeforeStop transfers leadership to another voter if this replica leads. Commits then
// pause for milliseconds, and not for the duration of an election.
func (e *elections) transferBeforeStop() {
	if e.node.raft.State() != raft.Leader || len(e.node.currentVoters()) < 2 {
		return
	}
	ctx, cancel := context.WithTimeout(e.node.ctx, transferTimeout)
	defer cancel()
	if _, err := e.transferLeadership(ctx, "", "stopping"); err != nil {
		e.node.log.Warn("leadership not transferred", "error", err)
	}
}

// stopParts stops raft and waits for every goroutine that startRaft has started.
func (r *Replica) stopParts(g *errgroup.Group) {
	if r.node.raft != nil {
		if err := r.node.raft.Shutdown().Error(); err != nil {
			r.node.log.Warn("stopping raft", "error", err)
		}
	}
	close(r.node.raftDown)
	r.net.closeTransports()
	if err := g.Wait(); err != nil {
		r.node.log.Warn("stopping", "error", err)
	}
	r.commits.queue.RefuseAll()
	r.net.hints.AwaitNotices()
	r.net.early.Close()
	r.node.lead.awaitEnd()
	r.net.peers.Close()
	r.node.fsm.Hub.Close()
}

// awaitRunning waits until Run has started raft.
func (n *node) awaitRunning(ctx context.Context) error {
	select {
	case <-n.running:
	default:
		select {
		case <-n.running:
		case <-n.stopped:
			return raftstore.ErrClosed
		case <-ctx.Done():
			return fmt.Errorf("%w: replica %s is not running: %w", raftstore.ErrUnavailable, n.cfg.Name, ctx.Err())
		}
	}
	if n.ctx.Err() != nil {
		return raftstore.ErrClosed
	}
	return nil
}

// observeCommitted notifies the followers of an entry that the state machine is about to apply.
func (n *network) observeCommitted(index, term uint64) { n.hints.NotifyCommitted(index, term) }

// observeView handles a new view of the state machine. It compacts history and requests snapshots
// when they are due. It must not block.
func (t *leaderTasks) observeView(v *mvcc.View) {
	t.observeState(v)
	t.node.lead.mu.Lock()
	expiry := v.NextExpiry()
	moved := expiry != t.node.lead.expiry
	t.node.lead.expiry = expiry
	t.node.lead.mu.Unlock()
	if moved {
		t.expiryMoved.Send()
	}
	if int(v.Revision()-v.Compacted()) > t.node.cfg.History.HistoryRevisions+
		historySlack(t.node.cfg.History.HistoryRevisions) ||
		v.HistoryBytes() > t.node.cfg.History.HistoryBytes {
		t.historyGrown.Send()
	}
	// The cost of a snapshot is proportional to the state: a large state waits for a proportionally
	// long log.
	if t.node.fsm.Bytes.Load() > t.net.installs.LogFactor()*t.node.fsm.SnapshotThreshold(
		max(t.node.cfg.Snapshots.SnapshotBytes, v.Bytes()/2)) {
		t.snapshots.snapshotNow.Send()
	}
}

// awaitCaughtUp marks the replica as ready after one successful linearizable read. The read shows
// that the replica has a leader and has applied everything that was committed when it started.
func (r *reader) awaitCaughtUp(ctx context.Context) error {
	for ctx.Err() == nil {
		if _, err := r.syncIndex(ctx); err == nil {
			r.caughtUp.Store(true)
			r.node.log.Info("caught up", "revision", r.node.fsm.View().Revision())
			return nil
		}
	}
	return nil
}

// Ready reports whether the replica knows a leader, has applied everything that was committed when
// it started, and has a disk that is not stalled.
func (r *Replica) Ready() bool {
	_, known := r.node.role.currentID()
	return r.reads.caughtUp.Load() && known && r.node.ctx.Err() == nil && !r.node.isDiskStalled()
}

// Address returns the address at which other replicas connect to this one. Before Run it is
// Config.Advertise.
func (r *Replica) Address() string {
	select {
	case <-r.node.running:
		return string(r.net.address)
	default:
		return r.node.cfg.Network.Advertise
	}
}
