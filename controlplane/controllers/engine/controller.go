// Package engine runs controllers: a work queue fed by informers, workers, views that include their
// own writes, slow-start batches, ownership, events and timeline stages. A controller is a pure
// function that computes the writes from the cached objects, and a thin loop that performs them.
//
// A controller is data, a Descriptor. Constructors take Deps, register the indexes that they need
// on the informers, which must not run yet, and start nothing. Package controllers has the list of
// all controllers. Engine.Run runs them while this replica is the leader.
package engine

import (
	"context"
	"log/slog"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/podaddress"
	"keelson.dev/keelson/controlplane/client"
)

// Key identifies the object for a call of Reconcile. Kind is empty in a controller that has only
// one kind of keys.
type Key struct{ Kind, Namespace, Name string }

// String returns kind/namespace/name without empty parts.
func (k Key) String() string {
	s := k.Name
	if k.Namespace != "" {
		s = k.Namespace + "/" + s
	}
	if k.Kind != "" {
		s = k.Kind + "/" + s
	}
	return s
}

// KeyOf returns the key of an object, without its kind.
func KeyOf(o api.Object) Key { return Key{Namespace: o.GetNamespace(), Name: o.GetName()} }

// Reconcile brings the object that key identifies closer to its desired state. An implementation
// must decide by the current state alone, not by the change that queued the key. It is never called
// concurrently for one key. again is the delay after which it is called again, or 0. After an error
// it is called again with exponential backoff.
type Reconcile func(ctx context.Context, key Key) (again time.Duration, err error)

// Descriptor describes one controller: its name, the objects that it watches, its permissions, and
// how it reconciles. It starts nothing.
type Descriptor struct {
	Name    string // such as "replicaset-controller"; also the name of its service account and the source of its events
	Workers int
	Watches []Watch
	// Dynamic watches kinds that are known only at run time, such as custom resources. nil watches
	// none.
	Dynamic *DynamicWatch
	// RequeueAll returns a channel that is closed when an input other than an API object has
	// changed. All keys are then queued again. nil means that there is no such input.
	RequeueAll func() <-chan struct{}
	// Rules are the permissions of the controller: the rules of ClusterRole
	// "system:controller:NAME".
	Rules []rbacv1.PolicyRule
	// Lead is called at the start of each term of leadership and returns the Reconcile function for
	// that term. The function is discarded when the term ends.
	Lead func(t *Term) Reconcile
}

// ChangeType is the type of a change of an object.
type ChangeType int

// Types of changes of an object.
const (
	Added ChangeType = iota
	Updated
	Deleted
)

// Change is the change of an object that an informer delivered. New is the current object or, if
// Type is Deleted, the last version. Old is the zero T unless Type is Updated.
type Change[T any] struct {
	Type     ChangeType
	New, Old T
}

// Watch watches the objects of one informer. For each change it queues the keys that the controller
// derives from the changed object. Changes may be lost: the controller must then reach the same
// final state, only later.
type Watch struct {
	Informer cache.SharedIndexInformer
	keys     func(t ChangeType, obj, old any) []Key
}

// DynamicWatch watches the objects of every kind that has an informer, also of kinds that get an
// informer later. For each change it queues the keys that the controller derives from the changed
// object. Changes may be lost: the controller must then reach the same final state, only later. The
// set of watched kinds may change between two calls of Reconcile.
type DynamicWatch struct {
	Current func() *client.Informed
	Keys    func(k *api.Kind, c Change[api.Object]) []Key
}

// watchKind returns the Watch for the informer of one kind.
func (e *DynamicWatch) watchKind(one client.KindInformer) Watch {
	return OnInformer(one.Informer, func(c Change[api.Object]) []Key { return e.Keys(one.Kind, c) })
}

// On returns a Watch for the objects of type T. keys returns the keys to queue for a change.
func On[T api.Object](i *client.Informers, keys func(c Change[T]) []Key) Watch {
	return OnInformer(client.Informer[T](i), keys)
}

