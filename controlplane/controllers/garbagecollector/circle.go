package garbagecollector

import (
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
)

// Objects may own each other in a circle, of any length. A circle counts as one object:
//
//   - what holds it are the owners of its members that are no members. When the last of these is gone, the
//     circle is collected. One that never had any stays, as an object without an owner does;
//   - deleting one member takes the others along, since each of them loses an owner;
//   - deleted in the foreground, its members wait for what depends on the circle, but not for each other.

// maxCircle bounds how many owners are visited to judge one object. Members of a larger circle are taken for held:
// they let a lost owner go and stay, until one of them is deleted.
const maxCircle = 1000

// Held says whether an owner that exists, and is no member of obj's circle, holds a member of it.
// circular says that obj is in a circle at all.
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
	members := reach(obj.GetUID(), children)
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

// MayGo says whether an owner that is being deleted in the foreground has nothing left to wait for: all that it
// waits for, by way of others too, waits for it in turn. dependentsOf are the objects that hold up the deletion of one.
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
	// What is in the owner's circle waits for the owner: it is above the owner as well as below.
	return len(reach(owner.GetUID(), owners)) == len(seen)
}

// reach is from and all that edges lead to from there.
func reach(from types.UID, edges map[types.UID][]types.UID) map[types.UID]bool {
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

// refersTo says whether r means owner. A reference that bears its UID but another kind or name does not.
func refersTo(r metav1.OwnerReference, owner api.Object, k *api.Kind) bool {
	gv, err := schema.ParseGroupVersion(r.APIVersion)
	return err == nil && r.UID == owner.GetUID() && r.Name == owner.GetName() && r.Kind == k.GVK.Kind &&
		gv.Group == k.GVK.Group
}

// holdsUp says whether d is a dependent of owner, an object of kind k, that asks owner to wait for it.
func holdsUp(d, owner api.Object, k *api.Kind) bool {
	if k.Namespaced && d.GetNamespace() != owner.GetNamespace() {
		return false
	}
	return slices.ContainsFunc(d.GetOwnerReferences(), func(r metav1.OwnerReference) bool {
		return r.BlockOwnerDeletion != nil && *r.BlockOwnerDeletion && refersTo(r, owner, k)
	})
}
