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
	"keelson.dev/keelson/controlplane/controllers"
)

// scanInterval is the time between two lists of the objects of aggregated APIs, which have no informers.
const scanInterval = 30 * time.Second

// scanKey is the key of the scan of aggregated APIs.
var scanKey = controllers.Key{Kind: "keelson.aggregated-apis"}

// aggregated is the collector's view of aggregated APIs. A nil *aggregated has no objects.
type aggregated struct {
	apis controllers.AggregatedAPIs

	lists sync.Mutex // held while the objects are listed
	began time.Time  // of the last lists

	mu    sync.Mutex
	kinds map[schema.GroupResource]*aggregatedKind
}

// aggregatedKind is a resource with the verbs list and delete, and the objects of its last successful list.
type aggregatedKind struct {
	source
	objects map[types.UID]api.Object
	err     error // of the last list; nil = the objects are complete
}

func sourceOf(r controllers.AggregatedResource) source {
	return source{aggregated: &r, kind: &api.Kind{Resource: r.Resource, Namespaced: r.Namespaced,
		GVK: r.GroupVersionResource.GroupVersion().WithKind(r.Kind)}}
}

// dependents returns the objects of the last lists that name uid as an owner.
func (a *aggregated) dependents(uid types.UID) (out []api.Object) {
	if a == nil {
		return nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, k := range a.kinds {
		for _, o := range k.objects {
			if ownedBy(o, uid) {
				out = append(out, o)
			}
		}
	}
	return out
}

// listAll returns all kinds with lists that began after the call, and has the dependents of objects that no longer exist
// judged. Concurrent callers share the lists.
func (c *collector) listAll(ctx context.Context, all sources) []*aggregatedKind {
	a := c.aggregated
	if a == nil {
		return nil
	}
	called := time.Now()
	a.lists.Lock()
	defer a.lists.Unlock()
	if !a.began.After(called) {
		began := time.Now()
		for _, uid := range a.refresh(ctx) {
			c.enqueueDependents(all, uid)
		}
		a.began = began
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Collect(maps.Values(a.kinds))
}

// refresh lists the resources that discovery shows, and returns the UIDs of objects that no longer exist. A kind whose
// server does not answer keeps the objects of its last list.
func (a *aggregated) refresh(ctx context.Context) (gone []types.UID) {
	found, unknown := a.apis.Discover(ctx)
	fresh := map[schema.GroupResource]*aggregatedKind{}
	for _, r := range found {
		gr := r.GroupVersionResource.GroupResource()
		if fresh[gr] != nil || !r.Supports("list", "delete") {
			continue
		}
		k := &aggregatedKind{source: sourceOf(r), objects: map[types.UID]api.Object{}}
		var objs []api.Object
		if objs, k.err = controllers.ListAggregated(ctx, a.apis, r, ""); k.err == nil {
			for _, o := range objs {
				if o.GetUID() != "" {
					k.objects[o.GetUID()] = o
				}
			}
		}
		fresh[gr] = k
	}
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
	a.kinds = fresh
	return gone
}

// scanAggregated collects the objects of aggregated APIs, and has the dependents of those that are gone judged.
func (c *collector) scanAggregated(ctx context.Context, all sources) {
	for _, k := range c.listAll(ctx, all) {
		if k.err != nil {
			c.term.Log.Warn("the objects of an aggregated API are not known: none is collected",
				"resource", k.kind.GroupResource().String(), "err", k.err)
			continue
		}
		for _, o := range k.objects {
			if ctx.Err() != nil {
				return
			}
			if err := c.reconcileAggregated(ctx, all, k.source, o); err != nil {
				c.term.Log.Warn("collecting an object of an aggregated API", "resource", k.kind.GroupResource().String(),
					"object", o.GetNamespace()+"/"+o.GetName(), "err", err)
			}
		}
	}
}

func (c *collector) enqueueDependents(all sources, uid types.UID) {
	for name, deps := range all.dependents(uid) {
		for _, d := range deps {
			c.term.Enqueue(key(name, d))
		}
	}
}

// reconcileAggregated does to an object of an aggregated API what reconcile does to others.
func (c *collector) reconcileAggregated(ctx context.Context, all sources, s source, obj api.Object) error {
	if obj.GetDeletionTimestamp() != nil {
		switch {
		case slices.Contains(obj.GetFinalizers(), metav1.FinalizerOrphanDependents):
			return c.orphan(ctx, all, s, obj)
		case slices.Contains(obj.GetFinalizers(), metav1.FinalizerDeleteDependents):
			return c.foreground(ctx, all, s, obj)
		}
		return nil
	}
	if len(obj.GetOwnerReferences()) == 0 {
		return nil
	}
	owners, _, err := c.owners(ctx, all, s, obj, false)
	if err != nil {
		return err
	}
	// A circle through two APIs is not searched for: a solid owner holds the object.
	dependents := func() bool {
		return len(all.dependents(obj.GetUID())) > 0 || len(c.aggregated.dependents(obj.GetUID())) > 0
	}
	switch v := Judge(obj, owners, true, dependents); {
	case v.Delete != "":
		return c.delete(ctx, s, obj, v.Delete)
	case len(v.Detach) > 0:
		return c.detach(ctx, s, obj, v.Detach...)
	}
	return nil
}

// ownerState returns the state of an owner whose kind the API of this cluster does not store. It is Absent only after the
// owner's server has answered 404, or with another UID, and discovery shows after that answer that the server serves
// the resource. Every other failure is Solid.
func (a *aggregated) ownerState(ctx context.Context, s source, obj api.Object, r metav1.OwnerReference) OwnerState {
	res, ok := a.find(ctx, r)
	if !ok || res.Namespaced && !s.kind.Namespaced || !res.Supports("get") {
		return Solid
	}
	namespace := obj.GetNamespace()
	if !res.Namespaced {
		namespace = ""
	}
	body, err := a.apis.Call(ctx, http.MethodGet, res.Path(namespace, r.Name), nil, nil)
	if err == nil {
		var owner metav1.PartialObjectMetadata
		if json.Unmarshal(body, &owner) != nil || owner.UID == "" || owner.Name != r.Name {
			return Solid
		}
		if owner.UID == r.UID {
			return stateOf(&owner)
		}
		return Absent
	}
	if !apierrors.IsNotFound(err) {
		return Solid
	}
	if again, ok := a.find(ctx, r); !ok || again.GroupVersionResource != res.GroupVersionResource {
		return Solid
	}
	return Absent
}

// find returns the resource of an owner reference that discovery shows.
func (a *aggregated) find(ctx context.Context, r metav1.OwnerReference) (controllers.AggregatedResource, bool) {
	gv, err := schema.ParseGroupVersion(r.APIVersion)
	if err != nil {
		return controllers.AggregatedResource{}, false
	}
	found, _ := a.apis.Discover(ctx)
	i := slices.IndexFunc(found, func(f controllers.AggregatedResource) bool {
		return f.GroupVersionResource.Group == gv.Group && f.Kind == r.Kind
	})
	if i < 0 {
		return controllers.AggregatedResource{}, false
	}
	return found[i], true
}

// orphanAggregated removes the references to owner from the objects of aggregated APIs. A known resource whose server does
// not answer is an error: its objects would be collected once the owner is gone.
func (c *collector) orphanAggregated(ctx context.Context, all sources, s source, owner api.Object) error {
	var errs []error
	for _, k := range c.listAll(ctx, all) {
		if s.kind.Namespaced && !k.kind.Namespaced {
			continue
		}
		if k.err != nil {
			errs = append(errs, fmt.Errorf("%s to orphan those of %s/%s: %w",
				k.kind.GroupResource(), owner.GetNamespace(), owner.GetName(), k.err))
			continue
		}
		for _, o := range k.objects {
			if ownedBy(o, owner.GetUID()) {
				kept := controllers.WithoutOwners(o.GetOwnerReferences(), owner.GetUID())
				errs = append(errs, c.patchAggregated(ctx, k.source, o, map[string]any{"ownerReferences": kept}))
			}
		}
	}
	return errors.Join(errs...)
}

func (c *collector) removeFinalizer(ctx context.Context, s source, obj api.Object, finalizer string) error {
	return c.patchAggregated(ctx, s, obj, map[string]any{"finalizers": without(obj.GetFinalizers(), finalizer)})
}

// patchAggregated changes the metadata of exactly the version that was judged.
func (c *collector) patchAggregated(ctx context.Context, s source, obj api.Object, metadata map[string]any) error {
	metadata["uid"], metadata["resourceVersion"] = obj.GetUID(), obj.GetResourceVersion()
	return c.callAggregated(ctx, http.MethodPatch, s, obj, map[string]any{"metadata": metadata})
}

// deleteAggregated deletes exactly the version that was judged.
func (c *collector) deleteAggregated(ctx context.Context, s source, obj api.Object, policy metav1.DeletionPropagation) error {
	uid, rv := obj.GetUID(), obj.GetResourceVersion()
	return c.callAggregated(ctx, http.MethodDelete, s, obj, metav1.DeleteOptions{
		TypeMeta:          metav1.TypeMeta{APIVersion: "v1", Kind: "DeleteOptions"},
		Preconditions:     &metav1.Preconditions{UID: &uid, ResourceVersion: &rv},
		PropagationPolicy: &policy,
	})
}

// callAggregated changes an object after it has confirmed the leadership.
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
