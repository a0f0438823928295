// Package keylock has a lock for each name, which is there while somebody holds it or waits for it.
package keylock

import "sync"

// Locks are ready as they are.
type Locks struct {
	mu sync.Mutex
	m  map[string]*lock
}

type lock struct {
	mu    sync.Mutex
	users int
}

// Lock locks a name until the returned function is called.
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
