package garbagecollector

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// scanInterval is the time between two lists of all objects of aggregated APIs. The lists replace
// informers, which these APIs do not have.
const scanInterval = 30 * time.Second

// Limits of time and memory for the lists of all resources of one group version. They prevent that
// one API server delays the lists of other API servers or uses up their memory.
const (
	listTime  = 20 * time.Second
	listBytes = 32 << 20
)

// scanKey is the key in the collector's queue that lists the objects of aggregated APIs.
var scanKey = engine.Key{Kind: "keelson.aggregated-apis"}

// aggregatedObjects holds the collectable kinds of aggregated API servers and the objects that the
// most recent lists of these kinds returned. A nil *aggregatedObjects has no objects.
type aggregatedObjects struct {
	apis engine.AggregatedAPIs

	lists chan struct{} // semaphore of capacity one, held while objects are listed
	began time.Time     // time at which the most recent lists were started; guarded by lists

	mu    sync.Mutex
	kinds map[schema.GroupResource]*aggregatedKind
	owned map[types.UID][]dependent // the objects of all kinds, by the UIDs of their owners
}

func newAggregated(apis engine.AggregatedAPIs) *aggregatedObjects {
	return &aggregatedObjects{apis: apis, lists: make(chan struct{}, 1),
		kinds: map[schema.GroupResource]*aggregatedKind{}}
}

// aggregatedKind is a resource of an aggregated API that supports list and delete, and the objects
// of its last successful list.
type aggregatedKind struct {
	source
	objects map[types.UID]api.Object
	err     error // error of the last list; nil means that objects is complete
}

func sourceOf(r engine.AggregatedResource) source {
	return source{aggregated: &r, kind: &api.Kind{Resource: r.Resource, Namespaced: r.Namespaced,
		GVK: r.GroupVersionResource.GroupVersion().WithKind(r.Kind)}}
}

