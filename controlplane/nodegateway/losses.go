package nodegateway

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	v1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/client"
)

// losses holds the grace timers of nodes without a session. When a timer expires, lost is called;
// if it fails, the timer is set again. Timers are not stored: at start they are set from the
// session records.
type losses struct {
	log   *slog.Logger
	retry time.Duration
	lost  func(ctx context.Context, node string, epoch uint64) error
	wake  chan struct{}

	mu     sync.Mutex
	timers map[string]lossTimer
}

type lossTimer struct {
	due   time.Time // monotonic
	epoch uint64
}

// firesAtOnce bounds the concurrent calls of lost, to protect a store that does not answer.
const firesAtOnce = 32

func newLosses(log *slog.Logger, lost func(ctx context.Context, node string, epoch uint64) error) *losses {
	return &losses{log: log, retry: 500 * time.Millisecond, lost: lost, wake: make(chan struct{}, 1), timers: make(map[string]lossTimer)}
}

// arm starts the node's timer for the session with the given epoch, unless it already runs for that
// epoch.
func (l *losses) arm(node string, epoch uint64, after time.Duration) {
	l.mu.Lock()
	if t, ok := l.timers[node]; !ok || t.epoch < epoch {
		l.timers[node] = lossTimer{time.Now().Add(after), epoch}
	}
	l.mu.Unlock()
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// disarm stops the node's timer.
func (l *losses) disarm(node string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.timers, node)
}

// keep stops the timers for which still returns false.
func (l *losses) keep(still func(node string, epoch uint64) bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for node, t := range l.timers {
		if !still(node, t.epoch) {
			delete(l.timers, node)
		}
	}
}

// run calls lost for expired timers until ctx ends.
func (l *losses) run(ctx context.Context) error {
	t := time.NewTimer(0)
	defer t.Stop()
	var wg sync.WaitGroup
	defer wg.Wait()
	turn := make(chan struct{}, firesAtOnce)
	for {
		due, next := l.take(time.Now())
		for node, timer := range due {
			wg.Go(func() {
				turn <- struct{}{} // lost returns by its own timeout
				defer func() { <-turn }()
				l.fire(ctx, node, timer.epoch)
			})
		}
		t.Reset(next)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-l.wake:
		case <-t.C:
		}
	}
}

// take removes and returns the expired timers, and the time until the next one expires.
func (l *losses) take(now time.Time) (map[string]lossTimer, time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	due, next := make(map[string]lossTimer), time.Hour
	for node, t := range l.timers {
		if left := t.due.Sub(now); left > 0 {
			next = min(next, left)
			continue
		}
		due[node] = t
		delete(l.timers, node)
	}
	return due, next
}

func (l *losses) fire(ctx context.Context, node string, epoch uint64) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if err := l.lost(ctx, node, epoch); err != nil {
		if !errors.Is(err, context.Canceled) && !errors.Is(err, errMoving) {
			l.log.Warn("could not write a node lost, will retry", "node", node, "err", err)
		}
		l.arm(node, epoch, l.retry)
	}
}

// errMoving is returned for a node with a live agent that has no session yet; it delays the loss.
var errMoving = errors.New("the node is connected and has no session yet")

// moving tracks nodes of a failed replica that are connected to this one. They get a second grace
// period. When a replica fails, thousands of sessions start at the others at once, and marking
// their nodes as lost would add to that load.
type moving struct {
	grace time.Duration

	mu     sync.Mutex
	byNode map[string]lossTimer // end of the second grace period, and epoch of the lost session
}

func newMoving(grace time.Duration) *moving {
	return &moving{grace: grace, byNode: make(map[string]lossTimer)}
}

// wait reports whether the node's loss must be delayed: it is connected to this replica and its
// second grace period has not passed.
func (m *moving) wait(node string, epoch uint64, connected bool, now time.Time) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	t, ok := m.byNode[node]
	if !ok || t.epoch != epoch {
		t = lossTimer{due: now.Add(m.grace), epoch: epoch}
		m.byNode[node] = t
	}
	if connected && now.Before(t.due) {
		return true
	}
	delete(m.byNode, node)
	return false
}

