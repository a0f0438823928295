package watchcache

import (
	"context"
	"sync"
	"sync/atomic"

	"keelson.dev/keelson/raftstore"
)

// progress is the revision up to which a cache has applied all changes. It only increases, and
// goroutines can wait for it.
type progress struct {
	rev atomic.Uint64

	mu      sync.Mutex
	waiters map[*waiter]struct{}
}

type waiter struct {
	target raftstore.Revision
	done   chan struct{}
}

func (p *progress) currentRevision() raftstore.Revision { return raftstore.Revision(p.rev.Load()) }

// advanceTo sets the revision to rev and wakes the goroutines that wait for it. It ignores a
// revision that is not newer.
func (p *progress) advanceTo(rev raftstore.Revision) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if rev <= p.currentRevision() {
		return
	}
	p.rev.Store(uint64(rev))
	for w := range p.waiters {
		if w.target <= rev {
			close(w.done)
			delete(p.waiters, w)
		}
	}
}

// waitFor waits until the revision is at least target. It returns the error of ctx if ctx ends
// first.
func (p *progress) waitFor(ctx context.Context, target raftstore.Revision) error {
	if p.currentRevision() >= target {
		return nil
	}
	p.mu.Lock()
	if p.currentRevision() >= target {
		p.mu.Unlock()
		return nil
	}
	w := &waiter{target: target, done: make(chan struct{})}
	if p.waiters == nil {
		p.waiters = make(map[*waiter]struct{})
	}
	p.waiters[w] = struct{}{}
	p.mu.Unlock()
	select {
	case <-w.done:
		return nil
	case <-ctx.Done():
		p.mu.Lock()
		delete(p.waiters, w)
		p.mu.Unlock()
		return ctx.Err()
	}
}
