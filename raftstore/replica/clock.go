package replica

import (
	"context"
	"sync"
	"time"
)

// The store has a time of its own, in unix milliseconds, by which keys expire
// and proposals are forgotten. It is founded on the clock of the first leader
// and from then on counts elapsed time: every replica advances its idea of it by
// what its own clock says has passed, and takes over a later one that it hears
// of in commands and from the leader. A clock that jumps back adds nothing, one
// that jumps ahead adds maxStep at most. Only when nobody was there to count,
// because all replicas were down, does the next leader look at its clock again.
const (
	// clockTick is how often time is counted; maxStep what may pass at once.
	// The difference is room for a machine that is very busy.
	clockTick = time.Second
	maxStep   = 5 * time.Second
)

// clock is this replica's idea of the store's time.
type clock struct {
	now func() time.Time

	mu      sync.Mutex
	at      time.Time // when it was counted last, by now
	elapsed time.Duration
	base    int64 // unix milliseconds; 0 = nothing is known
	told    bool  // a leader has told the time, or this replica has founded it
}

func (c *clock) init(now func() time.Time) { c.now, c.at = now, now() }

// count adds what has passed since the last count.
func (c *clock) count() int64 {
	now := c.now()
	// Sub goes by the monotonic clock where both times have one.
	c.elapsed += min(max(now.Sub(c.at), 0), maxStep)
	c.at = now
	return c.base + c.elapsed.Milliseconds()
}

// read returns the store's time; as good as nothing before any was heard of.
func (c *clock) read() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.count()
}

// heard takes over a time that is later than one's own.
func (c *clock) heard(unixMs int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.raise(unixMs)
}

func (c *clock) raise(unixMs int64) {
	if unixMs > c.count() {
		c.base, c.elapsed = unixMs, 0
	}
}

// toldBy takes over the leader's time.
func (c *clock) toldBy(unixMs int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.raise(unixMs)
	c.told = true
}

// found looks at the wall clock if nobody who was there has told the time. A
// new leader does it.
func (c *clock) found() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.told {
		c.raise(c.now().UnixMilli())
		c.told = true
	}
}

// run counts until ctx ends, so that what passes unseen is never much.
func (c *clock) run(ctx context.Context) error {
	tick := time.NewTicker(clockTick)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			c.read()
		case <-ctx.Done():
			return nil
		}
	}
}
