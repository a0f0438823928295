package registry

import (
	"context"
	"errors"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
)

// maxFollowed is how many events a follower is told one by one. One that is further behind, because it is slow or much
// has happened at once, is told the difference.
const maxFollowed = 4096

// follower is a watch of all of a storage that tells the state with the changes. The snapshot that it told last is all
// that it keeps, which shares everything with the present one but what has changed.
type follower struct {
	*Watcher
	told *snapshot // nil before the first call of Follow
}

var _ api.Follower = (*follower)(nil)

func (s *served) newFollower(ctx context.Context) *follower {
	w := s.newWatcher(ctx, &filter{kind: s.kind, light: true}, position{}, &metav1.ListOptions{})
	return &follower{Watcher: w}
}

// Follow implements api.Follower.
func (f *follower) Follow(ctx context.Context) (api.View, []api.Delta, error) {
	for {
		if isClosed(f.stopped) {
			return nil, nil, errors.New("the watch was stopped")
		}
		now, events, told := f.take()
		if !told {
			if err := f.await(ctx); err != nil {
				return nil, nil, err
			}
			continue
		}
		before := f.told
		f.told = now
		switch {
		case before == nil:
			return view{now}, nil, nil
		case events == nil:
			if changes := difference(before, now); len(changes) > 0 {
				return view{now}, changes, nil
			}
			continue // a reload that found what was there
		}
		changes, err := f.changes(events)
		if err != nil {
			changes = difference(before, now)
		}
		return view{now}, changes, nil
	}
}

// take returns the state and the events since the last; nil events when they are not to be had, or too many. It returns false, and leaves the
// watcher parked, when nothing has happened.
func (f *follower) take() (now *snapshot, events []*event, told bool) {
	of := f.of
	of.mu.Lock()
	defer of.mu.Unlock()
	if of.isParked(f.Watcher) {
		f.next = of.history.end() // by an old token in wake, or at the end: what came meanwhile did not concern it
	}
	// Both are changed under the lock: the snapshot is exactly what the events lead to.
	now, end := of.snap.Load(), of.history.end()
	events, kept := of.history.from(f.next, int(min(end-min(f.next, end), maxFollowed+1)))
	if f.told == nil || f.epoch != of.epoch || !kept || isClosed(f.lost) || len(events) > maxFollowed {
		if isClosed(f.lost) {
			f.lost = make(chan struct{})
		}
		f.epoch, f.next = of.epoch, end
		of.rouse(f.Watcher, end)
		return now, nil, true
	}
	if len(events) == 0 {
		of.park(f.Watcher)
		return nil, nil, false
	}
	f.next = end
	of.rouse(f.Watcher, end)
	// The queue is changed by others once the lock is free.
	return now, append(make([]*event, 0, len(events)), events...), true
}

// await sleeps until there may be something to tell.
func (f *follower) await(ctx context.Context) error {
	select {
	case <-f.wake:
		return nil
	case <-f.of.cache.done:
		return errors.New("the watch cache has ended")
	case <-f.of.gone:
		return fmt.Errorf("%s is not served any more", f.of.kind.GroupResource())
	case <-f.stopped:
		return errors.New("the watch was stopped")
	case <-ctx.Done():
		return ctx.Err()
	}
}

// changes are what events tell. An event may have been packed meanwhile, and its object is read again then.
func (f *follower) changes(events []*event) ([]api.Delta, error) {
	changes := make([]api.Delta, 0, len(events))
	for _, ev := range events {
		c := api.Delta{Key: ev.cur.key, Gone: ev.deleted}
		cur, err := f.of.entryOf(ev.cur)
		if err != nil {
			return nil, err
		}
		c.New = cur.obj
		if ev.prev != nil {
			prev, err := f.of.entryOf(ev.prev)
			if err != nil {
				return nil, err
			}
			c.Old = prev.obj
		}
		changes = append(changes, c)
	}
	return changes, nil
}

// difference is what has to change to make one state of the other.
func difference(from, to *snapshot) (changes []api.Delta) {
	a, b := from.byKey.Iter(), to.byKey.Iter()
	more, moreOfB := a.First(), b.First()
	for more || moreOfB {
		switch {
		case !moreOfB || more && a.Key() < b.Key():
			gone := a.Value().obj
			changes = append(changes, api.Delta{Key: a.Key(), Old: gone, New: gone, Gone: true, Guessed: true})
			more = a.Next()
		case !more || b.Key() < a.Key():
			changes = append(changes, api.Delta{Key: b.Key(), New: b.Value().obj})
			moreOfB = b.Next()
		default:
			if was, is := a.Value(), b.Value(); was.rev != is.rev {
				changes = append(changes, api.Delta{Key: b.Key(), Old: was.obj, New: is.obj})
			}
			more, moreOfB = a.Next(), b.Next()
		}
	}
	return changes
}

// view is a snapshot as others see it.
type view struct{ *snapshot }

// Revision implements api.View.
func (v view) Revision() string { return formatRevision(v.changed) }

// Len implements api.View.
func (v view) Len() int { return v.byKey.Len() }

// Get implements api.View.
func (v view) Get(key string) api.Object {
	if e, ok := v.byKey.Get(key); ok {
		return e.obj
	}
	return nil
}

// Scan implements api.View.
func (v view) Scan(prefix string, visit func(key string, obj api.Object) bool) {
	v.ascend(nil, prefix, "", func(e *entry) bool { return visit(e.key, e.obj) })
}
