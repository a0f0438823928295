package garbagecollector

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// ownerIndex indexes objects by the UIDs of all their owners.
const ownerIndex = "keelson.owner"

// Bounds of the delay after which an object is checked again. This is necessary if its owner is of
// an unknown kind, or may be deleted without a notification to the collector. The delay is short at
// first, because the kind or the owner may just have been created. It then doubles.
const (
	minStrangerRetry = time.Second
	maxStrangerRetry = 5 * time.Minute
)

// source is a kind of collectable objects, with its informer. informer is nil while no object of
// the kind is known, and for kinds of aggregated APIs.
type source struct {
	kind     *api.Kind
	informer cache.SharedIndexInformer

	aggregated *engine.AggregatedResource // nil means that this API server stores the kind
}

// sources holds all collectable kinds, by group and resource. It is immutable.
type sources map[string]source

// currentKinds tracks the collectable kinds. CustomResourceDefinitions add and remove kinds at run
// time.
type currentKinds struct {
	kinds    *client.EveryKind
	now      atomic.Pointer[drawn]
	observed sync.Map // set of *api.Kind: kinds of which the collector has received a change
}

// observesDeletions reports whether the collector is notified when a cached object of kind k is
// deleted. This is not certain at first for a custom resource: its informer may cache an object
// before the collector's handler is registered.
func (g *currentKinds) observesDeletions(k *api.Kind) bool {
	if k.Serving.Definition == "" {
		return true
	}
	_, ok := g.observed.Load(k)
	return ok
}

// recordObserved records that the collector has received a change of an object of kind k.
func (g *currentKinds) recordObserved(k *api.Kind) {
	if !g.observesDeletions(k) {
		g.observed.Store(k, true)
	}
}

type drawn struct {
	of *client.Informed
	sources
}

// currentSources returns the current collectable kinds. One decision must use the result of one
// call.
func (g *currentKinds) currentSources() sources {
	of := g.kinds.Now()
	if d := g.now.Load(); d != nil && d.of == of {
		return d.sources
	}
	all := make(sources, len(of.Kinds)+len(of.Idle))
	for _, k := range of.Idle {
		all[k.GroupResource().String()] = source{kind: k}
	}
	for _, one := range of.Kinds {
		all[one.Kind.GroupResource().String()] = source{kind: one.Kind, informer: one.Informer}
	}
	g.now.Store(&drawn{of, all})
	g.observed.Range(func(k, _ any) bool {
		if kind := k.(*api.Kind); all[kind.GroupResource().String()].kind != kind {
			g.observed.Delete(k)
		}
		return true
	})
	return all
}

// isCollectable reports whether the collector handles objects of kind k. It ignores Events, as
// owners and as dependents.
func isCollectable(k *api.Kind) bool { return k.Resource != "events" }

// addOwnerIndex adds an index of objects by the UIDs of their owners, ownerIndex, to an informer.
func addOwnerIndex(inf cache.SharedIndexInformer) {
	engine.Index(inf, ownerIndex, func(o api.Object) []string {
		var uids []string
		for _, r := range o.GetOwnerReferences() {
			uids = append(uids, string(r.UID))
		}
		return uids
	})
}

// New returns the garbage collector. It handles all kinds except Events, including kinds of
// aggregated APIs.
func New(d engine.Deps) *engine.Descriptor {
	g := &currentKinds{kinds: client.Every(d.Informers, isCollectable, addOwnerIndex)}
	return &engine.Descriptor{
		Name:    "generic-garbage-collector",
		Workers: 48,
		Dynamic: &engine.DynamicWatch{Current: g.kinds.Now,
			Keys: func(k *api.Kind, c engine.Change[api.Object]) []engine.Key {
				g.recordObserved(k)
				return g.currentSources().affectedKeys(k.GroupResource().String(), c)
			}},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{"*"}, Resources: []string{"*"},
				Verbs: []string{"delete", "get", "list", "patch", "update", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create", "patch", "update"}},
		},
		Lead: func(t *engine.Term) engine.Reconcile {
			c := &collector{term: t, living: g, absent: map[coordinates]bool{},
				recheckDelays: map[engine.Key]time.Duration{},
				reported:      map[foreignOwner]bool{}}
			if d.Aggregated != nil {
				c.aggregated = newAggregated(d.Aggregated)
				t.Enqueue(scanKey)
			}
			return c.reconcileObject
		},
	}
}