// OnInformer returns a Watch for the objects of an informer, which must all be of type T. keys
// returns the keys to queue for a change.
func OnInformer[T api.Object](inf cache.SharedIndexInformer, keys func(c Change[T]) []Key) Watch {
	return Watch{Informer: inf, keys: func(t ChangeType, obj, old any) []Key {
		c := Change[T]{Type: t}
		var ok bool
		if c.New, ok = obj.(T); !ok {
			return nil
		}
		if old != nil {
			c.Old, _ = old.(T)
		}
		return keys(c)
	}}
}

// Self returns the key of the object that changed. It is a keys function for On and OnInformer.
func Self[T api.Object](c Change[T]) []Key { return []Key{KeyOf(c.New)} }

// Deps are the dependencies that constructors of controllers take. Client has no user and no raft
// term; the engine sets both for each controller and term of leadership.
type Deps struct {
	Client    *client.Client
	Informers *client.Informers
	Log       *slog.Logger
	Now       func() time.Time // returns the current time; nil means time.Now
	Timeline  *api.Timeline    // nil means that no timeline is recorded
	Replica   string           // name of this replica in timeline stages, for example "cp1"
	// ConfirmLeadership returns nil once a quorum has confirmed, after the start of the call, that
	// this replica is the leader in the raft term fence. nil means that leadership cannot be
	// confirmed.
	ConfirmLeadership func(ctx context.Context, fence uint64) error
	// Aggregated gives access to aggregated APIs. nil means that the cluster has no aggregated
	// APIs.
	Aggregated AggregatedAPIs
	// PodAddresses decides which addresses of pods may be endpoints of Services. nil accepts all
	// addresses.
	PodAddresses *podaddress.Index
}

// Clock returns Now, or time.Now if Now is nil.
func (d Deps) Clock() func() time.Time {
	if d.Now != nil {
		return d.Now
	}
	return time.Now
}

// Cached returns an object from the cache of an informer, and false if the cache lacks it. The
// object is shared: callers must copy it before they modify it.
func Cached[T api.Object](inf cache.SharedIndexInformer, namespace, name string) (T, bool) {
	key := name
	if namespace != "" {
		key = namespace + "/" + name
	}
	o, ok, _ := inf.GetIndexer().GetByKey(key)
	if !ok {
		var zero T
		return zero, false
	}
	obj, ok := o.(T)
	return obj, ok
}

// CachedAll returns all objects in the cache of an informer. The objects are shared: callers must
// copy them before they modify them.
func CachedAll[T api.Object](inf cache.SharedIndexInformer) []T {
	return filterByType[T](inf.GetIndexer().List())
}

// CachedBy returns the cached objects that an index of the informer has under a value. The objects
// are shared: callers must copy them before they modify them. It panics if the index has not been
// added.
func CachedBy[T api.Object](inf cache.SharedIndexInformer, index, value string) []T {
	list, err := inf.GetIndexer().ByIndex(index, value)
	if err != nil {
		panic("engine: index " + index + " was not added: " + err.Error())
	}
	return filterByType[T](list)
}

func filterByType[T api.Object](list []any) []T {
	out := make([]T, 0, len(list))
	for _, o := range list {
		if obj, ok := o.(T); ok {
			out = append(out, obj)
		}
	}
	return out
}

// Index adds an index with the given name to an informer, unless the informer already has it.
// values returns the index values of an object. All controllers must use the same function for one
// name.
func Index(inf cache.SharedIndexInformer, name string, values func(o api.Object) []string) {
	if _, ok := inf.GetIndexer().GetIndexers()[name]; ok {
		return
	}
	err := inf.AddIndexers(cache.Indexers{name: func(o any) ([]string, error) {
		obj, ok := o.(api.Object)
		if !ok {
			return nil, nil
		}
		return values(obj), nil
	}})
	if err != nil {
		panic("engine: adding index " + name + ": " + err.Error())
	}
}
