package agent

import v1 "k8s.io/api/core/v1"

// criticalPriority is the lowest priority of the system classes system-cluster-critical and
// system-node-critical.
const criticalPriority = 2000000000

// IsCritical reports whether the cluster or the node may depend on the pod. A critical pod is
// admitted to a node under pressure and is not evicted. Only the priority counts, because its use
// can be restricted; anybody may set annotations. The agent runs only pods of the API, so kubelet's
// mirror annotation does not apply.
func IsCritical(pod *v1.Pod) bool {
	return pod.Spec.Priority != nil && *pod.Spec.Priority >= criticalPriority
}
