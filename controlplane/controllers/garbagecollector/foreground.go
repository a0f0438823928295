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
	cached := newBlockers(s.kind, owner, func(uid types.UID) []dependent {
		return append(all.dependentsOf(uid), c.aggregated.dependents(uid)...)
	})
	if !MayGo(owner, cached.of) {
		if cached.aggregated {
			return controllers.Race("%s %s/%s still has dependents in an aggregated API",
				s.kind.GVK.Kind, owner.GetNamespace(), owner.GetName())
		}
		return nil // each dependent that goes brings us back here
	}
	if s.aggregated == nil {
		if _, err := c.listAll(ctx, all); err != nil {
			return err
		}
	}
	stored, err := c.stored(ctx, all, s, owner)
	if err != nil {
		return err
	}
	live := newBlockers(s.kind, owner, func(uid types.UID) []dependent {
		return append(slices.Clone(stored[uid]), c.aggregated.dependents(uid)...)
	})
	if !MayGo(owner, live.of) {
		return controllers.Race("%s %s/%s still has dependents", s.kind.GVK.Kind, owner.GetNamespace(), owner.GetName())
	}
	if s.aggregated != nil {
		return c.removeFinalizer(ctx, s, owner, metav1.FinalizerDeleteDependents)
	}
	return c.update(ctx, s, owner, func(o api.Object) {
		o.SetFinalizers(without(o.GetFinalizers(), metav1.FinalizerDeleteDependents))
	})
}

// dependent is an object that names an owner.
type dependent struct {
	api.Object
	kind       *api.Kind
	aggregated bool // a server in the cluster stores the object
}

// blockers finds, for MayGo, the objects that hold up the deletion of an object, starting with an owner.
type blockers struct {
	dependents func(owner types.UID) []dependent
	kinds      map[types.UID]*api.Kind // of the owner and of all objects found
	aggregated bool                    // an object of an aggregated API was found
}

func newBlockers(kind *api.Kind, owner api.Object, dependents func(uid types.UID) []dependent) *blockers {
	return &blockers{dependents: dependents, kinds: map[types.UID]*api.Kind{owner.GetUID(): kind}}
}

// of returns the objects that hold up the deletion of o, which is the owner or was returned before.
func (b *blockers) of(o api.Object) (out []api.Object) {
	for _, d := range b.dependents(o.GetUID()) {
		if holdsUp(d.Object, o, b.kinds[o.GetUID()]) {
			b.kinds[d.GetUID()] = d.kind
			b.aggregated = b.aggregated || d.aggregated
			out = append(out, d.Object)
		}
	}
	return out
}

// dependentsOf returns the cached objects that name uid as an owner.
func (all sources) dependentsOf(uid types.UID) (out []dependent) {
	for name, deps := range all.dependents(uid) {
		for _, d := range deps {
			out = append(out, dependent{Object: d, kind: all[name].kind})
		}
	}
	return out
}

// storedObjects are all stored objects that name an owner, by that owner's UID.
type storedObjects map[types.UID][]dependent

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
				out[r.UID] = append(out[r.UID], dependent{Object: o, kind: deps[i].kind})
			}
		}
		return nil
	})
}
