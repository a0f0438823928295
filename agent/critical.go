package agent

import v1 "k8s.io/api/core/v1"

// criticalPriority is where the classes begin that are the system's own, system-cluster-critical and system-node-critical.
const criticalPriority = 2000000000

// Critical says that a cluster or its node may not work without the pod: it is admitted to a node that is short of
// something, and is not evicted. A mirror pod belongs to somebody who would start it again at once.
func Critical(pod *v1.Pod) bool {
	_, mirror := pod.Annotations[v1.MirrorPodAnnotationKey]
	return mirror || pod.Spec.Priority != nil && *pod.Spec.Priority >= criticalPriority
}
