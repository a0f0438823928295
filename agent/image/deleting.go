package image

import (
	"context"
	"sync"
	"time"
)

// deletionTimeout bounds the wait for running deletions, because a disk may hang.
const deletionTimeout = 30 * time.Second

// deletions tracks the deletions that run in the background. The zero value has none. It is safe
// for concurrent use.
type deletions struct {
	mu      sync.Mutex
	running map[chan struct{}]struct{}
}

// startDeletion registers a background deletion that is running until end is called.
func (d *deletions) startDeletion() (end func()) {
	done := make(chan struct{})
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.running == nil {
		d.running = map[chan struct{}]struct{}{}
	}
	d.running[done] = struct{}{}
	return func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		delete(d.running, done)
		close(done)
	}
}

// awaitCurrent waits until the deletions that are running now have ended, or until deletionTimeout.
// It returns an error only if ctx ends.
func (d *deletions) awaitCurrent(ctx context.Context) error {
	d.mu.Lock()
	all := make([]chan struct{}, 0, len(d.running))
	for done := range d.running {
		all = append(all, done)
	}
	d.mu.Unlock()
	bounded, cancel := context.WithTimeout(ctx, deletionTimeout)
	defer cancel()
	for _, done := range all {
		select {
		case <-done:
		case <-bounded.Done():
			return ctx.Err()
		}
	}
	return nil
}
