// Package controllers is the engine that every controller runs on: a work queue fed by informers,
// workers, views that include their own writes, slow-start batches, ownership, events and trace
// stages. Each directory below it holds one controller: a pure function that computes the writes
// from the cached objects, and a thin loop that performs them.
//
// A controller is data. Constructors take Deps, register the indexes that they need on the
// informers, which must not run yet, and start nothing:
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
// Engine.Run runs the controllers during one leadership.
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

// Key identifies the object of a reconcile. Kind is empty in a controller with keys of a single
// kind.
type Key struct{ Kind, Namespace, Name string }

// String returns kind/namespace/name without the empty parts.
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

// Reconcile moves the object that key identifies toward its desired state. It decides by the
// current state alone, not by the change that queued the key. It is never called concurrently for
// the same key. again is the delay after which it is called again, or 0. After an error it is
// called again with exponential backoff.
type Reconcile func(ctx context.Context, key Key) (again time.Duration, err error)

// Controller describes one controller.
type Controller struct {
	Name    string // "replicaset-controller"; also the name of its service account and the source of its events
	Workers int
	Watches []Watch
	// Dynamic watches kinds that are only known at run time. nil watches no such kinds.
	Dynamic *DynamicWatch
	// RequeueAll returns a channel. When the channel is closed, all keys are queued again, because
	// an input other than an API object has changed. nil disables this.
	RequeueAll func() <-chan struct{}
	// Rules are the permissions that the controller needs. They are the rules of the cluster role
	// "system:controller:NAME".
	Rules []rbacv1.PolicyRule
	// Lead is called once per leadership and returns the Reconcile function of that leadership. The
	// state of the returned function is discarded when the leadership ends.
	Lead func(t *Term) Reconcile
}

// ChangeType is the type of a change of an object.
type ChangeType int

// The types of changes.
const (
	Added ChangeType = iota
	Updated
	Deleted
)

// Change is a change that an informer delivered. Old is the zero T unless Type is Updated.
type Change[T any] struct {
	Type     ChangeType
	New, Old T
}

// Watch maps the changes of one kind to keys. A lost change may delay a reconcile, but it must not
// affect the final state.
type Watch struct {
	Informer cache.SharedIndexInformer
	keys     func(t ChangeType, obj, old any) []Key
}

// DynamicWatch maps the changes of all kinds that have an informer to keys. Kinds that get an
// informer during the leadership are included. A lost change may delay a reconcile, but it must not
// affect the final state. The set of kinds may change between two calls of Reconcile.
type DynamicWatch struct {
	Current func() *client.Informed
	Keys    func(k *api.Kind, c Change[api.Object]) []Key
}

// watchKind returns the Watch of one kind.
func (e *DynamicWatch) watchKind(one client.KindInformer) Watch {
	return OnInformer(one.Informer, func(c Change[api.Object]) []Key { return e.Keys(one.Kind, c) })
}

// On returns a Watch for the objects of type T.
func On[T api.Object](i *client.Informers, keys func(c Change[T]) []Key) Watch {
	return OnInformer(client.Informer[T](i), keys)
}

// OnInformer returns a Watch for the objects of an informer. All objects must be of type T.
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

// Deps are the parameters of the controllers' constructors. Client has no user and no fence; the
// engine sets both.
type Deps struct {
	Client    *client.Client
	Informers *client.Informers
	Log       *slog.Logger
	Now       func() time.Time // nil means time.Now
	Timeline  *api.Timeline    // may be nil
	Replica   string           // name of this replica in trace stages, for example "cp1"
	// ConfirmLeadership returns nil when, after the start of the call, a quorum has confirmed that
	// this replica leads in the term of the fence. If it is nil, no leadership can be confirmed.
	ConfirmLeadership func(ctx context.Context, fence uint64) error
	// Aggregated gives access to aggregated APIs. nil means that the cluster has none.
	Aggregated AggregatedAPIs
	// PodAddresses decides which pod addresses may be endpoints of Services. nil accepts all
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

// Cached returns an object from the informer's cache. The object is shared: copy it before
// modifying it.
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

// CachedAll returns all cached objects. The objects are shared: copy them before modifying them.
func CachedAll[T api.Object](inf cache.SharedIndexInformer) []T {
	return filterByType[T](inf.GetIndexer().List())
}

// CachedBy returns the cached objects that an index holds under a value. The objects are shared. It
// panics if the index has not been added.
func CachedBy[T api.Object](inf cache.SharedIndexInformer, index, value string) []T {
	list, err := inf.GetIndexer().ByIndex(index, value)
	if err != nil {
		panic("controllers: index " + index + " was not added: " + err.Error())
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

// Index adds an index to an informer unless the informer already has an index of that name. All
// controllers must use the same index function for one name.
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
