package session

import (
	"context"
	"maps"
	"slices"
	"sync"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/wakeup"
)

// changeNotifier collects the changes of the current batch of received objects. When the batch is
// complete, it delivers them to the callers of Session.Changes and Session.Follow. The lock of the
// view protects it.
type changeNotifier struct {
	kinds     map[string]struct{} // kinds of the objects that the current batch has changed
	objects   agent.ObjectChanges // objects that the current batch has changed
	readers   map[*kindReader]struct{}
	followers map[*follower]struct{}
}

func newChangeNotifier() changeNotifier {
	return changeNotifier{kinds: make(map[string]struct{}), readers: make(map[*kindReader]struct{}),
		followers: make(map[*follower]struct{})}
}

// recordChange adds the object with this key to the changes of the current batch.
func (n *changeNotifier) recordChange(k agent.ObjectKey) {
	n.kinds[k.Kind] = struct{}{}
	n.objects.AddKey(k)
}

// publishBatch delivers the changes of the current batch and starts a new batch. revision is the
// revision up to which the batch makes the view complete. It returns the kinds of the changed
// objects.
func (n *changeNotifier) publishBatch(revision uint64) map[string]struct{} {
	changed := n.kinds
	n.kinds = make(map[string]struct{})
	for r := range n.readers {
		r.addKinds(changed)
	}
	n.objects.Revision = revision
	for f := range n.followers {
		f.addChanges(n.objects)
	}
	n.objects = agent.ObjectChanges{}
	return changed
}

// kindReader represents one caller of Session.Changes. pending contains the changed kinds that are
// not delivered to it yet.
type kindReader struct {
	mu      sync.Mutex
	pending map[string]struct{}
	wake    wakeup.Signal
}

func (r *kindReader) addKinds(kinds map[string]struct{}) {
	if len(kinds) == 0 {
		return
	}
	r.mu.Lock()
	maps.Copy(r.pending, kinds)
	r.mu.Unlock()
	r.wake.Send()
}

func (r *kindReader) takeKinds() (kinds map[string]struct{}, due bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	kinds = r.pending
	r.pending = make(map[string]struct{})
	return kinds, len(kinds) > 0
}

// follower represents one caller of Session.Follow, with the changes that are not delivered to it
// yet. Their number is bounded by agent.MaxChangedKeys.
type follower struct {
	kinds []string

	mu      sync.Mutex
	pending agent.ObjectChanges
	due     bool
	wake    wakeup.Signal
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
	f.wake.Send()
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

// deliverPending calls take whenever wake receives a value. If take returns true, its first result
// is sent to out. When ctx ends, deliverPending calls forget and closes out.
func deliverPending[T any](
	ctx context.Context, wake <-chan struct{}, take func() (T, bool), out chan<- T, forget func(),
) {
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
