package nodegateway

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// standby is the second connection of an agent, which it has to every replica. The agent reports
// its applied proxy revision and usage on it; the replica requests tunnels.
type standby struct {
	node string
	end  context.CancelCauseFunc
	wake chan struct{}

	mu  sync.Mutex
	out []*fleetv1.StandbyDown
}

// post queues a message to the agent. If too many are queued, the connection is closed.
func (b *standby) post(m *fleetv1.StandbyDown) {
	b.mu.Lock()
	tooMany := len(b.out) >= maxOutbox
	if !tooMany {
		b.out = append(b.out, m)
	}
	b.mu.Unlock()
	if tooMany {
		b.end(errSlowAgent)
	}
	select {
	case b.wake <- struct{}{}:
	default:
	}
}

// withdraw removes a message that has not been sent.
func (b *standby) withdraw(m *fleetv1.StandbyDown) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if i := slices.Index(b.out, m); i >= 0 {
		b.out = slices.Delete(b.out, i, i+1)
	}
}

// take removes and returns the oldest queued message, or nil.
func (b *standby) take() (m *fleetv1.StandbyDown) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.out) > 0 {
		m, b.out = b.out[0], b.out[1:]
	}
	return m
}

// standbys holds the standby connection of every node connected to this replica.
type standbys struct {
	mu     sync.Mutex
	byNode map[string]*standby
	joined chan struct{} // closed and replaced when a node connects
}

func newStandbys() *standbys {
	return &standbys{byNode: make(map[string]*standby), joined: make(chan struct{})}
}

func (l *standbys) add(b *standby) (older *standby) {
	l.mu.Lock()
	defer l.mu.Unlock()
	older = l.byNode[b.node]
	l.byNode[b.node] = b
	close(l.joined)
	l.joined = make(chan struct{})
	return older
}

// remove removes b and reports whether it was the node's present standby.
func (l *standbys) remove(b *standby) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.byNode[b.node] != b {
		return false
	}
	delete(l.byNode, b.node)
	return true
}

func (l *standbys) has(node string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.byNode[node] != nil
}

// wait returns the node's standby. It waits up to patience for a node that is reconnecting, then
// returns nil.
func (l *standbys) wait(ctx context.Context, node string, patience time.Duration) *standby {
	t := time.NewTimer(patience)
	defer t.Stop()
	for {
		l.mu.Lock()
		b, joined := l.byNode[node], l.joined
		l.mu.Unlock()
		if b != nil {
			return b
		}
		select {
		case <-joined:
		case <-t.C:
			return nil
		case <-ctx.Done():
			return nil
		}
	}
}

// Standby implements fleetv1.FleetServer: it runs the standby connection of a node, which replaces
// an older one.
func (s *Server) Standby(stream fleetv1.Fleet_StandbyServer) error {
	node, err := nodeOf(stream.Context())
	if err != nil {
		return err
	}
	first, err := first(s, stream)
	if err != nil {
		return err
	}
	if h := first.GetHello(); h == nil || h.NodeName != node {
		return status.Errorf(codes.InvalidArgument, "fleet: standby of node %s: the first message must be its hello", node)
	}
	ctx, end := context.WithCancelCause(stream.Context())
	defer end(nil)
	b := &standby{node: node, end: end, wake: make(chan struct{}, 1)}
	if older := s.standbys.add(b); older != nil {
		older.end(status.Errorf(codes.Aborted, "fleet: a newer standby of node %s exists", node))
	}
	s.gate.progress(node, 0)
	defer func() {
		if !s.standbys.remove(b) {
			return
		}
		if s.view.session(node) == nil {
			s.gate.silent(node)
		}
		s.tunnels.abandon(node, fmt.Errorf("node %s lost its connection to replica %s", node, s.cfg.Replica))
	}()
	// Goroutines of the server, not of this handler: a blocked Send returns only after the handler
	// has returned.
	s.children.Go(func() { end(s.hearStandby(node, stream)) })
	s.children.Go(func() { end(s.feedStandby(ctx, b, stream)) })
	select {
	case <-ctx.Done():
		return sessionError(context.Cause(ctx))
	case <-s.stopping:
		return status.Errorf(codes.Unavailable, "fleet: replica %s is stopping", s.cfg.Replica)
	}
}

func (s *Server) hearStandby(node string, stream fleetv1.Fleet_StandbyServer) error {
	for {
		m, err := stream.Recv()
		if err != nil {
			return err
		}
		switch k := m.Kind.(type) {
		case *fleetv1.StandbyUp_ProxyRevision:
			s.gate.progress(node, k.ProxyRevision)
		case *fleetv1.StandbyUp_Refused:
			s.tunnels.refuse(k.Refused.Id, node, fmt.Errorf("node %s: %s", node, k.Refused.Reason))
		case *fleetv1.StandbyUp_Usage:
			if err := s.used.note(node, k.Usage, time.Now()); err != nil {
				s.cfg.Log.Debug("usage of a node dropped", "node", node, "err", err)
			}
		}
	}
}

// feedStandby sends the list of replicas when it changes, and the queued messages, until ctx ends.
func (s *Server) feedStandby(ctx context.Context, b *standby, stream fleetv1.Fleet_StandbyServer) error {
	list, changed := s.replicas()
	b.post(replicaList(list))
	for {
		for {
			m := b.take()
			if m == nil {
				break
			}
			if err := stream.Send(m); err != nil {
				return err
			}
		}
		select {
		case <-b.wake:
		case <-changed:
			list, changed = s.replicas()
			b.post(replicaList(list))
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// replicas returns the list of replicas for agents and its change channel. The list is empty if it
// does not contain this replica, which then lags behind or was removed. Agents of the previous
// release disconnect from replicas missing in the list, and would miss its correction.
func (s *Server) replicas() ([]*fleetv1.Replica, <-chan struct{}) {
	list, changed := s.cfg.Replicas()
	if !slices.ContainsFunc(list, func(r *fleetv1.Replica) bool { return r.GetName() == s.cfg.Replica }) {
		list = nil
	}
	return list, changed
}

func replicaList(list []*fleetv1.Replica) *fleetv1.StandbyDown {
	return &fleetv1.StandbyDown{Kind: &fleetv1.StandbyDown_Replicas{Replicas: &fleetv1.ReplicaList{Replicas: list}}}
}
