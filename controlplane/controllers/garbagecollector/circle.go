package garbagecollector

import (
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
)

// Ownership may be circular. A circle of any length is treated like one object:
//
//   - It is held by owners of its members that are not members. When the last of these is gone, the
//     circle is deleted. A circle that never had such an owner stays, like an object without an
//     owner.
//   - Deleting one member deletes the other members, because each of them loses an owner.
//   - In foreground deletion its members wait for the dependents of the circle, but not for each
//     other.

// maxCircle is the maximum number of owners that are visited to judge one object. Members of a
// larger circle count as held: they lose references to absent owners and stay until one of them is
// deleted.
const maxCircle = 1000

// Held reports whether an existing owner outside of obj's circle holds a member of the circle.
// circular reports whether obj is in a circle.
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

// MayGo reports whether an owner in foreground deletion has nothing left to wait for. That is so if
// everything that it waits for, directly or not, waits for the owner in turn. dependentsOf returns
// the objects that block the deletion of an object.
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
	// Objects in the owner's circle wait for the owner: they are both its dependents and its
	// owners.
	return len(reachableFrom(owner.GetUID(), owners)) == len(seen)
}

// reachableFrom returns from and all nodes that are reachable from it along edges.
func reachableFrom(from types.UID, edges map[types.UID][]types.UID) map[types.UID]bool {
	found := map[types.UID]bool{from: true}
	queue := []types.UID{from}
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

// refersTo reports whether r refers to owner. A reference with its UID but another kind or name
// does not.
func refersTo(r metav1.OwnerReference, owner api.Object, k *api.Kind) bool {
	gv, err := schema.ParseGroupVersion(r.APIVersion)
	return err == nil && r.UID == owner.GetUID() && r.Name == owner.GetName() && r.Kind == k.GVK.Kind &&
		gv.Group == k.GVK.Group
}

// holdsUp reports whether d is a dependent with blockOwnerDeletion of owner, an object of kind k.
func holdsUp(d, owner api.Object, k *api.Kind) bool {
	if k.Namespaced && d.GetNamespace() != owner.GetNamespace() {
		return false
	}
	return slices.ContainsFunc(d.GetOwnerReferences(), func(r metav1.OwnerReference) bool {
		return r.BlockOwnerDeletion != nil && *r.BlockOwnerDeletion && refersTo(r, owner, k)
	})
}
