package garbagecollector

import (
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
)

// Owner references may form a circle: an object is, directly or not, its own owner. The collector
// treats a circle of any length like one object:
//
//   - Owners of a member that are not members keep the circle. When the last of these owners no
//     longer exists, the circle is deleted. A circle that never had such an owner is kept, like an
//     object without an owner.
//   - The deletion of one member deletes the other members, because each of them loses an owner.
//   - In foreground deletion, the members wait for the dependents of the circle, but not for each
//     other.

// maxCircle is the maximum number of objects that Held visits for one object. If there are more,
// Held returns true. Members of a larger circle therefore lose references to absent owners and are
// kept until one of them is deleted.
const maxCircle = 1000

// Held reports whether an existing owner keeps obj. For an object outside of circles of owner
// references, this is any owner of obj. For an object in a circle, it is an owner of any member
// that is not itself a member. circular reports whether obj is in a circle. ownersOf returns the
// owners of an object.
func Held(obj api.Object, ownersOf func(o api.Object) ([]Owner, error)) (held, circular bool, err error) {
	owners := map[types.UID][]Owner{}
	children := map[types.UID][]types.UID{}
	queue := []api.Object{obj}
	for len(queue) > 0 {
		o := queue[0]
		queue = queue[1:]
		if _, seen := owners[o.GetUID()]; seen {
			continue
		}
		if len(owners) == maxCircle {
			return true, false, nil
		}
		up, err := ownersOf(o)
		if err != nil {
			return true, false, err
		}
		owners[o.GetUID()] = up
		for _, owner := range up {
			if owner.State == Solid && owner.Object != nil {
				children[owner.Ref.UID] = append(children[owner.Ref.UID], o.GetUID())
				queue = append(queue, owner.Object)
			}
		}
	}
	members := reachableFrom(obj.GetUID(), children)
	circular = len(children[obj.GetUID()]) > 0
	for member := range members {
		for _, owner := range owners[member] {
			if owner.State == Solid && (owner.Object == nil || !members[owner.Ref.UID]) {
				return true, circular, nil
			}
		}
	}
	return false, circular, nil
}

// MayGo reports whether the foreground deletion of owner may be completed. This is so if every
// object that blocks it, directly or through other objects, is itself in foreground deletion and
// waits for owner in turn. dependentsOf returns the objects that block the deletion of an object.
func MayGo(owner api.Object, dependentsOf func(o api.Object) []api.Object) bool {
	owners := map[types.UID][]types.UID{}
	seen := map[types.UID]bool{owner.GetUID(): true}
	queue := []api.Object{owner}
	for len(queue) > 0 {
		o := queue[0]
		queue = queue[1:]
		for _, d := range dependentsOf(o) {
			if stateOf(d) != Waiting {
				return false
			}
			owners[d.GetUID()] = append(owners[d.GetUID()], o.GetUID())
			if !seen[d.GetUID()] {
				seen[d.GetUID()] = true
				queue = append(queue, d)
			}
		}
	}
	// Every object that owner waits for must also be reachable along owner references from owner.
	return len(reachableFrom(owner.GetUID(), owners)) == len(seen)
}

// reachableFrom returns the UIDs that are reachable from start along edges, including start itself.
func reachableFrom(start types.UID, edges map[types.UID][]types.UID) map[types.UID]bool {
	found := map[types.UID]bool{start: true}
	queue := []types.UID{start}
	for len(queue) > 0 {
		next := edges[queue[0]]
		queue = queue[1:]
		for _, n := range next {
			if !found[n] {
				found[n] = true
				queue = append(queue, n)
			}
		}
	}
	return found
}

// refersTo reports whether owner reference r names owner, an object of kind k, by UID, name, group
// and kind. The version may differ.
func refersTo(r metav1.OwnerReference, owner api.Object, k *api.Kind) bool {
	gv, err := schema.ParseGroupVersion(r.APIVersion)
	return err == nil && r.UID == owner.GetUID() && r.Name == owner.GetName() && r.Kind == k.GVK.Kind &&
		gv.Group == k.GVK.Group
}

// holdsUp reports whether dependent d blocks the foreground deletion of owner, an object of kind k:
// d has a reference to owner with blockOwnerDeletion.
func holdsUp(d, owner api.Object, k *api.Kind) bool {
	if k.Namespaced && d.GetNamespace() != owner.GetNamespace() {
		return false
	}
	return slices.ContainsFunc(d.GetOwnerReferences(), func(r metav1.OwnerReference) bool {
		return r.BlockOwnerDeletion != nil && *r.BlockOwnerDeletion && refersTo(r, owner, k)
	})
}
