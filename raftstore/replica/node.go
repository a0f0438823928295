package replica

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/hashicorp/raft"
	"golang.org/x/sync/errgroup"

	"keelson.dev/keelson/raftstore/disk"
	"keelson.dev/keelson/raftstore/replica/raftfsm"
	"keelson.dev/keelson/raftstore/replica/storeclock"
)

// node contains raft, its state machine, the disk and the lifecycle of a replica. All other parts
// of a replica use it.
type node struct {
	cfg    Config
	log    *slog.Logger
	fsm    *raftfsm.FSM
	role   leaderView
	lead   leaderships
	clock  storeclock.Clock
	meters meters

	running chan struct{} // closed when raft has started; raft and disk are set before
	stopped chan struct{} // closed when Run has returned
	// raftDown is closed when raft has shut down. After that, its futures are not answered.
	raftDown chan struct{}
	ctx      context.Context
	cancel   context.CancelCauseFunc // ends Run with an error
	raft     *raft.Raft
	disk     *disk.Data

	tuning sync.Mutex // held while raft's configuration is read and replaced
}

func newNode(c Config) *node {
	n := &node{
		cfg:      c,
		log:      c.Logger.With("replica", c.Name),
		running:  make(chan struct{}),
		stopped:  make(chan struct{}),
		raftDown: make(chan struct{}),
	}
	n.ctx, n.cancel = context.WithCancelCause(context.Background())
	n.fsm = raftfsm.New(n.ctx, n.failReplica)
	n.fsm.Cluster = c.Cluster
	n.clock.Initialize(c.Now)
	n.meters.initialize()
	n.role.initialize()
	n.lead.initialize()
	return n
}

// leaderView is the current leader as this replica knows it. It is safe for concurrent use.
type leaderView struct {
	mu      sync.Mutex
	id      string
	address string
	moved   chan struct{} // closed and replaced when the leader changes
}

func (o *leaderView) initialize() { o.moved = make(chan struct{}) }

// currentID returns the ID of the leader, or false if the leader is unknown.
func (o *leaderView) currentID() (string, bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.id, o.id != ""
}

// currentLeader returns the ID and the address of the leader, and a channel that is closed when the
// leader changes. ID and address are "" if the leader is unknown.
func (o *leaderView) currentLeader() (id, address string, moved <-chan struct{}) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.id, o.address, o.moved
}

func (o *leaderView) setLeader(id, address string) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.id == id && o.address == address {
		return false
	}
	o.id, o.address = id, address
	close(o.moved)
	o.moved = make(chan struct{})
	return true
}

// watchLeadership updates the current leader and this replica's leadership. raft's observations
// report the leader, and notify reports when this replica starts and stops leading. watchLeadership
// also ends a leadership when the disk is stalled.
func (t *leaderTasks) watchLeadership(g *errgroup.Group, notify <-chan bool) {
	// one slot is enough: an observation only triggers a check
	seen := make(chan raft.Observation, 1)
	observer := raft.NewObserver(seen, false, func(o *raft.Observation) bool {
		_, ok := o.Data.(raft.LeaderObservation)
		return ok
	})
	t.node.raft.RegisterObserver(observer)
	g.Go(func() error {
		defer t.node.raft.DeregisterObserver(observer)
		defer t.node.lead.endLeadership()
		check := time.NewTimer(t.node.timeUntilStall())
		defer check.Stop()
		leads := false // in raft's last notification
		for {
			t.updateLeader()
			select {
			case <-seen:
			case leads = <-notify:
				t.node.lead.endLeadership()
			case <-check.C:
			case <-t.node.ctx.Done():
				return nil
			}
			// While the disk is stalled, raft's main loop is blocked and sends no notification. If
			// no other replica was elected when the disk answers, another leadership of the same
			// term follows.
			t.node.lead.followRaft(t, leads && !t.node.isDiskStalled())
			check.Reset(t.node.timeUntilStall())
		}
	})
}

// raftLeader returns the leader that raft reports, or "" if this replica is a candidate. During an
// election that follows a leadership transfer, raft may report the previous leader although it has
// stopped, until a replica is elected.
func (n *node) raftLeader() (raft.ServerAddress, raft.ServerID) {
	address, id := n.raft.LeaderWithID()
	if n.raft.State() == raft.Candidate {
		return "", ""
	}
	return address, id
}

func (t *leaderTasks) updateLeader() {
	address, id := t.node.raftLeader()
	if t.node.role.setLeader(string(id), string(address)) {
		t.node.meters.leaders.Add(1)
		if id != "" {
			t.lately.RecordChange(time.Now())
		}
		t.node.log.Info("leader changed", "leader", string(id), "term", t.node.raft.CurrentTerm())
	}
}