// listDependents returns the objects in the most recent lists of the aggregated APIs that have uid
// as an owner.
func (a *aggregatedObjects) listDependents(uid types.UID) []dependent {
	if a == nil {
		return nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.owned[uid]
}

// findListed returns the owner that r names, from the last list of resource gr. It returns nil if
// that list failed or has no object with the name and UID of r.
func (a *aggregatedObjects) findListed(r metav1.OwnerReference, gr schema.GroupResource) api.Object {
	a.mu.Lock()
	defer a.mu.Unlock()
	if k := a.kinds[gr]; k != nil && k.err == nil && k.objects[r.UID] != nil && k.objects[r.UID].GetName() == r.Name {
		return k.objects[r.UID]
	}
	return nil
}

// listAll returns all kinds of aggregated APIs with their objects, from lists that were started
// after the call of listAll. Concurrent calls share the lists. listAll also queues the dependents
// of objects that have disappeared from the lists.
func (c *collector) listAll(ctx context.Context, all sources) ([]*aggregatedKind, error) {
	a := c.aggregated
	if a == nil {
		return nil, nil
	}
	called := time.Now()
	select {
	case a.lists <- struct{}{}:
		defer func() { <-a.lists }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if !a.began.After(called) {
		began := time.Now()
		for _, uid := range a.refreshLists(ctx) {
			c.enqueueDependents(all, uid)
		}
		a.began = began
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Collect(maps.Values(a.kinds)), ctx.Err()
}

// refreshLists lists all collectable resources that discovery returns, and replaces the stored
// lists. It returns the UIDs of objects that no longer exist. If a server does not respond, its
// kinds keep the objects of their last successful list.
func (a *aggregatedObjects) refreshLists(ctx context.Context) (gone []types.UID) {
	found, unknown := a.apis.Discover(ctx)
	fresh := map[schema.GroupResource]*aggregatedKind{}
	servers := map[schema.GroupVersion][]*aggregatedKind{}
	for _, r := range found {
		gr := r.GroupVersionResource.GroupResource()
		if fresh[gr] != nil || !r.Supports("list", "delete") {
			continue
		}
		k := &aggregatedKind{source: sourceOf(r), objects: map[types.UID]api.Object{}}
		fresh[gr] = k
		gv := r.GroupVersionResource.GroupVersion()
		servers[gv] = append(servers[gv], k)
	}
	lists := slices.Collect(maps.Values(servers))
	_ = engine.InParallel(ctx, len(lists), func(ctx context.Context, i int) error {
		a.listKinds(ctx, lists[i])
		return nil
	})
	a.mu.Lock()
	defer a.mu.Unlock()
	for gr, old := range a.kinds {
		now := fresh[gr]
		switch err := unknown[old.kind.GVK.GroupVersion()]; {
		case now == nil && err != nil:
			fresh[gr] = &aggregatedKind{source: old.source, objects: old.objects, err: err}
		case now != nil && now.err != nil:
			now.objects = old.objects
		case now != nil:
			for uid := range old.objects {
				if now.objects[uid] == nil {
					gone = append(gone, uid)
				}
			}
		}
	}
	a.kinds, a.owned = fresh, map[types.UID][]dependent{}
	for _, k := range fresh {
		for _, o := range k.objects {
			d := dependent{Object: o, kind: k.kind, aggregated: true}
			for _, r := range o.GetOwnerReferences() {
				if list := a.owned[r.UID]; len(list) == 0 || list[len(list)-1].Object != o {
					a.owned[r.UID] = append(list, d)
				}
			}
		}
	}
	return gone
}

// listKinds lists the objects of kinds, which belong to one group version, and stores the objects
// or the error in each kind.
func (a *aggregatedObjects) listKinds(ctx context.Context, kinds []*aggregatedKind) {
	ctx, cancel := context.WithTimeout(ctx, listTime)
	defer cancel()
	left := listBytes
	for _, k := range kinds {
		var objs []api.Object
		var used int
		if objs, used, k.err = engine.ListAggregated(ctx, a.apis, *k.aggregated, "", left); k.err != nil {
			continue
		}
		left -= used
		for _, o := range objs {
			if o.GetUID() != "" {
				k.objects[o.GetUID()] = o
			}
		}
	}
}

// scanAggregated lists the objects of aggregated APIs and collects them like other objects. It also
// queues the dependents of objects that no longer exist.
func (c *collector) scanAggregated(ctx context.Context, all sources) {
	kinds, err := c.listAll(ctx, all)
	if err != nil {
		return // the term of leadership has ended
	}
	for _, k := range kinds {
		if k.err != nil {
			c.term.Log.Warn("the objects of an aggregated API cannot be listed: they are not collected",
				"resource", k.kind.GroupResource().String(), "err", k.err)
			continue
		}
		for _, o := range k.objects {
			if ctx.Err() != nil {
				return
			}
			if err := c.reconcileAggregated(ctx, all, k.source, o); err != nil {
				c.term.Log.Warn("collecting an object of an aggregated API failed", "resource",
					k.kind.GroupResource().String(),
					"object", o.GetNamespace()+"/"+o.GetName(), "err", err)
			}
		}
	}
}

func (c *collector) enqueueDependents(all sources, uid types.UID) {
	for name, deps := range all.cachedDependents(uid) {
		for _, d := range deps {
			c.term.Enqueue(objectKey(name, d))
		}
	}
}

// reconcileAggregated deletes an object of an aggregated API if its owners no longer exist, removes
// its references to absent owners, or advances its deletion. It does the same as reconcileObject.
func (c *collector) reconcileAggregated(ctx context.Context, all sources, s source, obj api.Object) error {
	if obj.GetDeletionTimestamp() != nil {
		switch {
		case slices.Contains(obj.GetFinalizers(), metav1.FinalizerOrphanDependents):
			return c.orphanDependents(ctx, all, s, obj)
		case slices.Contains(obj.GetFinalizers(), metav1.FinalizerDeleteDependents):
			return c.processForegroundDeletion(ctx, all, s, obj)
		}
		return nil
	}
	if len(obj.GetOwnerReferences()) == 0 {
		return nil
	}
	owners, _, err := c.resolveOwners(ctx, all, s, obj, false)
	if err != nil {
		return err
	}
	held := true
	if lostSome(owners) {
		if held, err = c.isHeldFromOutside(ctx, all, s, obj); err != nil {
			return err
		}
	}
	switch v := Judge(obj, owners, held, func() bool { return c.hasDependents(all, obj) }); {
	case v.Delete != "":
		return c.deleteGarbage(ctx, s, obj, v.Delete)
	case len(v.Detach) > 0:
		return c.removeReferences(ctx, s, obj, v.Detach...)
	}
	return nil
}

// resolveOwner returns the state of owner r of obj, and the owner if it exists. The kind of r is
// not stored by this API server. The state is Absent only if the owner's server has returned 404 or
// an object with another UID, and discovery still contains the resource afterwards. After any other
// failure the state is Solid. If cached is true, an owner that the last list contains is not read
// from its server.
func (a *aggregatedObjects) resolveOwner(
	ctx context.Context, s source, obj api.Object, r metav1.OwnerReference, cached bool,
) Owner {
	unanswered := Owner{Ref: r, State: Solid, Unanswered: true}
	res, ok, stale := a.findResource(ctx, r)
	if !ok || res.Namespaced && !s.kind.Namespaced || !res.Supports("get") {
		return Owner{Ref: r, State: Solid, Unanswered: stale}
	}
	namespace := obj.GetNamespace()
	if !res.Namespaced {
		namespace = ""
	}
	if o := a.findListed(r, res.GroupVersionResource.GroupResource()); cached && o != nil &&
		o.GetNamespace() == namespace {
		return Owner{Ref: r, State: stateOf(o), Object: o}
	}
	body, err := a.apis.Call(ctx, http.MethodGet, res.Path(namespace, r.Name), nil, nil)
	if err == nil {
		owner := &metav1.PartialObjectMetadata{}
		if json.Unmarshal(body, owner) != nil || owner.UID == "" || owner.Name != r.Name ||
			owner.Namespace != namespace {
			return unanswered
		}
		if owner.UID == r.UID {
			return Owner{Ref: r, State: stateOf(owner), Object: owner}
		}
		return Owner{Ref: r, State: Absent}
	}
	if !apierrors.IsNotFound(err) {
		return unanswered
	}
	if again, ok, _ := a.findResource(ctx, r); !ok || again.GroupVersionResource != res.GroupVersionResource {
		return unanswered
	}
	return Owner{Ref: r, State: Absent}
}

// ownerSource returns the kind of owner reference r as discovery of the aggregated APIs returns it.
// It returns false if discovery does not contain the kind.
func (a *aggregatedObjects) ownerSource(ctx context.Context, r metav1.OwnerReference) (source, bool) {
	if a == nil {
		return source{}, false
	}
	res, ok, _ := a.findResource(ctx, r)
	if !ok {
		return source{}, false
	}
	return sourceOf(res), true
}

// findResource returns the resource of owner reference r from discovery of the aggregated APIs. If
// ok is false, stale reports that a server of the reference's group does not respond.
func (a *aggregatedObjects) findResource(ctx context.Context, r metav1.OwnerReference) (
	res engine.AggregatedResource, ok, stale bool,
) {
	gv, err := schema.ParseGroupVersion(r.APIVersion)
	if err != nil {
		return res, false, false
	}
	found, unknown := a.apis.Discover(ctx)
	for _, f := range found {
		if f.GroupVersionResource.Group == gv.Group && f.Kind == r.Kind {
			return f, true, false
		}
	}
	for u := range unknown {
		stale = stale || u.Group == gv.Group
	}
	return res, false, stale
}

// orphanAggregated removes the references to owner from all objects of aggregated APIs. It returns
// an error if the objects of a resource cannot be listed: they would otherwise be deleted once
// owner no longer exists.
func (c *collector) orphanAggregated(ctx context.Context, all sources, s source, owner api.Object) error {
	kinds, err := c.listAll(ctx, all)
	errs := []error{err}
	for _, k := range kinds {
		if s.kind.Namespaced && !k.kind.Namespaced {
			continue
		}
		if k.err != nil {
			errs = append(errs, fmt.Errorf("listing %s to orphan the dependents of %s/%s: %w",
				k.kind.GroupResource(), owner.GetNamespace(), owner.GetName(), k.err))
			continue
		}
		for _, o := range k.objects {
			if ownedBy(o, owner.GetUID()) {
				kept := engine.WithoutOwners(o.GetOwnerReferences(), owner.GetUID())
				errs = append(errs, c.patchAggregated(ctx, k.source, o, map[string]any{"ownerReferences": kept}))
			}
		}
	}
	return errors.Join(errs...)
}

func (c *collector) removeFinalizer(ctx context.Context, s source, obj api.Object, finalizer string) error {
	return c.patchAggregated(ctx, s, obj, map[string]any{"finalizers": withoutString(obj.GetFinalizers(), finalizer)})
}

// patchAggregated merges metadata into that of obj. The patch fails if the stored object has
// another UID or resourceVersion than obj.
func (c *collector) patchAggregated(ctx context.Context, s source, obj api.Object, metadata map[string]any) error {
	metadata["uid"], metadata["resourceVersion"] = obj.GetUID(), obj.GetResourceVersion()
	return c.callAggregated(ctx, http.MethodPatch, s, obj, map[string]any{"metadata": metadata})
}

// deleteAggregated deletes obj. The deletion fails if the stored object has another UID or
// resourceVersion than obj.
func (c *collector) deleteAggregated(
	ctx context.Context, s source, obj api.Object, policy metav1.DeletionPropagation,
) error {
	uid, rv := obj.GetUID(), obj.GetResourceVersion()
	return c.callAggregated(ctx, http.MethodDelete, s, obj, metav1.DeleteOptions{
		TypeMeta:          metav1.TypeMeta{APIVersion: "v1", Kind: "DeleteOptions"},
		Preconditions:     &metav1.Preconditions{UID: &uid, ResourceVersion: &rv},
		PropagationPolicy: &policy,
	})
}

// callAggregated confirms the leadership, and then sends a request that changes or deletes obj to
// its API server. A NotFound response is not an error.
func (c *collector) callAggregated(ctx context.Context, method string, s source, obj api.Object, body any) error {
	text, err := json.Marshal(body)
	if err != nil {
		return err
	}
	if err := c.term.ConfirmLeadership(ctx); err != nil {
		return err
	}
	_, err = c.aggregated.apis.Call(ctx, method, s.aggregated.Path(obj.GetNamespace(), obj.GetName()), nil, text)
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("%s of %s %s/%s: %w", method, s.kind.GroupResource(), obj.GetNamespace(), obj.GetName(), err)
	}
	return nil
}
