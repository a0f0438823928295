package agent

import v1 "k8s.io/api/core/v1"

// criticalPriority is the lowest priority of the system classes system-cluster-critical and
// system-node-critical.
const criticalPriority = 2000000000

// IsCritical reports whether a pod is critical for the cluster or the node. A critical pod is
// admitted to a node under pressure and is not evicted. Only the pod's priority counts, because the
// use of priorities can be restricted. Annotations do not count, because every user may set them.
// The agent runs only pods of the API, so the kubelet's mirror annotation does not apply.
func IsCritical(pod *v1.Pod) bool {
	return pod.Spec.Priority != nil && *pod.Spec.Priority >= criticalPriority
}
