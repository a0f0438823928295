package replica

import (
	"errors"
	"math/rand/v2"
	"sync"
	"time"

	"keelson.dev/keelson/internal/durable/durabletest"
	"keelson.dev/keelson/internal/wakeup"
)

// PowerCut is the disk of one host that in a power cut forgets what was not
// synced, or only some of it.
type PowerCut struct {
	layer *durabletest.Lossy

	mu   sync.Mutex
	rng  *rand.Rand
	cuts int
	gone chan struct{} // closed when syncs that hang shall fail
}

// NewPowerCut returns a disk whose choices follow from a seed.
func NewPowerCut(seed uint64) *PowerCut {
	return &PowerCut{layer: new(durabletest.Lossy), rng: rand.New(rand.NewPCG(seed, 0x706f776572))}
}

// Put makes a replica use the disk for its log and its snapshots.
func (p *PowerCut) Put(c *Config) { c.Storage.layer = p.layer }

// Fade blocks each sync for good. The channel receives a value when the first sync blocks.
func (p *PowerCut) Fade() <-chan struct{} {
	hangs, gone := wakeup.New(), make(chan struct{})
	p.mu.Lock()
	p.gone = gone
	p.mu.Unlock()
	p.layer.Fail(func(op, _ string) error {
		if op != "sync" {
			return nil
		}
		hangs.Send()
		<-gone
		return errors.New("the power is gone")
	})
	return hangs
}

// Fail makes the syncs that hang fail, and all that come.
func (p *PowerCut) Fail() {
	p.mu.Lock()
	defer p.mu.Unlock()
	close(p.gone)
}

// Cut takes the power away from a replica that is down: each sector that was
// not synced is lost, or is not, by chance. It reports whether any was. Then
// the disk works again.
func (p *PowerCut) Cut() (lost bool, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	odds := 0 // all, half, or none; the first time all
	if p.cuts++; p.cuts > 1 {
		odds = p.rng.IntN(3)
	}
	lost, err = p.layer.Crash(func() bool { return odds == 0 || odds == 1 && p.rng.IntN(2) == 0 })
	p.layer.Fail(nil)
	return lost, err
}

// Slow makes every sync take so long.
func (p *PowerCut) Slow(d time.Duration) {
	p.layer.Fail(func(op, _ string) error {
		if op == "sync" {
			time.Sleep(d)
		}
		return nil
	})
}
