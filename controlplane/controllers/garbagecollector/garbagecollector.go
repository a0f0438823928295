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
	"keelson.dev/keelson/controlplane/controllers"
)

// ownerIndex indexes objects by the UIDs of all their owners.
const ownerIndex = "keelson.owner"

// Bounds of the delay after which an object is judged again that has an owner of an unknown kind,
// or an owner that may be deleted unobserved. The delay is short at first, because the kind or the
// owner may just have been created, and then doubles.
const (
	minStrangerRetry = time.Second
	maxStrangerRetry = 5 * time.Minute
)

// source is a kind and its informer. informer is nil if no object of the kind has been seen.
type source struct {
	kind     *api.Kind
	informer cache.SharedIndexInformer

	aggregated *controllers.AggregatedResource // nil means that this API stores the kind
}

// sources holds all collectable kinds by their group and resource. It is immutable.
type sources map[string]source

// currentKinds returns the current sources. Kinds are added and removed at run time.
type currentKinds struct {
	kinds *client.EveryKind
	now   atomic.Pointer[drawn]
	heard sync.Map // set of *api.Kind: kinds of which the collector has received a change
}

// observesDeletions reports whether the collector receives the deletion of a cached object of a
// kind. The informer of a custom resource may cache its first object before the collector's handler
// is registered.
func (g *currentKinds) observesDeletions(k *api.Kind) bool {
	if k.Definition == "" {
		return true
	}
	_, ok := g.heard.Load(k)
	return ok
}

// recordObserved records that the collector receives changes of a kind.
func (g *currentKinds) recordObserved(k *api.Kind) {
	if !g.observesDeletions(k) {
		g.heard.Store(k, true)
	}
}

type drawn struct {
	of *client.Informed
	sources
}

// currentSources returns the current sources. A decision must use the result of a single call.
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
	g.heard.Range(func(k, _ any) bool {
		if kind := k.(*api.Kind); all[kind.GroupResource().String()].kind != kind {
			g.heard.Delete(k)
		}
		return true
	})
	return all
}

// isCollectable reports whether objects of a kind may be owners or dependents. Events are neither.
func isCollectable(k *api.Kind) bool { return k.Resource != "events" }

// byOwners indexes objects by the UIDs of their owners.
func byOwners(inf cache.SharedIndexInformer) {
	controllers.Index(inf, ownerIndex, func(o api.Object) []string {
		var uids []string
		for _, r := range o.GetOwnerReferences() {
			uids = append(uids, string(r.UID))
		}
		return uids
	})
}

// New returns the garbage collector of all stored kinds except Events.
func New(d controllers.Deps) *controllers.Controller {
	g := &currentKinds{kinds: client.Every(d.Informers, isCollectable, byOwners)}
	return &controllers.Controller{
		Name:    "generic-garbage-collector",
		Workers: 48,
		Dynamic: &controllers.DynamicWatch{Current: g.kinds.Now, Keys: func(k *api.Kind, c controllers.Change[api.Object]) []controllers.Key {
			g.recordObserved(k)
			return g.currentSources().affectedKeys(k.GroupResource().String(), c)
		}},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{"*"}, Resources: []string{"*"}, Verbs: []string{"delete", "get", "list", "patch", "update", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create", "patch", "update"}},
		},
		Lead: func(t *controllers.Term) controllers.Reconcile {
			c := &collector{term: t, living: g, absent: map[coordinates]bool{}, strangers: map[controllers.Key]time.Duration{},
				reported: map[foreignOwner]bool{}}
			if d.Aggregated != nil {
				c.aggregated = newAggregated(d.Aggregated)
				t.Enqueue(scanKey)
			}
			return c.reconcileObject
		},
	}
}

func objectKey(name string, o metav1.Object) controllers.Key {
	return controllers.Key{Kind: name, Namespace: o.GetNamespace(), Name: o.GetName()}
}

