package session

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	v1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/internal/wakeup"
)

// nodeTimers contains the timers of nodes without a session. When a timer expires, the function
// lost is called; if it fails, the timer is set again. Timers are not stored: after a restart of
// the process they are set from the session records.
type nodeTimers struct {
	log      *slog.Logger
	retry    time.Duration
	onExpiry func(ctx context.Context, node string, epoch uint64) error
	wake     wakeup.Signal

	mu     sync.Mutex
	timers map[string]nodeTimer
}

type nodeTimer struct {
	due   time.Time // monotonic clock
	epoch uint64
}

// maxConcurrentExpiries is the maximum number of concurrent calls of lost. It limits the load of a
// store that does not respond.
const maxConcurrentExpiries = 32

func newNodeTimers(log *slog.Logger, lost func(ctx context.Context, node string, epoch uint64) error) *nodeTimers {
	return &nodeTimers{log: log, retry: 500 * time.Millisecond, onExpiry: lost, wake: wakeup.New(),
		timers: make(map[string]nodeTimer)}
}

// startTimer starts the node's timer for the session with an epoch. It does nothing if the timer
// already runs for that epoch. The timer expires after the duration after.
func (l *nodeTimers) startTimer(node string, epoch uint64, after time.Duration) {
	l.mu.Lock()
	if t, ok := l.timers[node]; !ok || t.epoch < epoch {
		l.timers[node] = nodeTimer{time.Now().Add(after), epoch}
	}
	l.mu.Unlock()
	l.wake.Send()
}

// stopTimer stops the node's timer.
func (l *nodeTimers) stopTimer(node string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.timers, node)
}

// retainTimers stops the timers for which isCurrent returns false.
func (l *nodeTimers) retainTimers(isCurrent func(node string, epoch uint64) bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for node, t := range l.timers {
		if !isCurrent(node, t.epoch) {
			delete(l.timers, node)
		}
	}
}

