package framework

import v1 "k8s.io/api/core/v1"

// GangScheduling is the name of the plugin with a Permit that delays pods until enough pods of
// their PodGroup have a node. A profile without it places the pods of groups like any other pods.
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

// Group is the scheduling state of a PodGroup and its pods. Terminal and terminating pods are not
// counted.
type Group struct {
	GroupKey
	// Known means that the PodGroup object exists.
	Known bool
	// Least is how many pods of the group must be placed together (minCount); 1 if each pod may be
	// placed alone.
	Least int
	// Able is the number of pods that have a node or are not held back by scheduling gates. Placed
	// is the number of pods that are bound or assumed on a node.
	Able, Placed int
	// Mixed means that the pods of the group name different schedulers.
	Mixed bool
}

// Needs returns how many more pods must get a node for the group to be placed.
func (g Group) Needs() int { return max(g.Least-g.Placed, 0) }
