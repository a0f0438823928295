package registry

import (
	"context"
	"slices"
	"strings"
	"sync"

	"keelson.dev/keelson/controlplane/api"
)

// objectLocks contains a lock for each additional object that writes change besides their own
// object, such as the usage of a quota. It serializes the writes of this replica that change the
// same additional object, because each write must see the result of the previous one. The zero
// value is ready for use.
type objectLocks struct {
	mu   sync.Mutex
	busy map[lockID]*lockQueue
}

// lockID identifies an additional object in objectLocks.
type lockID struct {
	storage   *api.Storage
	namespace string
	name      string
}

type lockQueue struct {
	token chan struct{} // contains a token while the lock is free
	users int           // number of holders and waiters
}

// heldLocks is the set of locks in objectLocks that a write holds. A write acquires them in a fixed
// order to avoid deadlock.
type heldLocks struct {
	ids []lockID
}

// lockObjects acquires the locks of all objects in changes and returns them. It returns an error,
// and holds no lock, if ctx ends first.
func (t *objectLocks) lockObjects(ctx context.Context, changes []api.Change) (*heldLocks, error) {
	var ids []lockID
	for _, c := range changes {
		if c.Kind != nil {
			ids = append(ids, lockID{c.Kind.Storage, c.Namespace, c.Name})
		}
	}
	slices.SortFunc(ids, compareLockIDs)
	ids = slices.Compact(ids)
	held := &heldLocks{}
	for _, id := range ids {
		q := t.addLockUser(id)
		select {
		case <-q.token:
			held.ids = append(held.ids, id)
		case <-ctx.Done():
			t.removeWaiter(id)
			t.unlockObjects(held)
			return nil, ctx.Err()
		}
	}
	return held, nil
}

func compareLockIDs(a, b lockID) int {
	prefix := func(id lockID) string {
		if id.storage == nil {
			return ""
		}
		return id.storage.Prefix
	}
	if c := strings.Compare(prefix(a), prefix(b)); c != 0 {
		return c
	}
	if c := strings.Compare(a.namespace, b.namespace); c != 0 {
		return c
	}
	return strings.Compare(a.name, b.name)
}

// addLockUser returns the lock of an object, and increments its number of users (the holder and the
// waiters). It does not acquire the lock.
func (t *objectLocks) addLockUser(id lockID) *lockQueue {
	t.mu.Lock()
	defer t.mu.Unlock()
	q := t.busy[id]
	if q == nil {
		if t.busy == nil {
			t.busy = make(map[lockID]*lockQueue)
		}
		q = &lockQueue{token: make(chan struct{}, 1)}
		q.token <- struct{}{}
		t.busy[id] = q
	}
	q.users++
	return q
}

// removeWaiter decrements the number of users of a lock, for a waiter that gives up before it has
// acquired the lock.
func (t *objectLocks) removeWaiter(id lockID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	q := t.busy[id]
	if q.users--; q.users == 0 {
		delete(t.busy, id)
	}
}

// unlockObjects releases the given locks. It does nothing if held is nil.
func (t *objectLocks) unlockObjects(held *heldLocks) {
	if held == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, id := range held.ids {
		q := t.busy[id]
		q.token <- struct{}{}
		if q.users--; q.users == 0 {
			delete(t.busy, id)
		}
	}
}