func objectKey(name string, o metav1.Object) engine.Key {
	return engine.Key{Kind: name, Namespace: o.GetNamespace(), Name: o.GetName()}
}

// affectedKeys returns the keys of the objects to check when an object of the kind called name
// changes: the object itself, the dependents of a deleted object, and owners that wait for the
// object.
func (all sources) affectedKeys(name string, c engine.Change[api.Object]) []engine.Key {
	var out []engine.Key
	switch {
	case c.Type == engine.Deleted:
		out = all.waitingOwners(c.New)
		for depName, deps := range all.cachedDependents(c.New.GetUID()) {
			for _, d := range deps {
				out = append(out, objectKey(depName, d))
			}
		}
		return out
	case c.Type == engine.Updated && c.Old != nil && !isRelevantUpdate(c.Old, c.New):
		return nil
	case c.Type == engine.Updated && c.Old != nil:
		out = all.waitingOwners(c.Old)
	}
	if len(c.New.GetOwnerReferences()) > 0 || c.New.GetDeletionTimestamp() != nil && len(c.New.GetFinalizers()) > 0 {
		out = append(out, objectKey(name, c.New))
	}
	return out
}

// isRelevantUpdate reports whether the update of an object from a to b can change a decision of
// Judge.
func isRelevantUpdate(a, b api.Object) bool {
	return a == b || a.GetUID() != b.GetUID() ||
		(a.GetDeletionTimestamp() == nil) != (b.GetDeletionTimestamp() == nil) ||
		!slices.Equal(a.GetFinalizers(), b.GetFinalizers()) ||
		!equality.Semantic.DeepEqual(a.GetOwnerReferences(), b.GetOwnerReferences())
}

// waitingOwners returns the keys of the cached owners of o that are in foreground deletion.
func (all sources) waitingOwners(o api.Object) []engine.Key {
	var out []engine.Key
	for _, r := range o.GetOwnerReferences() {
		s, ok := all.findSource(r)
		if !ok {
			continue
		}
		if owner, ok := s.cachedOwner(o.GetNamespace(), r); ok && stateOf(owner) == Waiting {
			out = append(out, objectKey(s.kind.GroupResource().String(), owner))
		}
	}
	return out
}

// cachedDependents returns the cached objects that have uid as an owner, by kind.
func (all sources) cachedDependents(uid types.UID) map[string][]api.Object {
	out := map[string][]api.Object{}
	for name, s := range all {
		if s.informer == nil {
			continue
		}
		if list := engine.CachedBy[api.Object](s.informer, ownerIndex, string(uid)); len(list) > 0 {
			out[name] = list
		}
	}
	return out
}

// findSource returns the kind of owner reference r, and false if no collectable kind has its group
// and kind. The version of the reference may differ.
func (all sources) findSource(r metav1.OwnerReference) (source, bool) {
	gv, err := schema.ParseGroupVersion(r.APIVersion)
	if err != nil {
		return source{}, false
	}
	for _, s := range all {
		if s.kind.GVK.Group == gv.Group && s.kind.GVK.Kind == r.Kind {
			return s, true
		}
	}
	return source{}, false
}

// cachedOwner returns the object to which owner reference r refers, if the cache has it with the
// UID of r. Otherwise it returns false. The reference is in an object in namespace.
func (s source) cachedOwner(namespace string, r metav1.OwnerReference) (api.Object, bool) {
	if !s.kind.Namespaced {
		namespace = ""
	}
	if s.informer == nil {
		return nil, false
	}
	o, ok := engine.Cached[api.Object](s.informer, namespace, r.Name)
	if !ok || o.GetUID() != r.UID {
		return nil, false
	}
	return o, true
}

