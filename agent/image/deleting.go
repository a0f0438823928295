package image

import (
	"context"
	"sync"
	"time"
)

// deletingPatience is how long is waited for what is being deleted before something else is: a disk may hang.
const deletingPatience = 30 * time.Second

// deletions are those that go on in the background. The zero value has none. Safe for concurrent use.
type deletions struct {
	mu    sync.Mutex
	under map[chan struct{}]struct{}
}

// begin notes one, until end is called.
func (d *deletions) begin() (end func()) {
	done := make(chan struct{})
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.under == nil {
		d.under = map[chan struct{}]struct{}{}
	}
	d.under[done] = struct{}{}
	return func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		delete(d.under, done)
		close(done)
	}
}

// wait returns when those have ended that had begun, or after the patience; later ones are not waited for.
func (d *deletions) wait(ctx context.Context) error {
	d.mu.Lock()
	all := make([]chan struct{}, 0, len(d.under))
	for done := range d.under {
		all = append(all, done)
	}
	d.mu.Unlock()
	bounded, cancel := context.WithTimeout(ctx, deletingPatience)
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
