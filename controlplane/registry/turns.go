package registry

import (
	"context"
	"slices"
	"strings"
	"sync"

	"keelson.dev/keelson/controlplane/api"
)

// turns serializes writes of this replica that change the same additional object, such as a quota's
// usage. Each write must see the result of the previous one. The zero value is ready for use.
type turns struct {
	mu   sync.Mutex
	busy map[seat]*queue
}

// seat identifies such an object.
type seat struct {
	storage   *api.Storage
	namespace string
	name      string
}

type queue struct {
	token chan struct{} // contains a token while the lock is free
	users int           // number of holders and waiters
}

// turn is the set of object locks that a write holds. They are acquired in a fixed order to avoid
// deadlock.
type turn struct {
	seats []seat
}

// enter acquires the locks of all objects in changes.
func (t *turns) enter(ctx context.Context, changes []api.Change) (*turn, error) {
	var want []seat
	for _, c := range changes {
		if c.Kind != nil {
			want = append(want, seat{c.Kind.Storage, c.Namespace, c.Name})
		}
	}
	slices.SortFunc(want, compareSeats)
	want = slices.Compact(want)
	held := &turn{}
	for _, p := range want {
		q := t.join(p)
		select {
		case <-q.token:
			held.seats = append(held.seats, p)
		case <-ctx.Done():
			t.quit(p)
			t.leave(held)
			return nil, ctx.Err()
		}
	}
	return held, nil
}

func compareSeats(a, b seat) int {
	prefix := func(p seat) string {
		if p.storage == nil {
			return ""
		}
		return p.storage.Prefix
	}
	if c := strings.Compare(prefix(a), prefix(b)); c != 0 {
		return c
	}
	if c := strings.Compare(a.namespace, b.namespace); c != 0 {
		return c
	}
	return strings.Compare(a.name, b.name)
}

func (t *turns) join(p seat) *queue {
	t.mu.Lock()
	defer t.mu.Unlock()
	q := t.busy[p]
	if q == nil {
		if t.busy == nil {
			t.busy = make(map[seat]*queue)
		}
		q = &queue{token: make(chan struct{}, 1)}
		q.token <- struct{}{}
		t.busy[p] = q
	}
	q.users++
	return q
}

// quit removes a waiter that has not acquired the lock.
func (t *turns) quit(p seat) {
	t.mu.Lock()
	defer t.mu.Unlock()
	q := t.busy[p]
	if q.users--; q.users == 0 {
		delete(t.busy, p)
	}
}

// leave releases the locks; nil holds none.
func (t *turns) leave(held *turn) {
	if held == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, p := range held.seats {
		q := t.busy[p]
		q.token <- struct{}{}
		if q.users--; q.users == 0 {
			delete(t.busy, p)
		}
	}
}
