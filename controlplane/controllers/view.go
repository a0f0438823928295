package controllers

import (
	"strconv"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
)

// ownWriteBound is how long an own write is believed although the informer has
// not shown it. It is a net under the net: a relist can swallow the event of an
// object that came and went.
const ownWriteBound = 30 * time.Second

// View is an informer's cache that reads its owner's writes: an object created
// or updated through the API is seen at once, in the version that the API
// returned, and an object on which a deletion was asked counts as going. A
// controller that decides by a View does not create twice because its cache lags.
type View[T api.Object] struct {
	inf cache.SharedIndexInformer
	now func() time.Time

	mu      sync.Mutex
	seen    uint64 // the newest revision that the informer has delivered
	pending map[string]ownWrite[T]
	going   map[types.UID]goingObject[T]
}

type ownWrite[T api.Object] struct {
	obj      T
	revision uint64
	expires  time.Time
}

type goingObject[T api.Object] struct {
	obj     T
	expires time.Time
}

// ViewOf returns a view that lives as long as the term. Call it from Controller.Lead only.
func ViewOf[T api.Object](t *Term, inf cache.SharedIndexInformer) *View[T] {
	v := &View[T]{
		inf: inf, now: t.Now,
		pending: map[string]ownWrite[T]{},
		going:   map[types.UID]goingObject[T]{},
	}
	t.observe(inf, v)
	return v
}

// Wrote remembers an object as the API returned it.
func (v *View[T]) Wrote(obj T) {
	rev := revision(obj)
	v.mu.Lock()
	defer v.mu.Unlock()
	if rev <= v.seen {
		return // the informer was faster than the answer
	}
	v.pending[storeKey(obj)] = ownWrite[T]{obj: obj, revision: rev, expires: v.now().Add(ownWriteBound)}
}

// Deleting remembers that obj is about to be deleted. Call it before the call to
// the API, and Kept when that call fails.
func (v *View[T]) Deleting(obj T) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.going[obj.GetUID()] = goingObject[T]{obj: obj, expires: v.now().Add(ownWriteBound)}
}

// Kept takes Deleting back.
func (v *View[T]) Kept(obj T) {
	v.mu.Lock()
	defer v.mu.Unlock()
	delete(v.going, obj.GetUID())
}

// Going says whether obj is being deleted, by its own metadata or because Deleting said so.
func (v *View[T]) Going(obj T) bool {
	if obj.GetDeletionTimestamp() != nil {
		return true
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	_, ok := v.going[obj.GetUID()]
	return ok
}

// Get returns one object, shared.
func (v *View[T]) Get(namespace, name string) (T, bool) {
	obj, ok := Cached[T](v.inf, namespace, name)
	key := name
	if namespace != "" {
		key = namespace + "/" + name
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if p, own := v.pending[key]; own && p.revision > v.seen && (!ok || revision(obj) < p.revision) {
		return p.obj, true
	}
	return obj, ok
}

// All returns every object, shared.
func (v *View[T]) All() []T {
	return v.merge(func() []T { return CachedAll[T](v.inf) }, func(T) bool { return true })
}

// By returns the objects under any of the values of an index, shared.
func (v *View[T]) By(index string, values ...string) []T {
	f := v.inf.GetIndexer().GetIndexers()[index]
	cached := func() []T {
		var out []T
		for _, value := range values {
			out = append(out, CachedBy[T](v.inf, index, value)...)
		}
		return out
	}
	return v.merge(cached, func(obj T) bool {
		have, _ := f(obj)
		for _, h := range have {
			for _, value := range values {
				if h == value {
					return true
				}
			}
		}
		return false
	})
}

// merge lays own writes over what is cached. The own writes are picked first: a
// write that the cache takes in meanwhile is then found there, newer or equal.
func (v *View[T]) merge(list func() []T, match func(T) bool) []T {
	v.mu.Lock()
	own := make(map[string]ownWrite[T], len(v.pending))
	for k, p := range v.pending {
		if p.revision > v.seen {
			own[k] = p
		} else {
			delete(v.pending, k)
		}
	}
	v.mu.Unlock()

	cached := list()
	if len(own) == 0 {
		return cached
	}
	out := cached[:0]
	for _, obj := range cached {
		p, ok := own[storeKey(obj)]
		if !ok {
			out = append(out, obj)
			continue
		}
		if revision(obj) >= p.revision {
			delete(own, storeKey(obj))
			out = append(out, obj)
		}
	}
	for _, p := range own {
		if match(p.obj) {
			out = append(out, p.obj)
		}
	}
	return out
}

// observed is called for every delivery of the informer, before keys are queued.
func (v *View[T]) observed(t ChangeType, o any) {
	obj, ok := o.(T)
	if !ok {
		return
	}
	rev := revision(obj)
	v.mu.Lock()
	defer v.mu.Unlock()
	v.seen = max(v.seen, rev)
	key := storeKey(obj)
	if p, ok := v.pending[key]; ok && (p.revision <= rev || t == Deleted && p.obj.GetUID() == obj.GetUID()) {
		delete(v.pending, key)
	}
	if t == Deleted || obj.GetDeletionTimestamp() != nil {
		delete(v.going, obj.GetUID())
	}
}

// expired drops what has waited too long and returns the objects concerned.
func (v *View[T]) expired() []any {
	v.mu.Lock()
	defer v.mu.Unlock()
	now := v.now()
	var out []any
	for k, p := range v.pending {
		if p.revision <= v.seen {
			delete(v.pending, k)
		} else if now.After(p.expires) {
			delete(v.pending, k)
			out = append(out, p.obj)
		}
	}
	for uid, g := range v.going {
		if now.After(g.expires) {
			delete(v.going, uid)
			out = append(out, g.obj)
		}
	}
	return out
}

// revision is the resourceVersion as the number that it is in this store.
func revision(o api.Object) uint64 {
	n, err := strconv.ParseUint(o.GetResourceVersion(), 10, 64)
	if err != nil {
		return 0
	}
	return n
}

func storeKey(o api.Object) string {
	if o.GetNamespace() == "" {
		return o.GetName()
	}
	return o.GetNamespace() + "/" + o.GetName()
}
