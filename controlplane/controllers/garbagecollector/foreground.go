package garbagecollector

import (
	"context"
	"fmt"
	"slices"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/controllers"
)

// foreground has the dependents of an owner that waits for them judged, and lets it go when none holds it up.
// The API is asked before that: a dependent that the caches have not seen yet would outlive its owner.
func (c *collector) foreground(ctx context.Context, all sources, s source, owner api.Object) error {
	for name, deps := range all.dependents(owner.GetUID()) {
		for _, d := range deps {
			// One that is being deleted comes back by itself when something about it changes. To ask
			// for it again would send the members of a circle round for ever.
			if d.GetDeletionTimestamp() == nil {
				c.term.Enqueue(key(name, d))
			}
		}
	}
	if !MayGo(owner, all.holdingUp(s, owner)) {
		return nil // each dependent that goes brings us back here
	}
	if c.isHeldByAggregated(owner, s.kind) {
		return controllers.Race("%s %s/%s still has dependents in an aggregated API",
			s.kind.GVK.Kind, owner.GetNamespace(), owner.GetName())
	}
	if s.aggregated == nil && c.listAll(ctx, all) != nil && c.isHeldByAggregated(owner, s.kind) {
		return controllers.Race("%s %s/%s has new dependents in an aggregated API",
			s.kind.GVK.Kind, owner.GetNamespace(), owner.GetName())
	}
	stored, err := c.stored(ctx, all, s, owner)
	if err != nil {
		return err
	}
	if !MayGo(owner, stored.holdingUp(s, owner)) {
		return controllers.Race("%s %s/%s still has dependents", s.kind.GVK.Kind, owner.GetNamespace(), owner.GetName())
	}
	if s.aggregated != nil {
		return c.removeFinalizer(ctx, s, owner, metav1.FinalizerDeleteDependents)
	}
	return c.update(ctx, s, owner, func(o api.Object) {
		o.SetFinalizers(without(o.GetFinalizers(), metav1.FinalizerDeleteDependents))
	})
}

// isHeldByAggregated reports whether an object in the last lists of aggregated APIs holds up the deletion of owner.
func (c *collector) isHeldByAggregated(owner api.Object, k *api.Kind) bool {
	return slices.ContainsFunc(c.aggregated.dependents(owner.GetUID()), func(d api.Object) bool { return holdsUp(d, owner, k) })
}

// holdingUp returns the objects that hold up the deletion of one, beginning with owner, for MayGo.
func (all sources) holdingUp(s source, owner api.Object) func(o api.Object) []api.Object {
	kinds := map[types.UID]*api.Kind{owner.GetUID(): s.kind}
	return func(o api.Object) (out []api.Object) {
		for name, deps := range all.dependents(o.GetUID()) {
			for _, d := range deps {
				if holdsUp(d, o, kinds[o.GetUID()]) {
					kinds[d.GetUID()] = all[name].kind
					out = append(out, d)
				}
			}
		}
		return out
	}
}

// storedObjects are all objects that name an owner, by that owner's UID, as the store has them.
type storedObjects map[types.UID][]storedObject

type storedObject struct {
	api.Object
	kind *api.Kind
}

// stored lists what may depend on owner, directly or not.
func (c *collector) stored(ctx context.Context, all sources, s source, owner api.Object) (storedObjects, error) {
	var deps []source
	for _, dep := range all {
		if dep.kind.Namespaced || !s.kind.Namespaced {
			deps = append(deps, dep)
		}
	}
	out := storedObjects{}
	var mu sync.Mutex
	return out, controllers.InParallel(ctx, len(deps), func(ctx context.Context, i int) error {
		objs, err := c.term.Client.ListKind(ctx, deps[i].kind, owner.GetNamespace())
		if c.term.Client.Dropped(deps[i].kind, err) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("listing %s that may depend on %s/%s: %w", deps[i].kind.Resource, owner.GetNamespace(), owner.GetName(), err)
		}
		mu.Lock()
		defer mu.Unlock()
		for _, o := range objs {
			for _, r := range o.GetOwnerReferences() {
				out[r.UID] = append(out[r.UID], storedObject{Object: o, kind: deps[i].kind})
			}
		}
		return nil
	})
}

func (all storedObjects) holdingUp(s source, owner api.Object) func(o api.Object) []api.Object {
	kinds := map[types.UID]*api.Kind{owner.GetUID(): s.kind}
	return func(o api.Object) (out []api.Object) {
		for _, d := range all[o.GetUID()] {
			if holdsUp(d.Object, o, kinds[o.GetUID()]) {
				kinds[d.GetUID()] = d.kind
				out = append(out, d.Object)
			}
		}
		return out
	}
}
