package agent

import (
	"context"
	"sync"
)

// Watchers are those who want to know when something changes. The zero value is ready to use.
type Watchers struct {
	mu  sync.Mutex
	all map[chan struct{}]bool
}

// Changes is told of changes until ctx ends. Who is slow hears once of many.
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

// Tell wakes all, and waits for none.
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
