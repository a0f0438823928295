package framework

import v1 "k8s.io/api/core/v1"

// GangScheduling is the name of the plugin whose Permit delays the pods of a PodGroup until enough
// of them have a node. A profile without this plugin schedules the pods of a PodGroup like any
// other pods.
const GangScheduling = "GangScheduling"

// GroupKey is the namespace and name of a PodGroup.
type GroupKey struct{ Namespace, Name string }

// GroupOf returns the PodGroup to which a pod belongs, and false if the pod belongs to no PodGroup.
func GroupOf(pod *v1.Pod) (GroupKey, bool) {
	g := pod.Spec.SchedulingGroup
	if g == nil || g.PodGroupName == nil {
		return GroupKey{}, false
	}
	return GroupKey{pod.Namespace, *g.PodGroupName}, true
}

// Group is the scheduling state of a PodGroup: what its policy requires, and how many of its pods
// have a node. Pods that have terminated or are terminating are not counted.
type Group struct {
	GroupKey
	// Known means that the PodGroup object exists.
	Known bool
	// Least is minCount of the PodGroup's gang policy: how many pods must be placed together. It is
	// 1 if each pod may be placed alone.
	Least int
	// Able is the number of pods that have a node or could be scheduled, because they have no
	// scheduling gates. Placed is the number of pods that are bound to a node or assumed on one.
	Able, Placed int
	// Mixed means that the pods of the group have different schedulerNames.
	Mixed bool
}

// Needs returns how many more pods of the group must get a node to reach the minimum, Least.
func (g Group) Needs() int { return max(g.Least-g.Placed, 0) }
