// Package garbagecollector deletes the dependents of objects that no longer exist, and implements
// the propagation policies foreground and orphan. It stores no owner graph: it uses the informers'
// caches, indexed by owner UID, so the graph cannot become inconsistent with them.
package garbagecollector

import (
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
)

// OwnerState is the state of the object that an owner reference names.
type OwnerState int

// States of an owner. Only a Solid owner keeps its dependents.
const (
	Solid   OwnerState = iota // the owner exists, or its state is unknown
	Absent                    // the owner was verified not to exist
	Waiting                   // the owner is in foreground deletion and waits for its dependents
)

// Owner is one owner reference and its state.
type Owner struct {
	Ref    metav1.OwnerReference
	State  OwnerState
	Object api.Object // the owner, if it exists and its kind is known
	// Unanswered means that the server of the owner's kind did not respond, or returned an invalid
	// object. State is then Solid.
	Unanswered bool
}

// Verdict is the result of Judge. The zero Verdict means that the object is not changed.
type Verdict struct {
	Detach []metav1.OwnerReference    // owner references to remove, because another owner keeps the object
	Delete metav1.DeletionPropagation // how the object is deleted; "" means that it is not deleted
}

// lostSome reports whether some owners are Solid and some are not. Only then Judge needs the result
// of Held.
func lostSome(owners []Owner) bool {
	solid := func(o Owner) bool { return o.State == Solid }
	return slices.ContainsFunc(owners, solid) && slices.ContainsFunc(owners, func(o Owner) bool { return !solid(o) })
}

// Judge returns whether obj, which is not being deleted, is deleted or loses owner references.
// owners are the states of all its owners, and held is the result of Held. dependents reports
// whether other objects have obj as an owner. Judge calls it only if the result matters.
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
		// the waiting owner also waits for the dependents of obj
		return Verdict{Delete: metav1.DeletePropagationForeground}
	case slices.Contains(obj.GetFinalizers(), metav1.FinalizerOrphanDependents):
		return Verdict{Delete: metav1.DeletePropagationOrphan}
	case slices.Contains(obj.GetFinalizers(), metav1.FinalizerDeleteDependents):
		return Verdict{Delete: metav1.DeletePropagationForeground}
	}
	return Verdict{Delete: metav1.DeletePropagationBackground}
}

// stateOf returns the state of an owner that exists and has the UID of the reference: Waiting if it
// is in foreground deletion, otherwise Solid.
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

// withoutString returns a copy of list without s.
func withoutString(list []string, s string) []string {
	return slices.DeleteFunc(slices.Clone(list), func(x string) bool { return x == s })
}
