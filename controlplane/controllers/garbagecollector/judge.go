// Package garbagecollector deletes what belonged to objects that are gone, and
// carries out the propagation policies foreground and orphan. The graph of
// owners is not kept: it is the informers' caches, indexed by owner UID, so it
// cannot drift from them.
package garbagecollector

import (
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
)

// OwnerState is what is known of one owner of an object.
type OwnerState int

// States of an owner.
const (
	Solid   OwnerState = iota // exists, or cannot be judged: the object stays
	Absent                    // verified to be gone
	Waiting                   // being deleted in the foreground: waits for its dependents
)

// Owner is one reference and its state.
type Owner struct {
	Ref    metav1.OwnerReference
	State  OwnerState
	Object api.Object // the owner itself where it exists and its kind is known
	// Unanswered says that the owner's server did not answer, or not with the owner: State is Solid until it does.
	Unanswered bool
}

// Verdict is what to do with an object because of its owners. The zero Verdict is nothing.
type Verdict struct {
	Detach []metav1.OwnerReference    // references to remove, since another owner holds the object
	Delete metav1.DeletionPropagation // "" = do not delete
}

// lostSome says whether some owners are lost and some are not: only then it matters who holds the object.
func lostSome(owners []Owner) bool {
	solid := func(o Owner) bool { return o.State == Solid }
	return slices.ContainsFunc(owners, solid) && slices.ContainsFunc(owners, func(o Owner) bool { return !solid(o) })
}

// Judge decides about an object that is not being deleted. held is what Held says of it. dependents says whether
// others depend on it; it is asked only where that matters.
func Judge(obj metav1.Object, owners []Owner, held bool, dependents func() bool) Verdict {
	var solid, waiting int
	var lost []metav1.OwnerReference
	for _, o := range owners {
		switch o.State {
		case Solid:
			solid++
		case Waiting:
			waiting++
			lost = append(lost, o.Ref)
		case Absent:
			lost = append(lost, o.Ref)
		}
	}
	switch {
	case len(owners) == 0 || len(lost) == 0:
		return Verdict{}
	case solid > 0 && held:
		return Verdict{Detach: lost}
	case waiting > 0 && dependents():
		return Verdict{Delete: metav1.DeletePropagationForeground} // the owner waits for the whole tree
	case slices.Contains(obj.GetFinalizers(), metav1.FinalizerOrphanDependents):
		return Verdict{Delete: metav1.DeletePropagationOrphan}
	case slices.Contains(obj.GetFinalizers(), metav1.FinalizerDeleteDependents):
		return Verdict{Delete: metav1.DeletePropagationForeground}
	}
	return Verdict{Delete: metav1.DeletePropagationBackground}
}

// stateOf judges an owner that exists with the UID of the reference.
func stateOf(owner metav1.Object) OwnerState {
	if owner.GetDeletionTimestamp() != nil && slices.Contains(owner.GetFinalizers(), metav1.FinalizerDeleteDependents) {
		return Waiting
	}
	return Solid
}

func ownedBy(o metav1.Object, uid types.UID) bool {
	for _, r := range o.GetOwnerReferences() {
		if r.UID == uid {
			return true
		}
	}
	return false
}

// without returns a copy of list that lacks s.
func without(list []string, s string) []string {
	return slices.DeleteFunc(slices.Clone(list), func(x string) bool { return x == s })
}
