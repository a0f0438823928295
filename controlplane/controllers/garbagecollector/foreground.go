package garbagecollector

import (
	"context"
	"fmt"
	"slices"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// processForegroundDeletion queues the dependents of owner, which is in foreground deletion. When
// no dependent blocks the deletion any longer, it removes the foreground finalizer of owner. Before
// that it lists the dependents from the API, because a dependent that is not cached yet would
// outlive owner.
func (c *collector) processForegroundDeletion(ctx context.Context, all sources, s source, owner api.Object) error {
	for name, deps := range all.cachedDependents(owner.GetUID()) {
		for _, d := range deps {
			// A dependent that is being deleted is queued when it changes. Queuing it here would
			// make the members of a circle queue each other forever.
			if d.GetDeletionTimestamp() == nil {
				c.term.Enqueue(objectKey(name, d))
			}
		}
	}
	cached := newBlockers(s.kind, owner, func(uid types.UID) []dependent {
		return append(all.dependentsOf(uid), c.aggregated.listDependents(uid)...)
	})
	if !MayGo(owner, cached.listBlockers) {
		if cached.aggregated {
			return engine.RaceError("%s %s/%s still has dependents in an aggregated API",
				s.kind.GVK.Kind, owner.GetNamespace(), owner.GetName())
		}
		return nil // the deletion of each dependent queues the owner again
	}
	if s.aggregated == nil {
		if _, err := c.listAll(ctx, all); err != nil {
			return err
		}
	}
	stored, err := c.listStored(ctx, all, s, owner)
	if err != nil {
		return err
	}
	live := newBlockers(s.kind, owner, func(uid types.UID) []dependent {
		return append(slices.Clone(stored[uid]), c.aggregated.listDependents(uid)...)
	})
	if !MayGo(owner, live.listBlockers) {
		return engine.RaceError("%s %s/%s still has dependents", s.kind.GVK.Kind, owner.GetNamespace(), owner.GetName())
	}
	if s.aggregated != nil {
		return c.removeFinalizer(ctx, s, owner, metav1.FinalizerDeleteDependents)
	}
	return c.updateUnchanged(ctx, s, owner, func(o api.Object) {
		o.SetFinalizers(withoutString(o.GetFinalizers(), metav1.FinalizerDeleteDependents))
	})
}

// dependent is an object with an owner reference to another object.
type dependent struct {
	api.Object
	kind       *api.Kind
	aggregated bool // stored by an aggregated API server
}

// blockers finds, for MayGo, the objects that block a foreground deletion.
type blockers struct {
	dependents func(owner types.UID) []dependent
	kinds      map[types.UID]*api.Kind // kinds of the owner and of all objects that were found, by UID
	aggregated bool                    // an object of an aggregated API was found
}

func newBlockers(kind *api.Kind, owner api.Object, dependents func(uid types.UID) []dependent) *blockers {
	return &blockers{dependents: dependents, kinds: map[types.UID]*api.Kind{owner.GetUID(): kind}}
}

// listBlockers returns the objects that block the deletion of o. o must be the owner or an object
// that listBlockers has returned.
func (b *blockers) listBlockers(o api.Object) (out []api.Object) {
	for _, d := range b.dependents(o.GetUID()) {
		if holdsUp(d.Object, o, b.kinds[o.GetUID()]) {
			b.kinds[d.GetUID()] = d.kind
			b.aggregated = b.aggregated || d.aggregated
			out = append(out, d.Object)
		}
	}
	return out
}

// dependentsOf returns the cached objects that have uid as an owner.
func (all sources) dependentsOf(uid types.UID) (out []dependent) {
	for name, deps := range all.cachedDependents(uid) {
		for _, d := range deps {
			out = append(out, dependent{Object: d, kind: all[name].kind})
		}
	}
	return out
}

// storedObjects maps the UID of an owner to all stored objects that refer to it.
type storedObjects map[types.UID][]dependent

// listStored lists from the API all objects that may depend on owner, directly or not.
func (c *collector) listStored(ctx context.Context, all sources, s source, owner api.Object) (storedObjects, error) {
	var deps []source
	for _, dep := range all {
		if dep.kind.Namespaced || !s.kind.Namespaced {
			deps = append(deps, dep)
		}
	}
	out := storedObjects{}
	var mu sync.Mutex
	return out, engine.InParallel(ctx, len(deps), func(ctx context.Context, i int) error {
		objs, err := c.term.Client.ListKind(ctx, deps[i].kind, owner.GetNamespace())
		if c.term.Client.Dropped(deps[i].kind, err) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("listing %s that may depend on %s/%s: %w", deps[i].kind.Resource, owner.GetNamespace(),
				owner.GetName(), err)
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
