// Package readindex determines the raft index of a linearizable read. Concurrent reads share a
// round, and a round confirms the leadership by a majority.
package readindex

import (
	"context"
	"sync"

	"github.com/hashicorp/raft"

	"keelson.dev/keelson/internal/wakeup"
)

// Confirmer determines whether a majority still follows this leader. At most one of its heartbeats
// is in progress per voter: a slow voter answers only some rounds and does not delay the others.
type Confirmer struct {
	mu     sync.Mutex
	number uint64
	round  *confirmRound // the current round; nil = none
	voters map[raft.ServerID]*confirmVoter
}

type confirmRound struct {
	number uint64
	need   int // how many more voters must confirm
	left   int // how many voters have not answered
	done   chan struct{}
}

type confirmVoter struct {
	server raft.Server
	wake   wakeup.Signal
}

// Leadership contains what a Confirmer needs to know about the current leadership of this replica.
type Leadership struct {
	Ctx       context.Context // ends with the leadership
	Self      raft.ServerID
	Heartbeat func(to raft.Server) bool // sends a heartbeat, and reports whether the voter follows this leader
	Running   *sync.WaitGroup           // counts the goroutines that send heartbeats
}

// ConfirmLeader runs one round. It reports whether a majority has answered heartbeats that were
// sent after the call started. It must not be called concurrently.
func (c *Confirmer) ConfirmLeader(l Leadership, voters []raft.Server) bool {
	c.mu.Lock()
	c.number++
	round := &confirmRound{number: c.number, need: len(voters)/2 + 1, done: make(chan struct{})}
	c.round = round
	for _, v := range voters {
		if v.ID == l.Self {
			round.need--
			continue
		}
		round.left++
		c.confirmVoterFor(l, v).wake.Send()
	}
	enough := round.need <= 0
	c.mu.Unlock()
	if enough {
		return l.Ctx.Err() == nil
	}
	select {
	case <-round.done:
	case <-l.Ctx.Done():
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return round.need <= 0 && l.Ctx.Err() == nil
}

// confirmVoterFor returns the confirmVoter of a voter, through which the goroutine for this voter
// is woken. The first call for a voter starts that goroutine. The caller holds c.mu.
func (c *Confirmer) confirmVoterFor(l Leadership, s raft.Server) *confirmVoter {
	if v := c.voters[s.ID]; v != nil {
		v.server = s
		return v
	}
	if c.voters == nil {
		c.voters = make(map[raft.ServerID]*confirmVoter)
	}
	v := &confirmVoter{server: s, wake: wakeup.New()}
	c.voters[s.ID] = v
	l.Running.Add(1)
	go func() {
		defer l.Running.Done()
		c.sendHeartbeats(l, v)
	}()
	return v
}

// sendHeartbeats sends a heartbeat to one voter each time a round starts, and counts the answer,
// until the leadership ends.
func (c *Confirmer) sendHeartbeats(l Leadership, v *confirmVoter) {
	for {
		select {
		case <-v.wake:
		case <-l.Ctx.Done():
			return
		}
		c.mu.Lock()
		number, server := c.number, v.server
		c.mu.Unlock()
		c.countAnswer(number, l.Heartbeat(server))
	}
}

// countAnswer counts the answer of a voter to the round with the given number, unless a later round
// has started.
func (c *Confirmer) countAnswer(number uint64, confirmed bool) {
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