// collector collects objects during one term of leadership. Every term has a new collector.
type collector struct {
	term   *engine.Term
	living *currentKinds

	mu sync.Mutex
	// owners that the API does not have; an owner that was deleted never returns, because UIDs are
	// unique
	absent map[coordinates]bool
	// recheckDelays holds the last delay between two checks of an object (see recheckDelay). It
	// contains objects with an owner of an unknown kind, or with an owner that may be deleted
	// without a notification.
	recheckDelays map[engine.Key]time.Duration
	reported      map[foreignOwner]bool // references for which reportForeignOwner has recorded an Event

	aggregated *aggregatedObjects // nil means that the cluster has no aggregated API
}

// coordinates identify an owner by all parts of an owner reference. The UID alone is not
// sufficient: a reference may have the UID of an existing object with another name. Such a
// reference has no owner, although the object exists.
type coordinates struct {
	kind            schema.GroupResource
	namespace, name string
	uid             types.UID
}

// maxAbsent is the maximum number of entries in each of the maps absent, recheckDelays and reported
// of collector.
const maxAbsent = 10000

func (c *collector) reconcileObject(ctx context.Context, k engine.Key) (time.Duration, error) {
	all := c.living.currentSources()
	if k == scanKey {
		c.scanAggregated(ctx, all)
		return scanInterval, nil
	}
	s, ok := all[k.Kind]
	if !ok || s.informer == nil {
		return 0, nil
	}
	obj, ok := engine.Cached[api.Object](s.informer, k.Namespace, k.Name)
	if !ok {
		return 0, nil
	}
	if obj.GetDeletionTimestamp() != nil {
		switch {
		case slices.Contains(obj.GetFinalizers(), metav1.FinalizerOrphanDependents):
			return 0, c.orphanDependents(ctx, all, s, obj)
		case slices.Contains(obj.GetFinalizers(), metav1.FinalizerDeleteDependents):
			return 0, c.processForegroundDeletion(ctx, all, s, obj)
		}
		return 0, nil
	}
	owners, unseen, err := c.resolveOwners(ctx, all, s, obj, false)
	if err != nil {
		return 0, err
	}
	again := c.recheckDelay(k, unseen)
	held := true
	if lostSome(owners) {
		if held, err = c.isHeldFromOutside(ctx, all, s, obj); err != nil {
			return 0, err
		}
	}
	switch v := Judge(obj, owners, held, func() bool { return c.hasDependents(all, obj) }); {
	case v.Delete != "":
		return 0, c.deleteGarbage(ctx, s, obj, v.Delete)
	case len(v.Detach) > 0:
		return again, c.removeReferences(ctx, s, obj, v.Detach...)
	}
	return again, nil
}

// hasDependents reports whether an object with obj as an owner is cached or is in the most recent
// lists of aggregated APIs.
func (c *collector) hasDependents(all sources, obj api.Object) bool {
	return len(all.cachedDependents(obj.GetUID())) > 0 || len(c.aggregated.listDependents(obj.GetUID())) > 0
}

// recheckDelay returns the delay until the object with key k is checked again. If unseen is true,
// one of its owners is of an unknown kind or may be deleted without a notification; the delay then
// doubles with each call. Otherwise recheckDelay returns 0: no check is necessary.
func (c *collector) recheckDelay(k engine.Key, unseen bool) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !unseen {
		delete(c.recheckDelays, k)
		return 0
	}
	if len(c.recheckDelays) >= maxAbsent {
		clear(c.recheckDelays)
	}
	c.recheckDelays[k] = min(max(2*c.recheckDelays[k], minStrangerRetry), maxStrangerRetry)
	return c.recheckDelays[k]
}

// isHeldFromOutside returns the first result of Held for obj. If obj is in a circle of owner
// references, all owners are read from the API. Otherwise the circle might never be deleted: two
// members that lose their outer owners at the same time could each rely on the stale cached owner
// of the other. It returns an error if the server of one of the owners does not respond: obj could
// lose the reference to its last outer owner, and the circle would be kept.
func (c *collector) isHeldFromOutside(ctx context.Context, all sources, s source, obj api.Object) (bool, error) {
	for _, live := range []bool{false, true} {
		kinds := map[types.UID]source{obj.GetUID(): s}
		held, circular, err := Held(obj, func(o api.Object) ([]Owner, error) {
			owners, _, err := c.resolveOwners(ctx, all, kinds[o.GetUID()], o, live)
			for _, owner := range owners {
				if owner.Unanswered {
					return nil, engine.RaceError("the server of owner %s %s does not respond", owner.Ref.Kind,
						owner.Ref.Name)
				}
				if owner.Object == nil {
					continue
				}
				kind, ok := all.findSource(owner.Ref)
				if !ok {
					if kind, ok = c.aggregated.ownerSource(ctx, owner.Ref); !ok {
						return nil, engine.RaceError("discovery no longer contains %s %s", owner.Ref.APIVersion,
							owner.Ref.Kind)
					}
				}
				kinds[owner.Ref.UID] = kind
			}
			return owners, err
		})
		if err != nil || !circular {
			return held, err
		}
		if live {
			return held, nil
		}
	}
	return true, nil
}

