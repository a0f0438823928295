package framework

import v1 "k8s.io/api/core/v1"

// GangScheduling is the name of the plugin whose Permit says when a group has pods enough. A profile without it places pods
// of groups like any others.
const GangScheduling = "GangScheduling"

// GroupKey names a PodGroup.
type GroupKey struct{ Namespace, Name string }

// GroupOf is the PodGroup that a pod names; false when it names none.
func GroupOf(pod *v1.Pod) (GroupKey, bool) {
	g := pod.Spec.SchedulingGroup
	if g == nil || g.PodGroupName == nil {
		return GroupKey{}, false
	}
	return GroupKey{pod.Namespace, *g.PodGroupName}, true
}

// Group is what is known of a PodGroup and of the pods that name it. Pods that have ended or are being deleted are none of it.
type Group struct {
	GroupKey
	// Known says that there is a PodGroup of the name.
	Known bool
	// Least is how many of its pods are placed together; 1 where each may go alone.
	Least int
	// Able are its pods that have a node or may get one; Placed are those of them that have one, or have been promised one.
	Able, Placed int
	// Mixed says that its pods name several schedulers.
	Mixed bool
}

// Needs is how many more of its pods must get a node for the group to be placed.
func (g Group) Needs() int { return max(g.Least-g.Placed, 0) }