// affectedKeys maps a change to the keys of the objects that may have to be deleted because of it.
// These are the object itself, the dependents of a deleted object, and owners that wait for the
// object.
func (all sources) affectedKeys(name string, c controllers.Change[api.Object]) []controllers.Key {
	var out []controllers.Key
	switch {
	case c.Type == controllers.Deleted:
		out = all.waitingOwners(c.New)
		for depName, deps := range all.cachedDependents(c.New.GetUID()) {
			for _, d := range deps {
				out = append(out, objectKey(depName, d))
			}
		}
		return out
	case c.Type == controllers.Updated && c.Old != nil && !isRelevantUpdate(c.Old, c.New):
		return nil
	case c.Type == controllers.Updated && c.Old != nil:
		out = all.waitingOwners(c.Old)
	}
	if len(c.New.GetOwnerReferences()) > 0 || c.New.GetDeletionTimestamp() != nil && len(c.New.GetFinalizers()) > 0 {
		out = append(out, objectKey(name, c.New))
	}
	return out
}

// isRelevantUpdate reports whether an update can change a verdict.
func isRelevantUpdate(a, b api.Object) bool {
	return a == b || a.GetUID() != b.GetUID() ||
		(a.GetDeletionTimestamp() == nil) != (b.GetDeletionTimestamp() == nil) ||
		!slices.Equal(a.GetFinalizers(), b.GetFinalizers()) ||
		!equality.Semantic.DeepEqual(a.GetOwnerReferences(), b.GetOwnerReferences())
}

// waitingOwners returns the keys of the cached owners that are in foreground deletion.
func (all sources) waitingOwners(o api.Object) []controllers.Key {
	var out []controllers.Key
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
		if list := controllers.CachedBy[api.Object](s.informer, ownerIndex, string(uid)); len(list) > 0 {
			out[name] = list
		}
	}
	return out
}

// findSource returns the kind of an owner reference, regardless of its version.
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

// cachedOwner returns the owner of r if the cache holds it with the UID of r.
func (s source) cachedOwner(namespace string, r metav1.OwnerReference) (api.Object, bool) {
	if !s.kind.Namespaced {
		namespace = ""
	}
	if s.informer == nil {
		return nil, false
	}
	o, ok := controllers.Cached[api.Object](s.informer, namespace, r.Name)
	if !ok || o.GetUID() != r.UID {
		return nil, false
	}
	return o, true
}

// collector performs the writes of one leadership.
type collector struct {
	term   *controllers.Term
	living *currentKinds

	mu     sync.Mutex
	absent map[coordinates]bool // owners verified to be absent; a UID is never reused
	// strangers holds the last recheck delay of objects that have an owner of an unknown kind, or
	// an owner that may be deleted unobserved.
	strangers map[controllers.Key]time.Duration
	reported  map[foreignOwner]bool // references for which an Event was recorded

	aggregated *aggregated // nil means that the cluster has no aggregated API
}

// coordinates identify an owner as a reference does. The UID alone is not sufficient: a reference
// with the UID of an object under another name refers to nothing, and its absence says nothing
// about that object.
type coordinates struct {
	kind            schema.GroupResource
	namespace, name string
	uid             types.UID
}

// maxAbsent is the maximum number of entries of collector.absent, strangers and reported.
const maxAbsent = 10000

func (c *collector) reconcileObject(ctx context.Context, k controllers.Key) (time.Duration, error) {
	all := c.living.currentSources()
	if k == scanKey {
		c.scanAggregated(ctx, all)
		return scanInterval, nil
	}
	s, ok := all[k.Kind]
	if !ok || s.informer == nil {
		return 0, nil
	}
	obj, ok := controllers.Cached[api.Object](s.informer, k.Namespace, k.Name)
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
		return 0, c.deleteJudged(ctx, s, obj, v.Delete)
	case len(v.Detach) > 0:
		return again, c.removeReferences(ctx, s, obj, v.Detach...)
	}
	return again, nil
}

// hasDependents reports whether the caches or the last lists of aggregated APIs hold an object that
// names obj as an owner.
func (c *collector) hasDependents(all sources, obj api.Object) bool {
	return len(all.cachedDependents(obj.GetUID())) > 0 || len(c.aggregated.listDependents(obj.GetUID())) > 0
}

// recheckDelay returns when to judge an object again that has an owner that may be deleted
// unobserved. It returns 0 for other objects.
func (c *collector) recheckDelay(k controllers.Key, unseen bool) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !unseen {
		delete(c.strangers, k)
		return 0
	}
	if len(c.strangers) >= maxAbsent {
		clear(c.strangers)
	}
	c.strangers[k] = min(max(2*c.strangers[k], minStrangerRetry), maxStrangerRetry)
	return c.strangers[k]
}

