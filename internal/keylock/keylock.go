// Package keylock provides one lock per name. A lock exists only while it is held or waited for.
package keylock

import "sync"

// Locks is a set of named locks. The zero value is ready for use.
type Locks struct {
	mu sync.Mutex
	m  map[string]*lock
}

type lock struct {
	mu    sync.Mutex
	users int
}

// Lock acquires the lock with the given name, and returns the function that releases it. It blocks
// while another caller holds the lock.
func (k *Locks) Lock(name string) (unlock func()) {
	k.mu.Lock()
	if k.m == nil {
		k.m = map[string]*lock{}
	}
	e := k.m[name]
	if e == nil {
		e = &lock{}
		k.m[name] = e
	}
	e.users++
	k.mu.Unlock()
	e.mu.Lock()
	return func() {
		e.mu.Unlock()
		k.mu.Lock()
		defer k.mu.Unlock()
		if e.users--; e.users == 0 {
			delete(k.m, name)
		}
	}
}
