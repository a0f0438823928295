package agent

import (
	"context"
	"sync"

	"keelson.dev/keelson/internal/wakeup"
)

// ChangeNotifier notifies its subscribers of changes. The zero value is ready to use.
type ChangeNotifier struct {
	mu          sync.Mutex
	subscribers map[wakeup.Signal]bool
}

// Subscribe returns a channel that is signaled on changes until ctx ends. A slow subscriber
// receives one signal for several changes.
func (w *ChangeNotifier) Subscribe(ctx context.Context) <-chan struct{} {
	c := wakeup.New()
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.subscribers == nil {
		w.subscribers = map[wakeup.Signal]bool{}
	}
	w.subscribers[c] = true
	context.AfterFunc(ctx, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.subscribers, c)
	})
	return c
}

// Notify signals all subscribers that a change has occurred. It does not block.
func (w *ChangeNotifier) Notify() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for c := range w.subscribers {
		c.Send()
	}
}
