package controllers

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
)

// PodNodeIndex finds pods by the node that they are bound to ("" = none yet).
const PodNodeIndex = "keelson.node"

// PodNode is the index function of PodNodeIndex.
func PodNode(o api.Object) []string {
	if p, ok := o.(*corev1.Pod); ok {
		return []string{p.Spec.NodeName}
	}
	return nil
}

// NamespaceIndex finds objects by namespace. Every informer of package client has it.
const NamespaceIndex = cache.NamespaceIndex

// PodCondition returns the pod's condition of a type; nil when it has none.
func PodCondition(p *corev1.Pod, t corev1.PodConditionType) *corev1.PodCondition {
	for i := range p.Status.Conditions {
		if p.Status.Conditions[i].Type == t {
			return &p.Status.Conditions[i]
		}
	}
	return nil
}

// PodReady says whether the pod's Ready condition is true.
func PodReady(p *corev1.Pod) bool {
	c := PodCondition(p, corev1.PodReady)
	return c != nil && c.Status == corev1.ConditionTrue
}

// PodEnded says whether the pod ran to its end.
func PodEnded(p *corev1.Pod) bool {
	return p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed
}

// PodAvailable says whether the pod has been ready for minReadySeconds; if it only
// has to stay ready, wait says how long still.
func PodAvailable(p *corev1.Pod, minReadySeconds int32, now time.Time) (available bool, wait time.Duration) {
	c := PodCondition(p, corev1.PodReady)
	if c == nil || c.Status != corev1.ConditionTrue {
		return false, 0
	}
	if minReadySeconds == 0 {
		return true, 0
	}
	left := c.LastTransitionTime.Add(time.Duration(minReadySeconds) * time.Second).Sub(now)
	return left <= 0, max(0, left)
}

// NodeCondition returns the node's condition of a type; nil when it has none.
func NodeCondition(n *corev1.Node, t corev1.NodeConditionType) *corev1.NodeCondition {
	for i := range n.Status.Conditions {
		if n.Status.Conditions[i].Type == t {
			return &n.Status.Conditions[i]
		}
	}
	return nil
}
