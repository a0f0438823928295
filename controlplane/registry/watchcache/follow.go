package watchcache

import (
	"context"
	"errors"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/registry/storedform"
)

// maxFollowed is the maximum number of unread events that Follow returns individually. If a
// follower has more unread events, Follow returns the difference between two snapshots instead.
const maxFollowed = 4096

// follower is a watch of a whole storage (api.Follower), which returns each new state with the
// changes since the previously returned state. It keeps only the last returned snapshot, which
// shares all unchanged objects with the current snapshot.
type follower struct {
	watcher *Watcher
	last    *snapshot // last returned snapshot; nil before the first call of Follow
}

var _ api.Follower = (*follower)(nil)

func (s *Served) newFollower(ctx context.Context) *follower {
	all := &filter{kind: s.Kind, acceptsLight: true}
	return &follower{watcher: s.newWatcher(ctx, all, position{}, &metav1.ListOptions{})}
}

// Stop implements watch.Interface.
func (f *follower) Stop() { f.watcher.Stop() }

// ResultChan implements watch.Interface. Users of an api.Follower call Follow instead.
func (f *follower) ResultChan() <-chan watch.Event { return f.watcher.ResultChan() }

// Follow implements api.Follower.
func (f *follower) Follow(ctx context.Context) (api.View, []api.Delta, error) {
	for {
		if isClosed(f.watcher.lifetime.stopped) {
			return nil, nil, errors.New("the watch was stopped")
		}
		state, events, changed := f.nextState()
		if !changed {
			if err := f.waitForEvents(ctx); err != nil {
				return nil, nil, err
			}
			continue
		}
		before := f.last
		f.last = state
		switch {
		case before == nil:
			return view{state}, nil, nil
		case events == nil:
			if changes := diffSnapshots(before, state); len(changes) > 0 {
				return view{state}, changes, nil
			}
			continue // the storage was loaded again without changes
		}
		changes, err := f.toDeltas(events)
		if err != nil {
			changes = diffSnapshots(before, state)
		}
		return view{state}, changes, nil
	}
}

// nextState returns the current snapshot, and the unread events that lead to it. events is nil if
// the history has dropped some of them, or if there are too many. If nothing has changed, nextState
// marks the watcher as waiting for events and returns changed = false.
func (f *follower) nextState() (state *snapshot, events []*event, changed bool) {
	w, sc := f.watcher, f.watcher.served.storage
	sc.mu.Lock()
	defer sc.mu.Unlock()
	if sc.isWaiting(w) {
		// The watcher was woken by an earlier signal, or has already read all events: no newer
		// event concerns it.
		w.cursor.next = sc.history.nextNumber()
	}
	// The lock guards both, so the snapshot is exactly the result of the events.
	state, end := sc.snap.Load(), sc.history.nextNumber()
	events, available := sc.history.eventsFrom(w.cursor.next, int(min(end-min(w.cursor.next, end), maxFollowed+1)))
	if f.last == nil || w.cursor.epoch != sc.epoch || !available || isClosed(w.cursor.expired) ||
		len(events) > maxFollowed {
		if isClosed(w.cursor.expired) {
			w.cursor.expired = make(chan struct{})
		}
		w.cursor.epoch, w.cursor.next = sc.epoch, end
		sc.markAwake(w, end)
		return state, nil, true
	}
	if len(events) == 0 {
		sc.markWaiting(w)
		return nil, nil, false
	}
	w.cursor.next = end
	sc.markAwake(w, end)
	// Copy, because the queue may change after the lock is released.
	return state, append(make([]*event, 0, len(events)), events...), true
}

// waitForEvents waits until there may be new events. It returns an error if the watch or ctx has
// ended.
func (f *follower) waitForEvents(ctx context.Context) error {
	select {
	case <-f.watcher.wake:
		return nil
	case <-f.watcher.served.storage.cache.done:
		return errors.New("the watch cache has ended")
	case <-f.watcher.served.Gone:
		return fmt.Errorf("%s is no longer served", f.watcher.served.Kind.GroupResource())
	case <-f.watcher.lifetime.stopped:
		return errors.New("the watch was stopped")
	case <-ctx.Done():
		return ctx.Err()
	}
}

// toDeltas converts events to deltas. It decodes objects again that were evicted from the history.
func (f *follower) toDeltas(events []*event) ([]api.Delta, error) {
	changes := make([]api.Delta, 0, len(events))
	for _, ev := range events {
		c := api.Delta{Key: ev.cur.key, Gone: ev.deleted}
		cur, err := f.watcher.served.storage.entryOf(ev.cur)
		if err != nil {
			return nil, err
		}
		c.New = cur.Object
		if ev.prev != nil {
			prev, err := f.watcher.served.storage.entryOf(ev.prev)
			if err != nil {
				return nil, err
			}
			c.Old = prev.Object
		}
		changes = append(changes, c)
	}
	return changes, nil
}

// diffSnapshots returns the changes that turn the snapshot old into the snapshot updated.
func diffSnapshots(old, updated *snapshot) (changes []api.Delta) {
	a, b := old.byKey.Iter(), updated.byKey.Iter()
	more, moreOfB := a.First(), b.First()
	for more || moreOfB {
		switch {
		case !moreOfB || more && a.Key() < b.Key():
			gone := a.Value().Object
			changes = append(changes, api.Delta{Key: a.Key(), Old: gone, New: gone, Gone: true, Guessed: true})
			more = a.Next()
		case !more || b.Key() < a.Key():
			changes = append(changes, api.Delta{Key: b.Key(), New: b.Value().Object})
			moreOfB = b.Next()
		default:
			if before, after := a.Value(), b.Value(); before.Revision != after.Revision {
				changes = append(changes, api.Delta{Key: b.Key(), Old: before.Object, New: after.Object})
			}
			more, moreOfB = a.Next(), b.Next()
		}
	}
	return changes
}

// view implements api.View with a snapshot.
type view struct{ *snapshot }

// Revision implements api.View.
func (v view) Revision() string { return storedform.FormatRevision(v.changed) }

// Len implements api.View.
func (v view) Len() int { return v.byKey.Len() }

// Get implements api.View.
func (v view) Get(key string) api.Object {
	if e, ok := v.byKey.Get(key); ok {
		return e.Object
	}
	return nil
}

// Scan implements api.View.
func (v view) Scan(prefix string, visit func(key string, obj api.Object) bool) {
	v.visitRange(nil, prefix, "", func(e *Entry) bool { return visit(e.key, e.Object) })
}
