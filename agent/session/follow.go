package session

import (
	"context"
	"slices"
	"sync"

	"keelson.dev/keelson/agent"
)

// follower is one caller of Session.Follow and its undelivered changes. The number of changes is
// bounded by agent.MaxChangedKeys.
type follower struct {
	kinds []string

	mu      sync.Mutex
	pending agent.ObjectChanges
	due     bool
	wake    chan struct{}
}

// addChanges adds the changes of a completed batch to the pending changes, and wakes the goroutine
// that delivers them.
func (f *follower) addChanges(c agent.ObjectChanges) {
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

// takeChanges returns and clears the pending changes. It returns false if no changes are pending.
func (f *follower) takeChanges() (agent.ObjectChanges, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.due {
		return agent.ObjectChanges{}, false
	}
	out := f.pending
	f.pending, f.due = agent.ObjectChanges{Revision: out.Revision}, false
	return out, true
}

// Follow returns a channel that delivers the changed objects of the given kinds until ctx ends, as
// agent.Objects specifies. Undelivered changes are merged. The first value has All set.
func (s *Session) Follow(ctx context.Context, kinds ...string) <-chan agent.ObjectChanges {
	out := make(chan agent.ObjectChanges)
	f := &follower{kinds: kinds, wake: make(chan struct{}, 1)}
	v := s.view
	v.mu.Lock()
	v.followers[f] = struct{}{}
	if v.loaded {
		f.addChanges(agent.ObjectChanges{Revision: v.revision, All: true})
	} else {
		f.pending.All = true // delivered with the first batch
	}
	v.mu.Unlock()
	go deliverPending(ctx, f.wake, f.takeChanges, out, func() {
		v.mu.Lock()
		defer v.mu.Unlock()
		delete(v.followers, f)
	})
	return out
}

// deliverPending calls take each time wake has a value, and sends its result to out if take returns
// true. When ctx ends it calls forget and closes out.
func deliverPending[T any](ctx context.Context, wake <-chan struct{}, take func() (T, bool), out chan<- T, forget func()) {
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
