package replication

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"

	"keelson.dev/keelson/internal/wakeup"
)

// CommitNotifier notifies followers immediately that an entry is committed. raft itself would
// notify them with the next entry, or after CommitTimeout. The notice is an AppendEntries request
// without entries, with the committed entry as previous entry and commit index. A follower that has
// the entry applies it, and any other follower refuses the request.
type CommitNotifier struct {
	net     NotifierConfig
	Raft    atomic.Pointer[raft.Raft] // nil until raft runs
	mu      sync.Mutex
	term    uint64
	cancel  context.CancelFunc
	ctx     context.Context
	peers   map[raft.ServerID]*peerNotices
	running sync.WaitGroup
}

// notice is the content of a commit notice: the committed entry and the follower.
type notice struct {
	index, term uint64
	server      raft.Server
}

// peerNotices holds the newest notice for one follower.
type peerNotices struct {
	mu     sync.Mutex
	latest notice
	filled wakeup.Signal
}

// NotifierConfig contains the dependencies of a CommitNotifier.
type NotifierConfig struct {
	Life     context.Context // all notices stop when it ends
	Self     raft.ServerID
	Fallback time.Duration // time after which raft itself notifies the followers of a commit
	Header   func() raft.RPCHeader
	Send     SendAppend
	Early    *EarlySender
}

func (h *CommitNotifier) Initialize(n NotifierConfig) {
	h.net = n
	h.peers = make(map[raft.ServerID]*peerNotices)
	h.ctx, h.cancel = context.WithCancel(n.Life)
}

// CommitIndex returns the last index that raft knows to be committed, or 0 before raft has started.
func (h *CommitNotifier) CommitIndex() uint64 {
	if r := h.Raft.Load(); r != nil {
		return r.CommitIndex()
	}
	return 0
}

func (h *CommitNotifier) AwaitNotices() { h.running.Wait() }

// NotifyCommitted sends a commit index to the followers. It runs on the goroutine of the state
// machine before the entry is applied. Followers therefore apply the entry at the same time as the
// leader.
func (h *CommitNotifier) NotifyCommitted(index, term uint64) {
	r := h.Raft.Load()
	if r == nil || r.State() != raft.Leader || r.CurrentTerm() != term {
		return // this replica does not lead in the term
	}
	newer := r.LastIndex() > index
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.net.Life.Err() != nil {
		return
	}
	if term != h.term {
		h.cancel()
		h.ctx, h.cancel = context.WithCancel(h.net.Life)
		h.term = term
		clear(h.peers)
	}
	for _, s := range r.GetConfiguration().Configuration().Servers {
		if s.ID == h.net.Self {
			continue
		}
		if newer && !h.net.Early.NeedsNotice(s.ID, index) {
			continue // the next entries carry the commit index
		}
		p := h.peers[s.ID]
		if p == nil {
			p = &peerNotices{filled: wakeup.New()}
			h.peers[s.ID] = p
			h.running.Add(1)
			go func(ctx context.Context) {
				defer h.running.Done()
				h.sendNotices(ctx, p)
			}(h.ctx)
		}
		p.mu.Lock()
		p.latest = notice{index: index, term: term, server: s}
		p.mu.Unlock()
		p.filled.Send()
	}
}

// sendNotices sends each new notice in p to its follower; only the newest one if there are several.
// It returns when ctx ends, which is at the end of the term.
func (h *CommitNotifier) sendNotices(ctx context.Context, p *peerNotices) {
	for {
		select {
		case <-p.filled:
		case <-ctx.Done():
			return
		}
		p.mu.Lock()
		n := p.latest
		p.mu.Unlock()
		h.repeatNotice(ctx, p, n)
	}
}

// repeatNotice sends a notice repeatedly until the follower has accepted it, a newer notice exists,
// or raft itself is about to notify the follower.
func (h *CommitNotifier) repeatNotice(ctx context.Context, p *peerNotices, n notice) {
	pause := time.Millisecond
	for spent := time.Duration(0); spent < h.net.Fallback; spent += pause {
		req := &raft.AppendEntriesRequest{
			RPCHeader: h.net.Header(), Term: n.term,
			PrevLogEntry: n.index, PrevLogTerm: n.term, LeaderCommitIndex: n.index,
		}
		req.Leader = req.RPCHeader.Addr
		var resp raft.AppendEntriesResponse
		err := h.net.Send(n.server.ID, n.server.Address, req, &resp)
		if err != nil || resp.Success || resp.Term > n.term {
			return
		}
		// the follower does not hold the entry yet
		t := time.NewTimer(pause)
		select {
		case <-t.C:
			pause = min(2*pause, 64*time.Millisecond)
		case <-p.filled:
			t.Stop()
			p.filled.Send()
			return
		case <-ctx.Done():
			t.Stop()
			return
		}
	}
}
