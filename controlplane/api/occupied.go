package api

import (
	"maps"
	"slices"
)

// Occupied is the storages in which this process has seen objects, for as long as a kind is served from them. It never
// changes. Whoever would follow every kind leaves those alone that nobody uses: definitions are many, and most are idle.
type Occupied struct {
	storages map[*Storage]bool
	changed  chan struct{}
}

// Has says that there has been an object in a storage.
func (o *Occupied) Has(s *Storage) bool { return o.storages[s] }

// Changed is closed once there is a newer Occupied.
func (o *Occupied) Changed() <-chan struct{} { return o.changed }

// Occupied is what holds objects now, or has held some.
func (ks *Kinds) Occupied() *Occupied { return ks.occupied.Load() }

// Occupy says that a storage has objects. The registry calls it before it shows the first one.
func (ks *Kinds) Occupy(s *Storage) {
	ks.writing.Lock()
	defer ks.writing.Unlock()
	was := ks.occupied.Load()
	if was.storages[s] {
		return
	}
	next := &Occupied{storages: maps.Clone(was.storages), changed: make(chan struct{})}
	if next.storages == nil {
		next.storages = map[*Storage]bool{}
	}
	next.storages[s] = true
	ks.occupied.Store(next)
	close(was.changed)
}

// vacate forgets storages that no kind is served from any more. writing is held.
func (ks *Kinds) vacate(t *Table) {
	was := ks.occupied.Load()
	gone := func(s *Storage, _ bool) bool {
		return !slices.ContainsFunc(t.stored, func(k *Kind) bool { return k.Storage == s })
	}
	next := &Occupied{storages: maps.Clone(was.storages), changed: was.changed}
	maps.DeleteFunc(next.storages, gone)
	if len(next.storages) < len(was.storages) {
		ks.occupied.Store(next)
	}
}
