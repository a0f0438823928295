// Package controllers is the engine that every controller runs on: a work
// queue fed by informers, workers, views that read their own writes, slow-start
// batches, ownership, events and stage records. Each folder below holds one
// controller: a pure function from what is cached to what shall be written, and
// a thin loop that writes it.
//
// A controller is data. Constructors take Deps, register the indexes they need
// on the (not yet running) informers and start nothing:
//
//	deployment.New(d)                  serviceaccount.New(d, roots)
//	replicaset.New(d)                  nodelifecycle.New(d)
//	replicaset.NewForReplicationControllers(d)
//	statefulset.New(d)                 daemonset.New(d)
//	job.New(d)                         cronjob.New(d)
//	endpointslice.New(d)               nodecidr.New(d, nodecidr.Options{})
//	endpointslice.NewMirror(d)
//	endpoints.New(d)                   podgc.New(d, podgc.Options{})
//	garbagecollector.New(d)            persistentvolume.New(d)
//	namespace.New(d)                   volumeprotection.New(d)
//	podgroupprotection.New(d)
//	disruption.New(d)                  clusterroleaggregation.New(d)
//	ephemeralvolume.New(d)             configrestart.New(d)
//	customresourcedefinition.New(d)    rebalance.New(d, rebalance.Options{Trial: ...})
//	volumeexpansion.New(d, fleet)      volumeprovision.New(d, fleet)
//	volumecapacity.New(d, fleet)       volumeattach.New(d, fleet)
//	volumeattributes.New(d, fleet)
//	resourceclaim.New(d)               devicetainteviction.New(d)
//	resourceslice.New(d)
//	resourcequota.New(d)               serviceaccount.NewTokens(d, roots, sign)
//	certificate.New(d, certificate.Options{Sign: ca.SignRequest})
//	servicecidr.New(d, "10.96.0.0/16")  servicecidr.NewRepair(d)
//	loadbalancer.New(d)
//	gateway.New(d, gateway.Options{})
//	ingress.New(d, ingress.Options{})
//	horizontalpodautoscaler.New(d, source, horizontalpodautoscaler.Defaults)
//
// Engine.Run runs them for one leadership.
package controllers

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

// Key names what a reconcile is about. Kind is empty where a controller has one sort of key.
type Key struct{ Kind, Namespace, Name string }

// String prints kind/namespace/name without the empty parts.
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

// KeyOf is the key of the object itself.
func KeyOf(o api.Object) Key { return Key{Namespace: o.GetNamespace(), Name: o.GetName()} }

// Reconcile brings what key names closer to what is desired, judging by state alone.
// It is never called for one key twice at once. again asks for another call after that long,
// 0 for none; after an error the call is repeated with growing delays.
type Reconcile func(ctx context.Context, key Key) (again time.Duration, err error)

// Controller is one controller as data.
type Controller struct {
	Name    string // "replicaset-controller": also its service account and the source of its events
	Workers int
	Watches []Watch
	// Every watches kinds that are known only at run time; nil = none.
	Every *Every
	// Renewed returns what is closed when all keys are to be looked at again, for something else than an object has changed;
	// nil = never.
	Renewed func() <-chan struct{}
	// Rules are the rights that it needs: those of the cluster role "system:controller:NAME".
	Rules []rbacv1.PolicyRule
	// Lead is called once per leadership. Whatever the returned function remembers
	// dies with the leadership.
	Lead func(t *Term) Reconcile
}

// ChangeType says what happened to an object.
type ChangeType int

// The sorts of changes.
const (
	Added ChangeType = iota
	Updated
	Deleted
)

// Change is what an informer saw. Old is nil (the zero T) unless Type is Updated.
type Change[T any] struct {
	Type     ChangeType
	New, Old T
}

// Watch maps the changes of one kind to keys. Losing a change must not matter
// for where things end up, only for how soon.
type Watch struct {
	Informer cache.SharedIndexInformer
	keys     func(t ChangeType, obj, old any) []Key
}

// Every maps the changes of all kinds that have an informer to keys, also of those that get one while the controller
// leads. As with a Watch, losing a change must not matter for where things end up; the kinds that are there may change
// between two calls of a reconcile.
type Every struct {
	Now  func() *client.Informed
	Keys func(k *api.Kind, c Change[api.Object]) []Key
}

// watch is that of one kind.
func (e *Every) watch(one client.KindInformer) Watch {
	return OnInformer(one.Informer, func(c Change[api.Object]) []Key { return e.Keys(one.Kind, c) })
}

// On watches T.
func On[T api.Object](i *client.Informers, keys func(c Change[T]) []Key) Watch {
	return OnInformer(client.Informer[T](i), keys)
}

// OnInformer watches the objects of an informer, all of which must be T.
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

// Self maps a change to the key of the changed object.
func Self[T api.Object](c Change[T]) []Key { return []Key{KeyOf(c.New)} }

// Deps are what constructors take. Client has no identity and no fence yet.
type Deps struct {
	Client    *client.Client
	Informers *client.Informers
	Log       *slog.Logger
	Now       func() time.Time // nil = time.Now
	Timeline  *api.Timeline    // may be nil
	Replica   string           // this replica's name, for stage records: "cp1"
	// ConfirmLeadership returns nil when a majority has confirmed, after the call began, that this replica leads in the term of
	// the fence. nil = no leadership is ever confirmed.
	ConfirmLeadership func(ctx context.Context, fence uint64) error
	// Aggregated reaches the APIs of servers in the cluster; nil = there are none.
	Aggregated AggregatedAPIs
	// PodAddresses judges the addresses of pods as endpoints of Services; nil = all of them count.
	PodAddresses *podaddress.Index
}

// Clock returns Now or time.Now.
func (d Deps) Clock() func() time.Time {
	if d.Now != nil {
		return d.Now
	}
	return time.Now
}

// Cached returns the cached object, shared: copy before modifying.
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

// CachedAll returns all cached objects, shared.
func CachedAll[T api.Object](inf cache.SharedIndexInformer) []T {
	return typed[T](inf.GetIndexer().List())
}

// CachedBy returns the cached objects under a value of an index, shared.
func CachedBy[T api.Object](inf cache.SharedIndexInformer, index, value string) []T {
	list, err := inf.GetIndexer().ByIndex(index, value)
	if err != nil {
		panic("controllers: index " + index + " was not added: " + err.Error())
	}
	return typed[T](list)
}

func typed[T api.Object](list []any) []T {
	out := make([]T, 0, len(list))
	for _, o := range list {
		if obj, ok := o.(T); ok {
			out = append(out, obj)
		}
	}
	return out
}

// Index adds an index to an informer unless another controller has added it already.
// Indexes of one name must have one meaning in all controllers.
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
		panic("controllers: adding index " + name + ": " + err.Error())
	}
}