// isHeldFromOutside reports whether an owner outside of obj's circle holds it. It returns an error
// if the server of an owner on the way does not respond: obj could lose the reference to its last
// outer owner, and the circle would stay. If obj is in a circle, every owner on the way is read
// from the API. Otherwise two members that lose their outer owners at the same time could each rely
// on the stale cached owner of the other, and the circle would stay forever.
func (c *collector) isHeldFromOutside(ctx context.Context, all sources, s source, obj api.Object) (bool, error) {
	for _, live := range []bool{false, true} {
		kinds := map[types.UID]source{obj.GetUID(): s}
		held, circular, err := Held(obj, func(o api.Object) ([]Owner, error) {
			owners, _, err := c.resolveOwners(ctx, all, kinds[o.GetUID()], o, live)
			for _, owner := range owners {
				if owner.Unanswered {
					return nil, controllers.RaceError("the server of owner %s %s does not answer", owner.Ref.Kind, owner.Ref.Name)
				}
				if owner.Object == nil {
					continue
				}
				kind, ok := all.findSource(owner.Ref)
				if !ok {
					if kind, ok = c.aggregated.ownerSource(ctx, owner.Ref); !ok {
						return nil, controllers.RaceError("discovery no longer contains %s %s", owner.Ref.APIVersion, owner.Ref.Kind)
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

// resolveOwners returns the state of every owner of obj. It uses the cache first unless live is
// true. An owner counts as absent only if the API confirms it. unseen reports that a kind is
// unknown, or that an existing owner may be deleted unobserved.
func (c *collector) resolveOwners(ctx context.Context, all sources, s source, obj api.Object, live bool) (out []Owner, unseen bool, err error) {
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
		follows := c.living.observesDeletions(o.kind) // before the cache is read
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

// lookUp reads an owner from the API. It returns nil if the owner does not exist.
func (c *collector) lookUp(ctx context.Context, o source, namespace string, r metav1.OwnerReference) (api.Object, error) {
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

// deleteJudged deletes exactly the version that was judged.
func (c *collector) deleteJudged(ctx context.Context, s source, obj api.Object, policy metav1.DeletionPropagation) error {
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

// updateJudged writes a changed copy of the version that was judged.
func (c *collector) updateJudged(ctx context.Context, s source, obj api.Object, change func(o api.Object)) error {
	whole, err := s.kind.Whole(obj)
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

// removeReferences removes exactly these references. Two references may have the same UID, and one
// of them may be wrong.
func (c *collector) removeReferences(ctx context.Context, s source, obj api.Object, lost ...metav1.OwnerReference) error {
	kept := slices.DeleteFunc(slices.Clone(obj.GetOwnerReferences()), func(r metav1.OwnerReference) bool {
		return slices.ContainsFunc(lost, func(l metav1.OwnerReference) bool {
			return r.APIVersion == l.APIVersion && r.Kind == l.Kind && r.Name == l.Name && r.UID == l.UID
		})
	})
	if s.aggregated != nil {
		return c.patchAggregated(ctx, s, obj, map[string]any{"ownerReferences": kept})
	}
	return c.updateJudged(ctx, s, obj, func(o api.Object) { o.SetOwnerReferences(kept) })
}

// orphanDependents removes the references of an owner's dependents, then the owner's finalizer. The
// dependents are listed from the API: a dependent that is not cached yet would be deleted later.
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
	return c.updateJudged(ctx, s, owner, func(o api.Object) {
		o.SetFinalizers(withoutString(o.GetFinalizers(), metav1.FinalizerOrphanDependents))
	})
}

func (c *collector) orphanKind(ctx context.Context, dep source, owner api.Object) error {
	objs, err := c.term.Client.ListKind(ctx, dep.kind, owner.GetNamespace())
	if c.term.Client.Dropped(dep.kind, err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("listing %s to orphan the dependents of %s/%s: %w", dep.kind.Resource, owner.GetNamespace(), owner.GetName(), err)
	}
	mine := objs[:0:0]
	for _, o := range objs {
		if ownedBy(o, owner.GetUID()) {
			mine = append(mine, o)
		}
	}
	return controllers.InParallel(ctx, len(mine), func(ctx context.Context, i int) error {
		return c.updateJudged(ctx, dep, mine[i], func(o api.Object) {
			o.SetOwnerReferences(controllers.WithoutOwners(o.GetOwnerReferences(), owner.GetUID()))
		})
	})
}
