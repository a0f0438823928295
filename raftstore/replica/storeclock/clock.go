// Package storeclock measures the time of the store, according to which keys expire and the
// outcomes of proposals are dropped.
package storeclock

import (
	"context"
	"sync"
	"time"
)

// The store has its own time, in Unix milliseconds, according to which keys expire and the outcomes
// of proposals are dropped. It starts with the clock of the first leader and then counts elapsed
// time. Every replica advances its store time by the time that has passed on its own clock. It
// adopts a later store time that it receives in commands or from the leader. A clock that jumps
// back adds nothing. A clock that jumps ahead adds at most maxStep. While all replicas are down, no
// time is counted; the next leader then reads its clock again.
const (
	// clockTick is how often elapsed time is added to the store time. maxStep is the largest time
	// that is added at once. It is longer than clockTick to allow for a very busy machine.
	clockTick = time.Second
	maxStep   = 5 * time.Second
)

// Clock is the store time of this replica. It is safe for concurrent use.
type Clock struct {
	now func() time.Time

	mu      sync.Mutex
	at      time.Time // when elapsed time was last added, according to now
	elapsed time.Duration
	base    int64 // store time at elapsed = 0, in Unix milliseconds; 0 = unknown
	told    bool  // a leader has sent its store time, or StartFromWallClock has set the store time
}

func (c *Clock) Initialize(now func() time.Time) { c.now, c.at = now, now() }

// addElapsed adds the time since the last call to elapsed, at most maxStep. It returns the store
// time in Unix milliseconds. The caller holds c.mu.
func (c *Clock) addElapsed() int64 {
	now := c.now()
	// Sub uses the monotonic clock if both times have one
	c.elapsed += min(max(now.Sub(c.at), 0), maxStep)
	c.at = now
	return c.base + c.elapsed.Milliseconds()
}

// CurrentTime returns the store time in Unix milliseconds. It is near 0 until a store time has been
// received or StartFromWallClock was called.
func (c *Clock) CurrentTime() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.addElapsed()
}

// ObserveTime adopts a store time, in Unix milliseconds, if it is later than the store time of this
// replica.
func (c *Clock) ObserveTime(unixMs int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.raiseTime(unixMs)
}

func (c *Clock) raiseTime(unixMs int64) {
	if unixMs > c.addElapsed() {
		c.base, c.elapsed = unixMs, 0
	}
}

// ObserveLeaderTime adopts the store time of the leader, in Unix milliseconds, if it is later than
// that of this replica. After that, StartFromWallClock has no effect.
func (c *Clock) ObserveLeaderTime(unixMs int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.raiseTime(unixMs)
	c.told = true
}

// StartFromWallClock adopts the wall clock if no leader has sent its store time since this process
// started. Every new leader calls it.
func (c *Clock) StartFromWallClock() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.told {
		c.raiseTime(c.now().UnixMilli())
		c.told = true
	}
}

// Run adds the elapsed time once per clockTick until ctx ends, so that no addition exceeds maxStep
// in normal operation. It returns nil.
func (c *Clock) Run(ctx context.Context) error {
	tick := time.NewTicker(clockTick)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			c.CurrentTime()
		case <-ctx.Done():
			return nil
		}
	}
}
