package replica

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/hashicorp/raft"

	"keelson.dev/keelson/raftstore/replica/failover"
	"keelson.dev/keelson/raftstore/replica/rolelog"
)

// transferGuard is a transport that checks received requests before raft. It refuses outdated
// TimeoutNow requests (see failover.Pledge.CheckTimeoutNow). It also delays heartbeats from the
// time when raft obeys a TimeoutNow until raft has written its new term.
//
// The delay is necessary because raft handles heartbeats outside of its main goroutine. A heartbeat
// during this time could make the new candidate follow the previous leader. If the candidate then
// lost its election, it would deny its vote to all others, because it believes that it has a
// leader.
type transferGuard struct {
	*stallGuard
	elections  *elections
	accepted   chan raft.RPC
	heartbeats sync.RWMutex // read-locked while a heartbeat is handled; locked from a TimeoutNow to the new term
}

func newTransferGuard(t *stallGuard, e *elections) *transferGuard {
	return &transferGuard{stallGuard: t, elections: e, accepted: make(chan raft.RPC)}
}

// SetHeartbeatHandler implements raft.Transport. It delays heartbeats while a TimeoutNow is
// executed.
func (g *transferGuard) SetHeartbeatHandler(handle func(raft.RPC)) {
	g.stallGuard.SetHeartbeatHandler(func(rpc raft.RPC) {
		g.heartbeats.RLock()
		defer g.heartbeats.RUnlock()
		handle(rpc)
	})
}

// Consumer implements raft.Transport. It returns the channel of the requests that were not refused.
func (g *transferGuard) Consumer() <-chan raft.RPC { return g.accepted }

// run forwards the requests of other replicas to raft, one after the other, until ctx ends.
func (g *transferGuard) run(ctx context.Context) error {
	received := g.stallGuard.Consumer()
	for {
		select {
		case rpc := <-received:
			if req, ok := rpc.Command.(*raft.TimeoutNowRequest); ok {
				g.handleTimeoutNow(ctx, rpc, req)
			} else {
				g.forwardToRaft(ctx, rpc)
			}
		case <-ctx.Done():
			return nil
		}
	}
}

func (g *transferGuard) forwardToRaft(ctx context.Context, rpc raft.RPC) {
	select {
	case g.accepted <- rpc:
	case <-ctx.Done(): // closing the transport answers the request
	}
}

// handleTimeoutNow forwards a TimeoutNow to raft, or refuses it. It returns when raft has obeyed
// the request, so that the next request is checked against the new state.
func (g *transferGuard) handleTimeoutNow(ctx context.Context, rpc raft.RPC, req *raft.TimeoutNowRequest) {
	if err := g.checkTimeoutNow(string(req.ID)); err != nil {
		g.elections.node.log.Warn("leadership transfer refused", "error", err)
		rpc.Respond(&raft.TimeoutNowResponse{}, err)
		return
	}
	node := g.elections.net.hints.Raft.Load()
	g.heartbeats.Lock()
	defer g.heartbeats.Unlock()
	term := node.CurrentTerm()
	obeyed := make(chan raft.RPCResponse, 1)
	g.forwardToRaft(ctx, raft.RPC{Command: req, RespChan: obeyed})
	select {
	case a := <-obeyed:
		rpc.Respond(a.Response, a.Error)
		awaitTermAfter(ctx, node, term)
	case <-ctx.Done():
	}
}

// termPoll is how often awaitTermAfter checks the term of raft.
const termPoll = time.Millisecond

// awaitTermAfter waits until raft has written a later term than term, or is not a candidate. It
// waits at most failover.MaxPendingWrite, because a candidate with a stalled disk cannot win.
func awaitTermAfter(ctx context.Context, node *raft.Raft, term uint64) {
	poll, timeout := time.NewTicker(termPoll), time.NewTimer(failover.MaxPendingWrite)
	defer poll.Stop()
	defer timeout.Stop()
	for node.State() == raft.Candidate && node.CurrentTerm() == term {
		select {
		case <-poll.C:
		case <-timeout.C:
			return
		case <-ctx.Done():
			return
		}
	}
}

// checkTimeoutNow returns nil if raft may obey a TimeoutNow of the replica sender. Otherwise it
// returns the reason why the request is outdated or cannot succeed.
func (g *transferGuard) checkTimeoutNow(sender string) error {
	node, self := g.elections.net.hints.Raft.Load(), g.elections.node.cfg.Name
	if node == nil {
		return fmt.Errorf("leadership transfer from %q refused: replica %s has just started and follows no leader",
			sender, self)
	}
	_, leader := node.LeaderWithID()
	state := node.State()
	view := failover.View{Role: failover.Candidate, Leader: string(leader)}
	if state == raft.Follower {
		view.Role = failover.Follower
	}
	view.Log.WritePending = g.elections.node.meters.disk.OldestWriteAge()
	var err error
	g.elections.pledge.usePledge(func(p *failover.Pledge) {
		err = p.CheckTimeoutNow(g.elections.failoverSettings(), view, sender)
	})
	switch {
	case errors.Is(err, failover.ErrStalledDisk):
		return fmt.Errorf("leadership transfer from %q refused: replica %s cannot vote for itself: %w", sender, self,
			err)
	case err != nil:
		return fmt.Errorf("leadership transfer from %q refused: replica %s is a %s and its leader is %q: %w",
			sender, self, rolelog.RoleName(state), string(leader), err)
	}
	return nil
}
