package api

import (
	"maps"
	"slices"
)

// Occupied is an immutable set of the storages in which this process has seen objects, as long as a
// kind is served from them. Code that watches every kind skips all other storages: there may be
// many custom definitions, most of them without objects.
type Occupied struct {
	storages map[*Storage]bool
	changed  chan struct{}
}

// Has reports whether a storage has, or had, objects.
func (o *Occupied) Has(s *Storage) bool { return o.storages[s] }

// Changed returns a channel that is closed when there is a newer Occupied.
func (o *Occupied) Changed() <-chan struct{} { return o.changed }

// Occupied returns the set of storages that have, or had, objects.
func (ks *Kinds) Occupied() *Occupied { return ks.occupied.Load() }

// Occupy records that a storage has objects. The registry calls it before it returns the storage's
// first object.
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

// vacate drops the storages from which no kind of t is served. The caller holds writing.
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
