package session

import (
	"context"
	"slices"
	"sync"

	"keelson.dev/keelson/agent"
)

// follower is one listener of Follow. What it has not taken yet is bounded by agent.MaxChanged.
type follower struct {
	kinds []string

	mu      sync.Mutex
	pending agent.ObjectChanges
	due     bool
	wake    chan struct{}
}

// tell adds a batch, which is complete.
func (f *follower) tell(c agent.ObjectChanges) {
	mine := agent.ObjectChanges{Revision: c.Revision, All: c.All}
	for k := range c.Keys {
		if slices.Contains(f.kinds, k.Kind) {
			mine.AddKey(k)
		}
	}
	f.mu.Lock()
	f.due = f.due || mine.All || len(mine.Keys) > 0 || mine.Revision != f.pending.Revision
	f.pending.Merge(mine)
	f.mu.Unlock()
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// take returns what is due.
func (f *follower) take() (agent.ObjectChanges, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.due {
		return agent.ObjectChanges{}, false
	}
	out := f.pending
	f.pending, f.due = agent.ObjectChanges{Revision: out.Revision}, false
	return out, true
}

// Follow implements agent.Objects.
func (s *Session) Follow(ctx context.Context, kinds ...string) <-chan agent.ObjectChanges {
	out := make(chan agent.ObjectChanges)
	f := &follower{kinds: kinds, wake: make(chan struct{}, 1)}
	v := s.view
	v.mu.Lock()
	v.followers[f] = struct{}{}
	if v.known {
		f.tell(agent.ObjectChanges{Revision: v.revision, All: true})
	} else {
		f.pending.All = true // due with the first batch
	}
	v.mu.Unlock()
	go deliver(ctx, f.wake, f.take, out, func() {
		v.mu.Lock()
		defer v.mu.Unlock()
		delete(v.followers, f)
	})
	return out
}

// deliver hands on what is due, whenever it is woken, until ctx ends.
func deliver[T any](ctx context.Context, wake <-chan struct{}, take func() (T, bool), out chan<- T, forget func()) {
	defer close(out)
	defer forget()
	for {
		select {
		case <-wake:
		case <-ctx.Done():
			return
		}
		one, due := take()
		if !due {
			continue
		}
		select {
		case out <- one:
		case <-ctx.Done():
			return
		}
	}
}
