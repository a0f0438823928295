package replica

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"
)

// hinter tells followers at once that an entry is committed. raft itself would
// tell them with the next entry, or after CommitTimeout. The notice is an
// empty AppendEntries whose previous entry and commit index are the entry
// committed: a follower that holds it applies it, any other refuses.
type hinter struct {
	r       *Replica
	raft    atomic.Pointer[raft.Raft] // nil until raft is up
	mu      sync.Mutex
	term    uint64
	cancel  context.CancelFunc
	ctx     context.Context
	peers   map[raft.ServerID]*peerHinter
	running sync.WaitGroup
}

// notice is what a follower is told.
type notice struct {
	index, term uint64
	server      raft.Server
}

// peerHinter keeps the newest notice for one follower.
type peerHinter struct {
	mu     sync.Mutex
	latest notice
	filled chan struct{}
}

func (h *hinter) init(r *Replica) {
	h.r = r
	h.peers = make(map[raft.ServerID]*peerHinter)
	h.ctx, h.cancel = context.WithCancel(r.ctx)
}

// commitIndex is the last index that raft knows to be committed.
func (h *hinter) commitIndex() uint64 {
	if r := h.raft.Load(); r != nil {
		return r.CommitIndex()
	}
	return 0
}

func (h *hinter) wait() { h.running.Wait() }

// committed runs on the state machine's goroutine, before it applies: the
// followers apply at the same time as the leader.
func (h *hinter) committed(index, term uint64) {
	r := h.raft.Load()
	if r == nil || r.State() != raft.Leader || r.CurrentTerm() != term {
		return // not ours to tell
	}
	newer := r.LastIndex() > index
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.r.ctx.Err() != nil {
		return
	}
	if term != h.term {
		h.cancel()
		h.ctx, h.cancel = context.WithCancel(h.r.ctx)
		h.term = term
		clear(h.peers)
	}
	for _, s := range r.GetConfiguration().Configuration().Servers {
		if string(s.ID) == h.r.cfg.Name {
			continue
		}
		if newer && !h.r.early.untold(s.ID, index) {
			continue // the next entries will tell it
		}
		p := h.peers[s.ID]
		if p == nil {
			p = &peerHinter{filled: make(chan struct{}, 1)}
			h.peers[s.ID] = p
			h.running.Add(1)
			go func(ctx context.Context) {
				defer h.running.Done()
				h.run(ctx, p)
			}(h.ctx)
		}
		p.mu.Lock()
		p.latest = notice{index: index, term: term, server: s}
		p.mu.Unlock()
		nudge(p.filled)
	}
}

// run sends the notices for one follower, for one term of leadership.
func (h *hinter) run(ctx context.Context, p *peerHinter) {
	for {
		select {
		case <-p.filled:
		case <-ctx.Done():
			return
		}
		p.mu.Lock()
		n := p.latest
		p.mu.Unlock()
		h.tell(ctx, p, n)
	}
}

// tell repeats a notice until the follower took it, a newer one came, or raft's
// own fallback is about to.
func (h *hinter) tell(ctx context.Context, p *peerHinter, n notice) {
	pause := time.Millisecond
	for spent := time.Duration(0); spent < h.r.cfg.CommitTimeout; spent += pause {
		req := &raft.AppendEntriesRequest{
			RPCHeader: h.r.header(), Term: n.term,
			PrevLogEntry: n.index, PrevLogTerm: n.term, LeaderCommitIndex: n.index,
		}
		req.Leader = req.RPCHeader.Addr
		var resp raft.AppendEntriesResponse
		err := h.r.trans.AppendEntries(n.server.ID, n.server.Address, req, &resp)
		if err != nil || resp.Success || resp.Term > n.term {
			return
		}
		// The follower does not hold the entry yet.
		t := time.NewTimer(pause)
		select {
		case <-t.C:
			pause = min(2*pause, 64*time.Millisecond)
		case <-p.filled:
			t.Stop()
			nudge(p.filled)
			return
		case <-ctx.Done():
			t.Stop()
			return
		}
	}
}
