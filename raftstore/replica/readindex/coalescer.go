package readindex

import (
	"context"
	"sync"
)

// Index is the result of a round of a Coalescer: a raft index that includes everything that was
// acknowledged before the round started.
type Index struct {
	Index uint64
	Term  uint64 // the term in which a majority confirmed this replica as leader; 0 = another replica leads
}

// Coalescer determines the read index for many concurrent callers with one call of Round, which is
// called a round. A round serves only the callers that have called before it started. A Coalescer
// is safe for concurrent use.
type Coalescer struct {
	Round func() (Index, error)

	mu     sync.Mutex
	next   *readRound
	active bool
}

type readRound struct {
	done chan struct{}
	at   Index
	err  error
}

func (c *Coalescer) AwaitRound(ctx context.Context) (Index, error) {
	if err := ctx.Err(); err != nil { // a round may be so fast that it would answer this call although ctx has ended
		return Index{}, err
	}
	c.mu.Lock()
	if c.next == nil {
		c.next = &readRound{done: make(chan struct{})}
	}
	mine := c.next
	if !c.active {
		c.active = true
		go c.runRounds()
	}
	c.mu.Unlock()
	select {
	case <-mine.done:
		return mine.at, mine.err
	case <-ctx.Done():
		return Index{}, ctx.Err()
	}
}

// runRounds calls Round repeatedly until no caller waits. Each round serves all callers that waited
// when it started.
func (c *Coalescer) runRounds() {
	for {
		c.mu.Lock()
		now := c.next
		c.next = nil
		if now == nil {
			c.active = false
			c.mu.Unlock()
			return
		}
		c.mu.Unlock()
		now.at, now.err = c.Round()
		close(now.done)
	}
}
