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
	// Idle are the selected kinds that have no informer because no object of them has appeared.
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

// Every returns an EveryKind for the kinds for which the function wants returns true, with
// informers for the current ones. prepare is called with each informer before it runs, to add
// indexes. Every must be called before Informers.Run.
func Every(i *Informers, wants func(*api.Kind) bool, prepare func(cache.SharedIndexInformer)) *EveryKind {
	i.mu.Lock()
	defer i.mu.Unlock()
	e := &EveryKind{wants: wants, prepare: prepare}
	e.now.Store(&Informed{changed: make(chan struct{})})
	i.every = append(i.every, e)
	e.followKinds(i, i.client.kinds.Table())
	return e
}

// Now returns the list of selected kinds and their informers. The informer of a new kind may not
// have received its initial list yet.
func (e *EveryKind) Now() *Informed { return e.now.Load() }

// followKind adapts the informers to a table of kinds. It stops the informers of kinds that are no
// longer in the table, and creates the informers that each EveryKind needs.
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
		if inf.end != nil { // it is running
			inf.end()
		}
	}
}

// followKinds creates the missing informers for the selected kinds of the table, and publishes the
// new list if it differs. The caller holds i.mu.
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
