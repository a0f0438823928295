package registry

import (
	"context"
	"sync"
	"sync/atomic"

	"keelson.dev/keelson/raftstore"
)

// progress is a monotonic revision that goroutines can wait for.
type progress struct {
	rev atomic.Uint64

	mu      sync.Mutex
	waiting map[*waiter]struct{}
}

type waiter struct {
	target raftstore.Revision
	done   chan struct{}
}

func (p *progress) at() raftstore.Revision { return raftstore.Revision(p.rev.Load()) }

// advance sets the revision to rev and wakes its waiters. It ignores an older rev.
func (p *progress) advance(rev raftstore.Revision) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if rev <= p.at() {
		return
	}
	p.rev.Store(uint64(rev))
	for w := range p.waiting {
		if w.target <= rev {
			close(w.done)
			delete(p.waiting, w)
		}
	}
}

// wait waits until the revision is at least target, or returns ctx's error.
func (p *progress) wait(ctx context.Context, target raftstore.Revision) error {
	if p.at() >= target {
		return nil
	}
	p.mu.Lock()
	if p.at() >= target {
		p.mu.Unlock()
		return nil
	}
	w := &waiter{target: target, done: make(chan struct{})}
	if p.waiting == nil {
		p.waiting = make(map[*waiter]struct{})
	}
	p.waiting[w] = struct{}{}
	p.mu.Unlock()
	select {
	case <-w.done:
		return nil
	case <-ctx.Done():
		p.mu.Lock()
		delete(p.waiting, w)
		p.mu.Unlock()
		return ctx.Err()
	}
}
