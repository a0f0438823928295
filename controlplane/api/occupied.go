package api

import (
	"maps"
	"slices"
)

// Occupied is an immutable set of the storages in which this process has seen objects. A storage is
// removed when no kind is served from it. Code that watches every kind skips all other storages:
// there may be many custom definitions, most of them without objects.
type Occupied struct {
	storages map[*Storage]bool
	changed  chan struct{}
}

// Has reports whether a storage has, or had, objects.
func (o *Occupied) Has(s *Storage) bool { return o.storages[s] }

// Changed returns a channel that is closed when a newer Occupied exists.
func (o *Occupied) Changed() <-chan struct{} { return o.changed }

// Occupied returns the set of storages that have, or had, objects.
func (ks *Kinds) Occupied() *Occupied { return ks.occupied.Load() }

// MarkOccupied adds a storage to the set of storages that have, or had, objects (Occupied). The
// registry calls it before it returns the storage's first object, so that readers of Occupied do
// not miss that object.
func (ks *Kinds) MarkOccupied(storage *Storage) {
	ks.writing.Lock()
	defer ks.writing.Unlock()
	previous := ks.occupied.Load()
	if previous.storages[storage] {
		return
	}
	next := &Occupied{storages: maps.Clone(previous.storages), changed: make(chan struct{})}
	if next.storages == nil {
		next.storages = map[*Storage]bool{}
	}
	next.storages[storage] = true
	ks.occupied.Store(next)
	close(previous.changed)
}

// dropUnservedStorages removes the storages that no kind of the table uses from Occupied. The
// caller holds ks.writing.
func (ks *Kinds) dropUnservedStorages(table *Table) {
	previous := ks.occupied.Load()
	gone := func(s *Storage, _ bool) bool {
		return !slices.ContainsFunc(table.stored, func(k *Kind) bool { return k.Storage == s })
	}
	next := &Occupied{storages: maps.Clone(previous.storages), changed: previous.changed}
	maps.DeleteFunc(next.storages, gone)
	if len(next.storages) < len(previous.storages) {
		ks.occupied.Store(next)
	}
}
