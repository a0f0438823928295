package engine

import (
	"strconv"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
)

// ownWriteLifetime is how long a View uses an object that its controller wrote although the
// informer has not delivered it. It is a safeguard: after a relist, an informer may never deliver
// an object that was created and deleted in between.
const ownWriteLifetime = 30 * time.Second

// View is the cache of an informer, updated by the writes of its own controller. An object that the
// controller created or updated is visible at once, in the version that the API returned. An object
// that it has requested to delete counts as being deleted. A controller that decides based on a
// View therefore does not create objects twice because its cache is stale.
type View[T api.Object] struct {
	inf cache.SharedIndexInformer
	now func() time.Time

	mu       sync.Mutex
	seen     uint64 // newest resourceVersion that the informer has delivered, as a number
	pending  map[string]ownWrite[T]
	deleting map[types.UID]deletingObject[T]
}

type ownWrite[T api.Object] struct {
	obj      T
	revision uint64
	expires  time.Time
}

type deletingObject[T api.Object] struct {
	obj     T
	expires time.Time
}

// ViewOf returns a View of an informer that lasts as long as term t. It may be called only by
// Descriptor.Lead.
func ViewOf[T api.Object](t *Term, inf cache.SharedIndexInformer) *View[T] {
	v := &View[T]{
		inf: inf, now: t.Now,
		pending:  map[string]ownWrite[T]{},
		deleting: map[types.UID]deletingObject[T]{},
	}
	t.addObserver(inf, v)
	return v
}

// RecordWrite adds obj to the view. The controller must call it with each object that the API
// returned for a create or update request.
func (v *View[T]) RecordWrite(obj T) {
	rev := numericRevision(obj)
	v.mu.Lock()
	defer v.mu.Unlock()
	if rev <= v.seen {
		return // the informer has already delivered this version
	}
	v.pending[storeKey(obj)] = ownWrite[T]{obj: obj, revision: rev, expires: v.now().Add(ownWriteLifetime)}
}

// MarkDeleting records that obj counts as being deleted. It must be called before the delete
// request. If the request fails, UnmarkDeleting must be called.
func (v *View[T]) MarkDeleting(obj T) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.deleting[obj.GetUID()] = deletingObject[T]{obj: obj, expires: v.now().Add(ownWriteLifetime)}
}

// UnmarkDeleting undoes MarkDeleting.
func (v *View[T]) UnmarkDeleting(obj T) {
	v.mu.Lock()
	defer v.mu.Unlock()
	delete(v.deleting, obj.GetUID())
}

// IsDeleting reports whether obj is being deleted: it has a deletionTimestamp, or MarkDeleting was
// called.
func (v *View[T]) IsDeleting(obj T) bool {
	if obj.GetDeletionTimestamp() != nil {
		return true
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	_, ok := v.deleting[obj.GetUID()]
	return ok
}

// Get returns one object, and false if the view lacks it. The object is shared: callers must copy
// it before they modify it.
func (v *View[T]) Get(namespace, name string) (T, bool) {
	obj, ok := Cached[T](v.inf, namespace, name)
	key := name
	if namespace != "" {
		key = namespace + "/" + name
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if p, own := v.pending[key]; own && p.revision > v.seen && (!ok || numericRevision(obj) < p.revision) {
		return p.obj, true
	}
	return obj, ok
}

// All returns all objects. The objects are shared: callers must copy them before they modify them.
func (v *View[T]) All() []T {
	return v.mergeOwnWrites(func() []T { return CachedAll[T](v.inf) }, func(T) bool { return true })
}

// By returns the objects that an index of the informer has under any of the values. The objects are
// shared: callers must copy them before they modify them.
func (v *View[T]) By(index string, values ...string) []T {
	f := v.inf.GetIndexer().GetIndexers()[index]
	cached := func() []T {
		var out []T
		for _, value := range values {
			out = append(out, CachedBy[T](v.inf, index, value)...)
		}
		return out
	}
	return v.mergeOwnWrites(cached, func(obj T) bool {
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

// mergeOwnWrites returns the objects that list returns from the cache, with the controller's newer
// writes in their place. match reports whether a written object belongs to the list. The writes are
// copied before the cache is listed: a write that reaches the cache in between is then in the list,
// in the same or a newer version.
func (v *View[T]) mergeOwnWrites(list func() []T, match func(T) bool) []T {
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
		if numericRevision(obj) >= p.revision {
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

// handleChange updates the view for a change that the informer has delivered. It is called before
// the keys of the change are queued.
func (v *View[T]) handleChange(t ChangeType, o any) {
	obj, ok := o.(T)
	if !ok {
		return
	}
	rev := numericRevision(obj)
	v.mu.Lock()
	defer v.mu.Unlock()
	v.seen = max(v.seen, rev)
	key := storeKey(obj)
	if p, ok := v.pending[key]; ok && (p.revision <= rev || t == Deleted && p.obj.GetUID() == obj.GetUID()) {
		delete(v.pending, key)
	}
	if t == Deleted || obj.GetDeletionTimestamp() != nil {
		delete(v.deleting, obj.GetUID())
	}
}

// takeExpired removes expired writes and deletion records from the view and returns their objects.
func (v *View[T]) takeExpired() []any {
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
	for uid, g := range v.deleting {
		if now.After(g.expires) {
			delete(v.deleting, uid)
			out = append(out, g.obj)
		}
	}
	return out
}

// numericRevision returns the resourceVersion of o as a number, or 0 if it is not a number.
func numericRevision(o api.Object) uint64 {
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
