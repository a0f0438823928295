package agent

import (
	"context"
	"sync"
)

// Watchers notifies its subscribers of changes. The zero value is ready to use.
type Watchers struct {
	mu  sync.Mutex
	all map[chan struct{}]bool
}

// Changes returns a channel that is signaled on changes until ctx ends. A slow subscriber receives
// one signal for several changes.
func (w *Watchers) Changes(ctx context.Context) <-chan struct{} {
	c := make(chan struct{}, 1)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.all == nil {
		w.all = map[chan struct{}]bool{}
	}
	w.all[c] = true
	context.AfterFunc(ctx, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.all, c)
	})
	return c
}

// Tell signals all subscribers and does not block.
func (w *Watchers) Tell() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for c := range w.all {
		select {
		case c <- struct{}{}:
		default:
		}
	}
}
