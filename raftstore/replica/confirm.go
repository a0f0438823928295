package replica

import (
	"sync"

	"github.com/hashicorp/raft"
)

// confirmer finds out whether a majority still follows this leader. Each voter
// has at most one heartbeat of its own under way: one that is slow answers the
// rounds that it can, and holds up nobody.
type confirmer struct {
	mu     sync.Mutex
	number uint64
	round  *confirmRound // the present one, or nil
	voters map[raft.ServerID]*confirmVoter
}

type confirmRound struct {
	number uint64
	need   int // more voters that must confirm
	left   int // voters that have not answered
	done   chan struct{}
}

type confirmVoter struct {
	server raft.Server
	wake   chan struct{}
}

// ask runs one round: heartbeats sent now, answered by a majority. Rounds
// follow one another; the caller sees to it.
func (c *confirmer) ask(r *Replica, l *leadership, voters []raft.Server) bool {
	c.mu.Lock()
	c.number++
	round := &confirmRound{number: c.number, need: len(voters)/2 + 1, done: make(chan struct{})}
	c.round = round
	for _, v := range voters {
		if string(v.ID) == r.cfg.Name {
			round.need--
			continue
		}
		round.left++
		nudge(c.voter(r, l, v).wake)
	}
	enough := round.need <= 0
	c.mu.Unlock()
	if enough {
		return l.ctx.Err() == nil
	}
	select {
	case <-round.done:
	case <-l.ctx.Done():
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return round.need <= 0 && l.ctx.Err() == nil
}

// voter returns the goroutine's mailbox for one voter, starting it on first use.
func (c *confirmer) voter(r *Replica, l *leadership, s raft.Server) *confirmVoter {
	if v := c.voters[s.ID]; v != nil {
		v.server = s
		return v
	}
	if c.voters == nil {
		c.voters = make(map[raft.ServerID]*confirmVoter)
	}
	v := &confirmVoter{server: s, wake: make(chan struct{}, 1)}
	c.voters[s.ID] = v
	r.lead.establishes.Add(1)
	go func() {
		defer r.lead.establishes.Done()
		c.serve(r, l, v)
	}()
	return v
}

// serve sends heartbeats to one voter while this leadership lasts.
func (c *confirmer) serve(r *Replica, l *leadership, v *confirmVoter) {
	for {
		select {
		case <-v.wake:
		case <-l.ctx.Done():
			return
		}
		c.mu.Lock()
		number, server := c.number, v.server
		c.mu.Unlock()
		c.answer(number, r.heartbeat(server, l.term))
	}
}

// answer counts a voter's answer to a round, unless a later one has begun.
func (c *confirmer) answer(number uint64, confirmed bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.round == nil || c.round.number != number {
		return
	}
	c.round.left--
	if confirmed {
		c.round.need--
	}
	if c.round.need <= 0 || c.round.left == 0 {
		close(c.round.done)
		c.round = nil
	}
}

// heartbeat asks one voter whether it still follows this leader. It takes the
// path of raft's own heartbeats, which does not wait for the voter's disk.
func (r *Replica) heartbeat(to raft.Server, term uint64) bool {
	if r.hangs() {
		return false
	}
	req := &raft.AppendEntriesRequest{RPCHeader: r.header(), Term: term}
	req.Leader = req.RPCHeader.Addr
	var resp raft.AppendEntriesResponse
	err := r.trans.AppendEntries(to.ID, to.Address, req, &resp)
	return err == nil && resp.Success && resp.Term == term
}
