package framework

import v1 "k8s.io/api/core/v1"

// GangScheduling is the name of the plugin that delays pods in Permit until enough pods of their
// group have a node. A profile without it places the pods of groups like any other pods.
const GangScheduling = "GangScheduling"

// GroupKey names a PodGroup.
type GroupKey struct{ Namespace, Name string }

// GroupOf returns the PodGroup of a pod; false if it has none.
func GroupOf(pod *v1.Pod) (GroupKey, bool) {
	g := pod.Spec.SchedulingGroup
	if g == nil || g.PodGroupName == nil {
		return GroupKey{}, false
	}
	return GroupKey{pod.Namespace, *g.PodGroupName}, true
}

// Group is the state of a PodGroup and its pods. Terminal and terminating pods are not counted.
type Group struct {
	GroupKey
	// Known reports that the PodGroup exists.
	Known bool
	// Least is how many of its pods must be placed together; 1 if each may be placed alone.
	Least int
	// Able is the number of pods that have a node or may get one. Placed is the number of pods that
	// are bound or assumed.
	Able, Placed int
	// Mixed reports that its pods name different schedulers.
	Mixed bool
}

// Needs returns how many more pods must get a node for the group to be placed.
func (g Group) Needs() int { return max(g.Least-g.Placed, 0) }
