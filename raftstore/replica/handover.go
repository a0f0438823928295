package replica

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/hashicorp/raft"
)

// A leader that hands over tells its successor to stand for election at once. That request names no term, and raft obeys it
// whoever sends it and whatever raft does: a leader that hears one steps down. One that comes late, because its packet was
// lost and sent again, or because it was sent twice, would so depose the leader whom it has made, or another one. Therefore
// raft hears of it here only while this replica follows who sends it, or where this replica has told itself (stand).

// handOvers is a transport that refuses outdated hand-overs.
//
// raft handles heartbeats beside its main goroutine. One that it handles after it has obeyed a hand-over, and before it has
// written its new term, makes the previous leader the leader of the candidate. If that election is lost, the candidate refuses
// its vote to all others because it has a leader, until that leader is back. Heartbeats therefore wait meanwhile.
type handOvers struct {
	*silentWhenHung
	r          *Replica
	timely     chan raft.RPC
	heartbeats sync.RWMutex // held to read while a heartbeat is handled, and to write from a hand-over to the new term
}

func newHandOvers(t *silentWhenHung, r *Replica) *handOvers {
	return &handOvers{silentWhenHung: t, r: r, timely: make(chan raft.RPC)}
}

// SetHeartbeatHandler implements raft.Transport.
func (h *handOvers) SetHeartbeatHandler(handle func(raft.RPC)) {
	h.silentWhenHung.SetHeartbeatHandler(func(rpc raft.RPC) {
		h.heartbeats.RLock()
		defer h.heartbeats.RUnlock()
		handle(rpc)
	})
}

// Consumer implements raft.Transport.
func (h *handOvers) Consumer() <-chan raft.RPC { return h.timely }

// run hands on to raft what the others send, one after the other, until ctx ends.
func (h *handOvers) run(ctx context.Context) error {
	came := h.silentWhenHung.Consumer()
	for {
		select {
		case rpc := <-came:
			if req, ok := rpc.Command.(*raft.TimeoutNowRequest); ok {
				h.judge(ctx, rpc, req)
			} else {
				h.pass(ctx, rpc)
			}
		case <-ctx.Done():
			return nil
		}
	}
}

func (h *handOvers) pass(ctx context.Context, rpc raft.RPC) {
	select {
	case h.timely <- rpc:
	case <-ctx.Done(): // the transport is about to be closed, which answers
	}
}

// judge hands a hand-over on, or refuses it. It returns when raft has obeyed: the next one is judged by what has become of this.
func (h *handOvers) judge(ctx context.Context, rpc raft.RPC, req *raft.TimeoutNowRequest) {
	if err := h.late(string(req.ID)); err != nil {
		h.r.log.Warn("a hand-over is not obeyed", "error", err)
		rpc.Respond(&raft.TimeoutNowResponse{}, err)
		return
	}
	up := h.r.hints.raft.Load()
	h.heartbeats.Lock()
	defer h.heartbeats.Unlock()
	term := up.CurrentTerm()
	obeyed := make(chan raft.RPCResponse, 1)
	h.pass(ctx, raft.RPC{Command: req, RespChan: obeyed})
	select {
	case a := <-obeyed:
		rpc.Respond(a.Response, a.Error)
		awaitTermAfter(ctx, up, term)
	case <-ctx.Done():
	}
}

// termPoll is how often a new term of raft is checked for.
const termPoll = time.Millisecond

// awaitTermAfter returns when raft, which has become a candidate in a term, has written the next term or is no longer a
// candidate, or after writePatience: a candidate whose disk does not write cannot win.
func awaitTermAfter(ctx context.Context, up *raft.Raft, term uint64) {
	poll, late := time.NewTicker(termPoll), time.NewTimer(writePatience)
	defer poll.Stop()
	defer late.Stop()
	for up.State() == raft.Candidate && up.CurrentTerm() == term {
		select {
		case <-poll.C:
		case <-late.C:
			return
		case <-ctx.Done():
			return
		}
	}
}

// late returns the reason why a leadership transfer is outdated or cannot succeed; nil = valid.
func (h *handOvers) late(from string) error {
	up := h.r.hints.raft.Load()
	if up == nil {
		return fmt.Errorf("replica %s has just started, and follows nobody yet: %q tells it to stand for election", h.r.cfg.Name, from)
	}
	_, leader := up.LeaderWithID()
	state := up.State()
	if took := h.r.meters.pendingWrite(); took > writePatience {
		return fmt.Errorf("replica %s cannot vote for itself: a write has been waiting for its disk for %v: %q tells it to stand for election",
			h.r.cfg.Name, took.Round(time.Millisecond), from)
	}
	// This replica stands in the place of a leader that it still follows: if it has voted for another replica since, or follows
	// one, its election could only depose the new leader.
	follows := string(leader)
	if state == raft.Follower && follows != "" && (from == follows || from == h.r.cfg.Name && h.r.word.replaced() == follows) {
		return nil
	}
	return fmt.Errorf("replica %s is a %s and takes %q for the leader: %q tells it to stand for election", h.r.cfg.Name, roleName(state), string(leader), from)
}
