package registry

import (
	"context"
	"errors"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
)

// maxFollowed is the maximum number of events that Follow returns one by one. A follower further
// behind gets the difference between the snapshots instead.
const maxFollowed = 4096

// follower is a watch of a whole storage that returns each new state with the changes since the
// last one. It keeps only the last returned snapshot, which shares all unchanged objects with the
// current one.
type follower struct {
	*Watcher
	told *snapshot // last returned snapshot; nil before the first call of Follow
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
			continue // a reload without changes
		}
		changes, err := f.changes(events)
		if err != nil {
			changes = difference(before, now)
		}
		return view{now}, changes, nil
	}
}

// take returns the current state and the events since the last call. events is nil if they are
// dropped or too many. If nothing has happened, take parks the watcher and returns false.
func (f *follower) take() (now *snapshot, events []*event, told bool) {
	of := f.of
	of.mu.Lock()
	defer of.mu.Unlock()
	if of.isParked(f.Watcher) {
		f.next = of.history.end() // woken by an old token, or already at the end: the events meanwhile did not concern it
	}
	// The lock guards both: the snapshot is exactly the result of the events.
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
	// Copy, because the queue may change after the lock is released.
	return now, append(make([]*event, 0, len(events)), events...), true
}

// await waits until there may be new events.
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

// changes converts events to deltas. The object of an event that was packed meanwhile is decoded
// again.
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

// difference returns the changes that turn one state into the other.
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

// view implements api.View with a snapshot.
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