// resolveOwners returns the state of every owner of obj. It reads the cache first unless live is
// true. An owner counts as Absent only if the API server confirms that it does not exist. unseen
// reports that an owner is of an unknown kind, or exists and may be deleted without a notification.
func (c *collector) resolveOwners(ctx context.Context, all sources, s source, obj api.Object, live bool) (
	out []Owner, unseen bool, err error,
) {
	for _, r := range obj.GetOwnerReferences() {
		o, ok := all.findSource(r)
		if !ok && c.aggregated != nil {
			out = append(out, c.aggregated.resolveOwner(ctx, s, obj, r, !live))
			unseen = true
			continue
		}
		if !ok || o.kind.Namespaced && !s.kind.Namespaced {
			if ok {
				c.reportForeignOwner(all, s, obj, o, r)
			}
			out = append(out, Owner{Ref: r, State: Solid})
			unseen = true
			continue
		}
		follows := c.living.observesDeletions(o.kind) // must be called before the cache is read
		owner, ok := o.cachedOwner(obj.GetNamespace(), r)
		if !ok || live {
			owner, err = c.lookUp(ctx, o, obj.GetNamespace(), r)
			if c.term.Client.Dropped(o.kind, err) {
				out, unseen = append(out, Owner{Ref: r, State: Solid}), true
				continue
			}
			if err != nil {
				return nil, false, err
			}
		}
		unseen = unseen || owner != nil && !(ok && follows)
		state := Absent
		if owner != nil {
			state = stateOf(owner)
		} else {
			c.reportForeignOwner(all, s, obj, o, r)
		}
		out = append(out, Owner{Ref: r, State: state, Object: owner})
	}
	return out, unseen, nil
}

// lookUp reads the owner that r names, an object of kind o, from the API. It returns nil if no
// object with the name and UID of r exists.
func (c *collector) lookUp(ctx context.Context, o source, namespace string, r metav1.OwnerReference) (
	api.Object, error,
) {
	if !o.kind.Namespaced {
		namespace = ""
	}
	at := coordinates{kind: o.kind.GroupResource(), namespace: namespace, name: r.Name, uid: r.UID}
	c.mu.Lock()
	known := c.absent[at]
	c.mu.Unlock()
	if known {
		return nil, nil
	}
	got, err := c.term.Client.Do(ctx, &api.Request{Verb: api.VerbGet, Kind: o.kind, Namespace: namespace, Name: r.Name})
	if err != nil && !apierrors.IsNotFound(err) {
		return nil, fmt.Errorf("reading owner %s %s/%s: %w", r.Kind, namespace, r.Name, err)
	}
	if err == nil {
		owner, ok := got.(api.Object)
		if !ok {
			return nil, fmt.Errorf("reading owner %s %s/%s: the response is a %T", r.Kind, namespace, r.Name, got)
		}
		if owner.GetUID() == r.UID {
			return owner, nil
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.absent) >= maxAbsent {
		clear(c.absent)
	}
	c.absent[at] = true
	return nil, nil
}

// deleteGarbage deletes obj, which Judge has found to be garbage. The deletion fails if the stored
// object has another UID or resourceVersion than obj.
func (c *collector) deleteGarbage(
	ctx context.Context, s source, obj api.Object, policy metav1.DeletionPropagation,
) error {
	if s.aggregated != nil {
		return c.deleteAggregated(ctx, s, obj, policy)
	}
	uid, rv := obj.GetUID(), obj.GetResourceVersion()
	_, err := c.term.Client.Do(ctx, &api.Request{
		Verb: api.VerbDelete, Kind: s.kind, Namespace: obj.GetNamespace(), Name: obj.GetName(),
		Delete: metav1.DeleteOptions{
			Preconditions:     &metav1.Preconditions{UID: &uid, ResourceVersion: &rv},
			PropagationPolicy: &policy,
		},
	})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("collecting %s %s/%s: %w", s.kind.GVK.Kind, obj.GetNamespace(), obj.GetName(), err)
	}
	return nil
}

