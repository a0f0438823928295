package stream

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"keelson.dev/keelson/controlplane/nodegateway/wire"
	"keelson.dev/keelson/internal/wakeup"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// standbyConn is a standby connection: the second connection of an agent, which it has to every
// replica. On it, the agent reports its applied proxy revision and its usage, and the replica
// requests tunnels.
type standbyConn struct {
	node   string
	cancel context.CancelCauseFunc
	wake   wakeup.Signal

	mu  sync.Mutex
	out []*fleetv1.StandbyDown
}

// queueMessage queues a message to the agent. If too many messages are queued, it closes the
// connection.
func (c *standbyConn) queueMessage(m *fleetv1.StandbyDown) {
	c.mu.Lock()
	tooMany := len(c.out) >= wire.MaxOutbox
	if !tooMany {
		c.out = append(c.out, m)
	}
	c.mu.Unlock()
	if tooMany {
		c.cancel(wire.ErrSlowAgent)
	}
	c.wake.Send()
}

// withdrawMessage removes a queued message if it has not been sent.
func (c *standbyConn) withdrawMessage(m *fleetv1.StandbyDown) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if i := slices.Index(c.out, m); i >= 0 {
		c.out = slices.Delete(c.out, i, i+1)
	}
}

// takeMessage removes and returns the oldest queued message. It returns nil if there is none.
func (c *standbyConn) takeMessage() (m *fleetv1.StandbyDown) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.out) > 0 {
		m, c.out = c.out[0], c.out[1:]
	}
	return m
}

// standbyConns contains the standby connection of every node that is connected to this replica.
type standbyConns struct {
	mu     sync.Mutex
	byNode map[string]*standbyConn
	joined chan struct{} // closed and replaced when a node connects
}

func newStandbyConns() *standbyConns {
	return &standbyConns{byNode: make(map[string]*standbyConn), joined: make(chan struct{})}
}

func (l *standbyConns) addConn(c *standbyConn) (older *standbyConn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	older = l.byNode[c.node]
	l.byNode[c.node] = c
	close(l.joined)
	l.joined = make(chan struct{})
	return older
}

// removeConn removes c and reports whether c was the current standby connection of its node.
func (l *standbyConns) removeConn(c *standbyConn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.byNode[c.node] != c {
		return false
	}
	delete(l.byNode, c.node)
	return true
}

func (l *standbyConns) hasNode(node string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.byNode[node] != nil
}

// awaitNode returns the node's standby connection. It waits for a node that is reconnecting, at
// most for timeout, and then returns nil.
func (l *standbyConns) awaitNode(ctx context.Context, node string, timeout time.Duration) *standbyConn {
	t := time.NewTimer(timeout)
	defer t.Stop()
	for {
		l.mu.Lock()
		c, joined := l.byNode[node], l.joined
		l.mu.Unlock()
		if c != nil {
			return c
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

// ServeStandby runs the standby connection of a node until it ends. It closes an older standby
// connection of the node. The first message of the stream has already been received.
func (s *Server) ServeStandby(stream fleetv1.Fleet_StandbyServer, node string) error {
	ctx, cancel := context.WithCancelCause(stream.Context())
	defer cancel(nil)
	c := &standbyConn{node: node, cancel: cancel, wake: wakeup.New()}
	if older := s.standbys.addConn(c); older != nil {
		older.cancel(status.Errorf(codes.Aborted, "fleet: a newer standby of node %s exists", node))
	}
	s.cfg.Observer.RecordApplied(node, 0)
	defer func() {
		if !s.standbys.removeConn(c) {
			return
		}
		s.cfg.Observer.RecordDisconnect(node)
		s.requests.failRequests(node, fmt.Errorf("node %s lost its connection to replica %s", node,
			s.cfg.Lifetime.Replica))
	}()
	// The server, not this handler, waits for these goroutines: a blocked Send returns only after
	// the handler has returned.
	s.cfg.Lifetime.Go(func() { cancel(s.receiveStandby(node, stream)) })
	s.cfg.Lifetime.Go(func() { cancel(s.sendStandby(ctx, c, stream)) })
	select {
	case <-ctx.Done():
		return wire.StreamError(context.Cause(ctx))
	case <-s.cfg.Lifetime.Stopping():
		return s.cfg.Lifetime.StoppingError()
	}
}

func (s *Server) receiveStandby(node string, stream fleetv1.Fleet_StandbyServer) error {
	for {
		m, err := stream.Recv()
		if err != nil {
			return err
		}
		switch k := m.Kind.(type) {
		case *fleetv1.StandbyUp_ProxyRevision:
			s.cfg.Observer.RecordApplied(node, k.ProxyRevision)
		case *fleetv1.StandbyUp_Refused:
			s.requests.refuseRequest(k.Refused.Id, node, fmt.Errorf("node %s: %s", node, k.Refused.Reason))
		case *fleetv1.StandbyUp_Usage:
			s.cfg.Observer.RecordUsage(node, k.Usage)
		}
	}
}

// sendStandby sends the list of replicas when it changes, and the queued messages, until ctx ends.
func (s *Server) sendStandby(ctx context.Context, c *standbyConn, stream fleetv1.Fleet_StandbyServer) error {
	list, changed := s.ReplicasForAgents()
	c.queueMessage(replicaListMessage(list))
	for {
		for {
			m := c.takeMessage()
			if m == nil {
				break
			}
			if err := stream.Send(m); err != nil {
				return err
			}
		}
		select {
		case <-c.wake:
		case <-changed:
			list, changed = s.ReplicasForAgents()
			c.queueMessage(replicaListMessage(list))
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// ReplicasForAgents returns the list of replicas for agents, and a channel that is closed when the
// list changes. The list is empty if it does not contain this replica, because this replica is then
// out of date or was removed. Agents of the previous release disconnect from replicas that are not
// in the list, and would not receive the corrected list.
func (s *Server) ReplicasForAgents() (list []*fleetv1.Replica, changed <-chan struct{}) {
	list, changed = s.cfg.ListReplicas()
	if !slices.ContainsFunc(list, func(r *fleetv1.Replica) bool { return r.GetName() == s.cfg.Lifetime.Replica }) {
		list = nil
	}
	return list, changed
}

func replicaListMessage(list []*fleetv1.Replica) *fleetv1.StandbyDown {
	return &fleetv1.StandbyDown{Kind: &fleetv1.StandbyDown_Replicas{Replicas: &fleetv1.ReplicaList{Replicas: list}}}
}
