package client

import (
	"slices"
	"sync/atomic"

	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
)

// EveryKind runs an informer for every stored kind that its selection function accepts, including
// kinds that are registered later. For a kind of a CustomResourceDefinition, the informer starts
// when the first object of the kind appears, so an unused definition costs nothing.
type EveryKind struct {
	wants   func(*api.Kind) bool
	prepare func(cache.SharedIndexInformer)
	now     atomic.Pointer[Informed]
}

// Informed is an immutable list of the selected kinds and their informers. A kind that is served in
// several versions is listed once.
type Informed struct {
	Kinds []KindInformer
	// Idle are the selected kinds without an informer, because no object of them has appeared.
	Idle    []*api.Kind
	changed chan struct{}
}

// KindInformer is a kind and its informer.
type KindInformer struct {
	Kind     *api.Kind
	Informer cache.SharedIndexInformer
}

// Changed returns a channel that is closed when a newer Informed has replaced this one.
func (i *Informed) Changed() <-chan struct{} { return i.changed }

// Every returns an EveryKind with informers for the current and future kinds for which selects
// returns true. prepare is called with each informer before it runs, to add indexes. Every must be
// called before Informers.Run.
func Every(informers *Informers, selects func(*api.Kind) bool, prepare func(cache.SharedIndexInformer)) *EveryKind {
	informers.mu.Lock()
	defer informers.mu.Unlock()
	every := &EveryKind{wants: selects, prepare: prepare}
	every.now.Store(&Informed{changed: make(chan struct{})})
	informers.every = append(informers.every, every)
	every.updateInformed(informers, informers.client.kinds.Table())
	return every
}

// Now returns the list of selected kinds and their informers. The informer of a new kind may not
// have received its initial list yet.
func (e *EveryKind) Now() *Informed { return e.now.Load() }

// applyTable creates and stops informers so that they match a table of kinds. It stops the
// informers of kinds that are no longer in the table, and creates the informers that each EveryKind
// needs.
func (i *Informers) applyTable(table *api.Table) {
	i.mu.Lock()
	defer i.mu.Unlock()
	var ended []*informer
	for k, inf := range i.byKind {
		if !table.Has(k) {
			delete(i.byKind, k)
			ended = append(ended, inf)
		}
	}
	for _, e := range i.every {
		e.updateInformed(i, table)
	}
	for _, inf := range ended {
		if inf.end != nil { // it is running
			inf.end()
		}
	}
}

// updateInformed creates the missing informers for the selected kinds of the table. If the list of
// selected kinds and informers has changed, it replaces the list that e.Now() returns. The caller
// holds informers.mu.
func (e *EveryKind) updateInformed(informers *Informers, table *api.Table) {
	was, next := e.now.Load(), &Informed{changed: make(chan struct{})}
	occupied := informers.client.kinds.Occupied()
	known := make(map[KindInformer]bool, len(was.Kinds))
	for _, one := range was.Kinds {
		known[one] = true
	}
	same := true
	for _, k := range table.Stored() {
		if !e.wants(k) {
			continue
		}
		inf, isNew := informers.byKind[k], false
		if inf == nil && k.Serving.Definition != "" && !occupied.Has(k.Storage) {
			next.Idle = append(next.Idle, k)
			continue
		}
		if inf == nil {
			inf, isNew = informers.newInformer(k), true
		}
		one := KindInformer{k, inf.SharedIndexInformer}
		if !known[one] {
			same = false
			e.prepare(one.Informer)
		}
		if isNew && informers.start != nil {
			informers.start(inf)
		}
		next.Kinds = append(next.Kinds, one)
	}
	if same && len(next.Kinds) == len(was.Kinds) && slices.Equal(next.Idle, was.Idle) {
		return
	}
	e.now.Store(next)
	close(was.changed)
}
