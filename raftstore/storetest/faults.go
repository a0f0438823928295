package storetest

import (
	"os"
	"path/filepath"
	"sync"
	"time"
)

// Clock is the simulated clock of one replica: the machine's clock with an offset, or a stopped
// clock.
type Clock struct {
	mu     sync.Mutex
	offset time.Duration
	frozen time.Time // not zero while the clock is stopped
}

// Now returns the time of the simulated clock.
func (c *Clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.frozen.IsZero() {
		return c.frozen
	}
	return time.Now().Add(c.offset)
}

// Set sets the clock to the machine's time plus an offset, which may be negative.
func (c *Clock) Set(offset time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.offset = offset
}

func (c *Clock) freezeTime() {
	now := c.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.frozen = now
}

func (c *Clock) resumeTime() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.frozen = time.Time{}
}

// Clock returns the simulated clock of a host's replica.
func (c *Cluster) Clock(name string) *Clock { return c.hostOf(name).clock }

// Isolate drops all traffic between a replica and all other replicas, in both directions. Rejoin
// undoes it.
func (c *Cluster) Isolate(name string) { c.toAll(name, c.Network.Cut) }

// Mute drops all traffic from a replica to the other replicas. Rejoin undoes it.
func (c *Cluster) Mute(name string) { c.toAll(name, c.Network.CutOneWay) }

// Deafen drops all traffic from the other replicas to a replica. Rejoin undoes it.
func (c *Cluster) Deafen(name string) {
	c.toAll(name, func(name, other string) { c.Network.CutOneWay(other, name) })
}

// Rejoin undoes Isolate, Mute and Deafen of a replica: traffic between it and all others passes
// again.
func (c *Cluster) Rejoin(name string) { c.toAll(name, c.Network.Mend) }

// Bridge drops all traffic between replicas, except the traffic to and from the replica middle.
// Network.Heal undoes it.
func (c *Cluster) Bridge(middle string) {
	names := c.Names()
	for i, a := range names {
		for _, b := range names[i+1:] {
			if a != middle && b != middle {
				c.Network.Cut(a, b)
			}
		}
	}
}

// SlowAll delays all traffic by delay plus a random time up to jitter. If both are 0, the delay is
// removed.
func (c *Cluster) SlowAll(delay, jitter time.Duration) {
	for _, name := range c.Names() {
		c.toAll(name, func(name, other string) { c.Network.Slow(name, other, delay, jitter) })
	}
}

func (c *Cluster) toAll(name string, do func(name, other string)) {
	for _, other := range c.Names() {
		if other != name {
			do(name, other)
		}
	}
}

// Pause simulates a stopped process: the replica's traffic in both directions is delayed until
// Resume, and its clock is stopped. Its code still runs, so the replica can detect the pause. A
// pause that it cannot detect requires a separate process.
func (c *Cluster) Pause(name string) {
	c.Clock(name).freezeTime()
	c.Isolate(name)
}

// Resume undoes Pause. The delayed traffic is delivered.
func (c *Cluster) Resume(name string) {
	c.Clock(name).resumeTime()
	c.Rejoin(name)
}

// Wipe deletes the disk of a stopped replica. The replica then starts as a new replica with the
// same name. It must be removed from the raft cluster before it starts.
func (c *Cluster) Wipe(name string) {
	c.t.Helper()
	h := c.hostOf(name)
	c.mu.Lock()
	h.bootstrap = false
	c.mu.Unlock()
	if err := os.RemoveAll(filepath.Join(c.dir, name)); err != nil {
		c.t.Fatalf("wiping %s: %v", name, err)
	}
}