// leaseSeen handles a change of a session record. It ends this replica's session if a newer one
// exists elsewhere, and stops the timers of a node that has moved to another replica.
func (s *Server) leaseSeen(o any) {
	l, ok := o.(*coordinationv1.Lease)
	if !ok || l.Namespace != v1.NamespaceNodeLease {
		return
	}
	r := recordOf(l)
	if sess := s.view.session(l.Name); sess != nil && sess.epoch < r.epoch {
		sess.end(errSuperseded(l.Name))
	}
	if r.replica != s.cfg.Replica {
		s.losses.disarm(l.Name)
		s.doubts.disarm(l.Name)
	}
}

func (s *Server) leaseHandler() cache.ResourceEventHandlerFuncs {
	return cache.ResourceEventHandlerFuncs{
		AddFunc:    s.leaseSeen,
		UpdateFunc: func(_, o any) { s.leaseSeen(o) },
		DeleteFunc: func(any) {},
	}
}

// records returns the session records of all nodes from the informer.
func (s *Server) records() map[string]record {
	out := make(map[string]record)
	for _, o := range s.leases.List() {
		if l, ok := o.(*coordinationv1.Lease); ok && l.Namespace == v1.NamespaceNodeLease {
			if r := recordOf(l); r.epoch != 0 {
				out[l.Name] = r
			}
		}
	}
	return out
}

// rearm starts the timers of nodes with a session on this replica before the process was restarted.
func (s *Server) rearm() {
	for node, r := range s.records() {
		if r.replica == s.cfg.Replica && s.view.session(node) == nil {
			s.losses.arm(node, r.epoch, s.cfg.Grace)
		}
	}
}

// RunLeader marks nodes as lost when the replica in their session record is gone, until ctx (the
// leadership) ends. c writes as the system user and is fenced with the leadership's term. A new
// leader starts with full grace periods, so a fail-over alone loses no node.
func (s *Server) RunLeader(ctx context.Context, c *client.Client) error {
	moving := newMoving(s.cfg.Grace)
	l := newLosses(s.cfg.Log, func(ctx context.Context, node string, epoch uint64) error {
		if moving.wait(node, epoch, s.standbys.has(node), time.Now()) {
			return errMoving
		}
		s.cfg.Log.Info("node lost: the replica that had its session is gone", "node", node, "epoch", epoch)
		return markLost(ctx, c, node, epoch, s.heard.last(node))
	})
	done := make(chan error, 1)
	go func() { done <- l.run(ctx) }()
	look := time.NewTicker(s.cfg.Heartbeat)
	defer look.Stop()
	for {
		s.orphans(l)
		select {
		case <-ctx.Done():
			return <-done
		case <-look.C:
		}
	}
}

// orphans starts the timers of nodes without a live replica, and stops those of nodes that have one
// again.
func (s *Server) orphans(l *losses) {
	alive := map[string]bool{s.cfg.Replica: true}
	lives := func(replica string) bool {
		v, ok := alive[replica]
		if !ok {
			v = s.cfg.Alive(replica)
			alive[replica] = v
		}
		return v
	}
	recs := s.records()
	for node, r := range recs {
		if lives(r.replica) {
			continue
		}
		if n, ok := s.view.nodeObject(node); ok && findNodeCondition(n.Status.Conditions, v1.NodeReady) != nil &&
			findNodeCondition(n.Status.Conditions, v1.NodeReady).Status == v1.ConditionUnknown {
			continue // already marked as lost
		}
		l.arm(node, r.epoch, s.cfg.Grace)
	}
	l.keep(func(node string, epoch uint64) bool {
		r, ok := recs[node]
		return ok && r.epoch == epoch && !lives(r.replica)
	})
}
