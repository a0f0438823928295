package registry

import (
	"context"
	"slices"
	"strings"
	"sync"

	"keelson.dev/keelson/controlplane/api"
)

// turns lets the writes of this replica that change the same further object (a quota's count) come one after the other:
// each has to see what the one before it made. The zero value is ready.
type turns struct {
	mu   sync.Mutex
	busy map[seat]*queue
}

// seat names an object for that.
type seat struct {
	storage   *api.Storage
	namespace string
	name      string
}

type queue struct {
	token chan struct{} // holds one while nobody has the turn
	users int           // who have it or wait
}

// turn is what a write holds: seats taken in a fixed order, so that no two writes wait for one another.
type turn struct {
	seats []seat
}

// enter waits for the turn of all objects that are changed.
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

// quit is how one leaves without the turn.
func (t *turns) quit(p seat) {
	t.mu.Lock()
	defer t.mu.Unlock()
	q := t.busy[p]
	if q.users--; q.users == 0 {
		delete(t.busy, p)
	}
}

// leave passes the turn on; nil holds none.
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