// updateUnchanged stores a copy of obj that change has modified. The update fails if the stored
// object has another resourceVersion than obj.
func (c *collector) updateUnchanged(ctx context.Context, s source, obj api.Object, change func(o api.Object)) error {
	whole, err := s.kind.UnpackObject(obj)
	if err != nil {
		return fmt.Errorf("reading %s %s/%s: %w", s.kind.GVK.Kind, obj.GetNamespace(), obj.GetName(), err)
	}
	next := whole.DeepCopyObject().(api.Object)
	change(next)
	_, err = c.term.Client.Do(ctx, &api.Request{
		Verb: api.VerbUpdate, Kind: s.kind, Namespace: obj.GetNamespace(), Name: obj.GetName(), Object: next,
	})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("updating %s %s/%s: %w", s.kind.GVK.Kind, obj.GetNamespace(), obj.GetName(), err)
	}
	return nil
}

// removeReferences removes the owner references in lost from those of obj. A reference is removed
// only if all its parts match, because obj may have two references with one UID, only one of which
// is wrong.
func (c *collector) removeReferences(
	ctx context.Context, s source, obj api.Object, lost ...metav1.OwnerReference,
) error {
	kept := slices.DeleteFunc(slices.Clone(obj.GetOwnerReferences()), func(r metav1.OwnerReference) bool {
		return slices.ContainsFunc(lost, func(l metav1.OwnerReference) bool {
			return r.APIVersion == l.APIVersion && r.Kind == l.Kind && r.Name == l.Name && r.UID == l.UID
		})
	})
	if s.aggregated != nil {
		return c.patchAggregated(ctx, s, obj, map[string]any{"ownerReferences": kept})
	}
	return c.updateUnchanged(ctx, s, obj, func(o api.Object) { o.SetOwnerReferences(kept) })
}

// orphanDependents removes the references to owner from all its dependents, and then the orphan
// finalizer of owner. It lists the dependents from the API: a dependent that is not cached yet
// would otherwise be deleted later.
func (c *collector) orphanDependents(ctx context.Context, all sources, s source, owner api.Object) error {
	var errs []error
	for _, dep := range all {
		if s.kind.Namespaced && !dep.kind.Namespaced {
			continue
		}
		errs = append(errs, c.orphanKind(ctx, dep, owner))
	}
	errs = append(errs, c.orphanAggregated(ctx, all, s, owner))
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if s.aggregated != nil {
		return c.removeFinalizer(ctx, s, owner, metav1.FinalizerOrphanDependents)
	}
	return c.updateUnchanged(ctx, s, owner, func(o api.Object) {
		o.SetFinalizers(withoutString(o.GetFinalizers(), metav1.FinalizerOrphanDependents))
	})
}

func (c *collector) orphanKind(ctx context.Context, dep source, owner api.Object) error {
	objs, err := c.term.Client.ListKind(ctx, dep.kind, owner.GetNamespace())
	if c.term.Client.Dropped(dep.kind, err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("listing %s to orphan the dependents of %s/%s: %w", dep.kind.Resource, owner.GetNamespace(),
			owner.GetName(), err)
	}
	mine := objs[:0:0]
	for _, o := range objs {
		if ownedBy(o, owner.GetUID()) {
			mine = append(mine, o)
		}
	}
	return engine.InParallel(ctx, len(mine), func(ctx context.Context, i int) error {
		return c.updateUnchanged(ctx, dep, mine[i], func(o api.Object) {
			o.SetOwnerReferences(engine.WithoutOwners(o.GetOwnerReferences(), owner.GetUID()))
		})
	})
}
