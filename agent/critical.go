package agent

import v1 "k8s.io/api/core/v1"

// criticalPriority is where the classes begin that are the system's own, system-cluster-critical and system-node-critical.
const criticalPriority = 2000000000

// Critical says that a cluster or its node may not work without the pod: it is admitted to a node that is short of
// something, and is not evicted. Only the priority says so, which not everybody may give: annotations are anybody's, and the
// agent starts no pods but those of the API, of which kubelet's annotation for mirror pods would tell.
func Critical(pod *v1.Pod) bool {
	return pod.Spec.Priority != nil && *pod.Spec.Priority >= criticalPriority
}
