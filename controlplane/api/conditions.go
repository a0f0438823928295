package api

import corev1 "k8s.io/api/core/v1"

// IsPodTerminal reports whether the pod's phase is Succeeded or Failed. The phase of a terminal pod
// does not change again.
func IsPodTerminal(pod *corev1.Pod) bool { return IsTerminalPhase(pod.Status.Phase) }

// IsTerminalPhase reports whether the phase is Succeeded or Failed.
func IsTerminalPhase(phase corev1.PodPhase) bool {
	return phase == corev1.PodSucceeded || phase == corev1.PodFailed
}

// PodCondition returns the pod's condition of a type, or nil. It is a pointer into the pod.
func PodCondition(pod *corev1.Pod, conditionType corev1.PodConditionType) *corev1.PodCondition {
	return FindPodCondition(pod.Status.Conditions, conditionType)
}

// FindPodCondition returns the pod condition of a type from a list, or nil. It is a pointer into
// the list.
func FindPodCondition(conditions []corev1.PodCondition, wanted corev1.PodConditionType) *corev1.PodCondition {
	for i := range conditions {
		if conditions[i].Type == wanted {
			return &conditions[i]
		}
	}
	return nil
}

// IsPodReady reports whether the pod's condition Ready is True.
func IsPodReady(pod *corev1.Pod) bool {
	c := PodCondition(pod, corev1.PodReady)
	return c != nil && c.Status == corev1.ConditionTrue
}

// NodeCondition returns the node's condition of a type, or nil. It is a pointer into the node.
func NodeCondition(node *corev1.Node, conditionType corev1.NodeConditionType) *corev1.NodeCondition {
	return FindNodeCondition(node.Status.Conditions, conditionType)
}

// FindNodeCondition returns the node condition of a type from a list, or nil. It is a pointer into
// the list.
func FindNodeCondition(conditions []corev1.NodeCondition, wanted corev1.NodeConditionType) *corev1.NodeCondition {
	for i := range conditions {
		if conditions[i].Type == wanted {
			return &conditions[i]
		}
	}
	return nil
}

// NodeReadyStatus returns the status of the node's condition Ready, or "" if the node does not have
// this condition. Unknown means that the agent has stopped reporting.
func NodeReadyStatus(node *corev1.Node) corev1.ConditionStatus {
	if c := NodeCondition(node, corev1.NodeReady); c != nil {
		return c.Status
	}
	return ""
}

// IsNodeReady reports whether the node's condition Ready is True.
func IsNodeReady(node *corev1.Node) bool { return NodeReadyStatus(node) == corev1.ConditionTrue }
