package client

import (
	"slices"
	"sync/atomic"

	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
)

// EveryKind has an informer run for every stored kind that it wants, also for those that are registered later. Kinds
// that were defined at run time get theirs when their first object is seen: an idle one costs nothing.
type EveryKind struct {
	wants   func(*api.Kind) bool
	prepare func(cache.SharedIndexInformer)
	now     atomic.Pointer[Informed]
}

// Informed is the kinds that have an informer, one for each storage. It never changes.
type Informed struct {
	Kinds []KindInformer
	// Idle are the kinds that are wanted and have no informer yet, because no object of theirs has been seen.
	Idle    []*api.Kind
	changed chan struct{}
}

// KindInformer is a kind and its informer.
type KindInformer struct {
	Kind     *api.Kind
	Informer cache.SharedIndexInformer
}

// Changed is closed once there is another Informed.
func (i *Informed) Changed() <-chan struct{} { return i.changed }

// Every returns an EveryKind, whose informers for the present kinds are there at once. prepare is called with each
// informer before it runs, to add indexes. Call before Run.
func Every(i *Informers, wants func(*api.Kind) bool, prepare func(cache.SharedIndexInformer)) *EveryKind {
	i.mu.Lock()
	defer i.mu.Unlock()
	e := &EveryKind{wants: wants, prepare: prepare}
	e.now.Store(&Informed{changed: make(chan struct{})})
	i.every = append(i.every, e)
	e.followKinds(i, i.client.kinds.Table())
	return e
}

// Now is the kinds that have an informer now. That of a kind which was registered a moment ago may not have listed yet.
func (e *EveryKind) Now() *Informed { return e.now.Load() }

// followKind ends the informers of kinds that are no longer in the table, and makes those that are wanted.
func (i *Informers) followKind(t *api.Table) {
	i.mu.Lock()
	defer i.mu.Unlock()
	var ended []*informer
	for k, inf := range i.byKind {
		if !t.Has(k) {
			delete(i.byKind, k)
			ended = append(ended, inf)
		}
	}
	for _, e := range i.every {
		e.followKinds(i, t)
	}
	for _, inf := range ended {
		if inf.end != nil { // it runs
			inf.end()
		}
	}
}

// followKinds brings now in step with the table. i.mu is held.
func (e *EveryKind) followKinds(i *Informers, t *api.Table) {
	was, next := e.now.Load(), &Informed{changed: make(chan struct{})}
	occupied := i.client.kinds.Occupied()
	known := make(map[KindInformer]bool, len(was.Kinds))
	for _, one := range was.Kinds {
		known[one] = true
	}
	same := true
	for _, k := range t.Stored() {
		if !e.wants(k) {
			continue
		}
		inf, isNew := i.byKind[k], false
		if inf == nil && k.Definition != "" && !occupied.Has(k.Storage) {
			next.Idle = append(next.Idle, k)
			continue
		}
		if inf == nil {
			inf, isNew = i.newInformer(k), true
		}
		one := KindInformer{k, inf.SharedIndexInformer}
		if !known[one] {
			same = false
			e.prepare(one.Informer)
		}
		if isNew && i.start != nil {
			i.start(inf)
		}
		next.Kinds = append(next.Kinds, one)
	}
	if same && len(next.Kinds) == len(was.Kinds) && slices.Equal(next.Idle, was.Idle) {
		return
	}
	e.now.Store(next)
	close(was.changed)
}
