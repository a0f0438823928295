package storetest

import (
	"os"
	"path/filepath"
	"sync"
	"time"
)

// Clock is the clock of one host: the machine's, moved by an offset, or standing still.
type Clock struct {
	mu     sync.Mutex
	offset time.Duration
	frozen time.Time // not zero while it stands
}

// Now tells the time.
func (c *Clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.frozen.IsZero() {
		return c.frozen
	}
	return time.Now().Add(c.offset)
}

// Set moves the clock to the machine's time and an offset, which may be negative.
func (c *Clock) Set(offset time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.offset = offset
}

func (c *Clock) freeze() {
	now := c.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.frozen = now
}

func (c *Clock) thaw() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.frozen = time.Time{}
}

// Clock is the clock by which a host's replica goes.
func (c *Cluster) Clock(name string) *Clock { return c.host(name).clock }

// Isolate cuts a replica off from all others; Rejoin undoes it.
func (c *Cluster) Isolate(name string) { c.toAll(name, c.Network.Cut) }

// Mute stops all that a replica says to the others: it hears them and is not
// heard. Rejoin undoes it.
func (c *Cluster) Mute(name string) { c.toAll(name, c.Network.CutOneWay) }

// Deafen stops all that the others say to a replica: it is heard and hears
// nothing. Rejoin undoes it.
func (c *Cluster) Deafen(name string) {
	c.toAll(name, func(name, other string) { c.Network.CutOneWay(other, name) })
}

// Rejoin mends all cables of a replica.
func (c *Cluster) Rejoin(name string) { c.toAll(name, c.Network.Mend) }

// Bridge leaves one replica as the only one that the others can speak with.
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

// SlowAll delays all traffic by delay and up to jitter more; zeros undo it.
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

// Pause is as near to stopping a replica's process as one process allows: what
// it sends and what it is sent is held back, and its clock stands. It can still
// think, so a pause that it cannot notice needs a process of its own.
func (c *Cluster) Pause(name string) {
	c.Clock(name).freeze()
	c.Isolate(name)
}

// Resume undoes Pause: everything held back arrives.
func (c *Cluster) Resume(name string) {
	c.Clock(name).thaw()
	c.Rejoin(name)
}

// Wipe takes away the disk of a replica that is down, which then is a new one
// under an old name: it must be removed from the group before it starts.
func (c *Cluster) Wipe(name string) {
	c.t.Helper()
	h := c.host(name)
	c.mu.Lock()
	h.bootstrap = false
	c.mu.Unlock()
	if err := os.RemoveAll(filepath.Join(c.dir, name)); err != nil {
		c.t.Fatalf("wiping %s: %v", name, err)
	}
}