// runTimers calls lost for expired timers until ctx ends.
func (l *nodeTimers) runTimers(ctx context.Context) error {
	t := time.NewTimer(0)
	defer t.Stop()
	var wg sync.WaitGroup
	defer wg.Wait()
	turn := make(chan struct{}, maxConcurrentExpiries)
	for {
		due, next := l.takeExpired(time.Now())
		for node, timer := range due {
			wg.Go(func() {
				turn <- struct{}{} // lost has its own timeout
				defer func() { <-turn }()
				l.expireTimer(ctx, node, timer.epoch)
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

// takeExpired removes and returns the expired timers. It also returns the time until the next timer
// expires.
func (l *nodeTimers) takeExpired(now time.Time) (map[string]nodeTimer, time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	due, next := make(map[string]nodeTimer), time.Hour
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

func (l *nodeTimers) expireTimer(ctx context.Context, node string, epoch uint64) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if err := l.onExpiry(ctx, node, epoch); err != nil {
		if !errors.Is(err, context.Canceled) && !errors.Is(err, errMoving) {
			l.log.Warn("marking a node as lost failed and is retried", "node", node, "err", err)
		}
		l.startTimer(node, epoch, l.retry)
	}
}

// errMoving is returned for a node that is connected but has no session yet. It postpones marking
// the node as lost.
var errMoving = errors.New("the node is connected and has no session yet")

// movingNodes tracks nodes whose replica has failed and that are connected to this replica. They
// get a second grace period. When a replica fails, thousands of sessions start at the other
// replicas at the same time, and marking their nodes as lost would add to that load.
type movingNodes struct {
	grace time.Duration

	mu     sync.Mutex
	byNode map[string]nodeTimer // end of the second grace period, and epoch of the previous session
}

func newMovingNodes(grace time.Duration) *movingNodes {
	return &movingNodes{grace: grace, byNode: make(map[string]nodeTimer)}
}

// shouldWait reports whether marking the node as lost must be postponed: the node is connected to
// this replica and its second grace period has not ended.
func (m *movingNodes) shouldWait(node string, epoch uint64, connected bool, now time.Time) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	t, ok := m.byNode[node]
	if !ok || t.epoch != epoch {
		t = nodeTimer{due: now.Add(m.grace), epoch: epoch}
		m.byNode[node] = t
	}
	if connected && now.Before(t.due) {
		return true
	}
	delete(m.byNode, node)
	return false
}

// handleLease handles the change of a node's session record. It ends this replica's session if
// another replica has a newer one, and stops the timers of a node that has moved to another
// replica.
func (s *Server) handleLease(o any) {
	l, ok := o.(*coordinationv1.Lease)
	if !ok || l.Namespace != v1.NamespaceNodeLease {
		return
	}
	r := parseRecord(l)
	if n := s.sessions.sessionOf(l.Name); n != nil && n.epoch < r.epoch {
		n.End(supersededError(l.Name))
	}
	if r.replica != s.cfg.Lifetime.Replica {
		s.losses.stopTimer(l.Name)
		s.suspicions.stopTimer(l.Name)
	}
}

func (s *Server) leaseHandler() cache.ResourceEventHandlerFuncs {
	return cache.ResourceEventHandlerFuncs{
		AddFunc:    s.handleLease,
		UpdateFunc: func(_, o any) { s.handleLease(o) },
		DeleteFunc: func(any) {},
	}
}

// sessionRecords returns the session records of all nodes from the informer cache.
func (s *Server) sessionRecords() map[string]sessionRecord {
	out := make(map[string]sessionRecord)
	for _, o := range s.leases.List() {
		if l, ok := o.(*coordinationv1.Lease); ok && l.Namespace == v1.NamespaceNodeLease {
			if r := parseRecord(l); r.epoch != 0 {
				out[l.Name] = r
			}
		}
	}
	return out
}

// restartTimers starts the timers of nodes that had a session on this replica before the process
// was restarted.
func (s *Server) restartTimers() {
	for node, r := range s.sessionRecords() {
		if r.replica == s.cfg.Lifetime.Replica && s.sessions.sessionOf(node) == nil {
			s.losses.startTimer(node, r.epoch, s.cfg.Timing.Grace)
		}
	}
}

// RunLeader marks a node as lost when the replica in its session record is no longer alive. It
// returns when ctx, the leadership, ends. The client c acts as the system user and writes only
// during the leader's term. A new leader starts with full grace periods, so a failover alone loses
// no node.
func (s *Server) RunLeader(ctx context.Context, c *client.Client) error {
	moving := newMovingNodes(s.cfg.Timing.Grace)
	l := newNodeTimers(s.cfg.Log, func(ctx context.Context, node string, epoch uint64) error {
		if moving.shouldWait(node, epoch, s.cfg.HasStandby(node), time.Now()) {
			return errMoving
		}
		s.cfg.Log.Info("node lost: the replica that had its session is gone", "node", node, "epoch", epoch)
		return markLost(ctx, c, node, epoch, s.cfg.Heartbeats.LastHeartbeat(node))
	})
	done := make(chan error, 1)
	go func() { done <- l.runTimers(ctx) }()
	ticker := time.NewTicker(s.cfg.Timing.Heartbeat)
	defer ticker.Stop()
	for {
		s.updateOrphanTimers(l)
		select {
		case <-ctx.Done():
			return <-done
		case <-ticker.C:
		}
	}
}

// updateOrphanTimers starts the timers of nodes whose replica is down, and stops the timers of
// nodes that have a session on a live replica again.
func (s *Server) updateOrphanTimers(l *nodeTimers) {
	alive := map[string]bool{s.cfg.Lifetime.Replica: true}
	isAlive := func(replica string) bool {
		v, ok := alive[replica]
		if !ok {
			v = s.cfg.IsReplicaAlive(replica)
			alive[replica] = v
		}
		return v
	}
	records := s.sessionRecords()
	for node, r := range records {
		if isAlive(r.replica) {
			continue
		}
		if n, ok := s.cfg.View.Node(node); ok && api.NodeReadyStatus(n) == v1.ConditionUnknown {
			continue // the node is already marked as lost
		}
		l.startTimer(node, r.epoch, s.cfg.Timing.Grace)
	}
	l.retainTimers(func(node string, epoch uint64) bool {
		r, ok := records[node]
		return ok && r.epoch == epoch && !isAlive(r.replica)
	})
}
