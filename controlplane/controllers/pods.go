package controllers

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/component-helpers/storage/ephemeral"

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

// PodClaimIndex finds pods by the claims that they mount, as namespace/name.
const PodClaimIndex = "keelson.claim"

// PodClaims are the claims that a pod mounts, as namespace/name, those made for its ephemeral volumes too. As a function
// of any object it is that of PodClaimIndex.
func PodClaims(o api.Object) []string {
	p, ok := o.(*corev1.Pod)
	if !ok {
		return nil
	}
	var out []string
	for i := range p.Spec.Volumes {
		switch v := &p.Spec.Volumes[i]; {
		case v.PersistentVolumeClaim != nil:
			out = append(out, p.Namespace+"/"+v.PersistentVolumeClaim.ClaimName)
		case v.Ephemeral != nil:
			out = append(out, p.Namespace+"/"+ephemeral.VolumeClaimName(p, v))
		}
	}
	return out
}

// PodGroupIndex finds pods by the PodGroup that they name, as namespace/name.
const PodGroupIndex = "keelson.podgroup"

// PodGroups is the PodGroup that a pod names, as namespace/name. As a function of any object it is that of PodGroupIndex.
func PodGroups(o api.Object) []string {
	p, ok := o.(*corev1.Pod)
	if !ok || p.Spec.SchedulingGroup == nil || p.Spec.SchedulingGroup.PodGroupName == nil {
		return nil
	}
	return []string{p.Namespace + "/" + *p.Spec.SchedulingGroup.PodGroupName}
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

// HowEnded is in words how a pod ran to its end: "Failed: Evicted: the node was low on memory".
func HowEnded(p *corev1.Pod) string {
	out := string(p.Status.Phase)
	for _, s := range []string{p.Status.Reason, p.Status.Message} {
		if s != "" {
			out += ": " + s
		}
	}
	return out
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

// Tolerates says whether a toleration speaks of a taint.
func Tolerates(tol *corev1.Toleration, t *corev1.Taint) bool {
	if tol.Effect != "" && tol.Effect != t.Effect || tol.Key != "" && tol.Key != t.Key {
		return false
	}
	switch tol.Operator {
	case corev1.TolerationOpExists:
		return true
	case "", corev1.TolerationOpEqual:
		return tol.Key != "" && tol.Value == t.Value
	}
	return false
}

// TrueFirst compares for sorting: what holds comes before what does not.
func TrueFirst(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return -1
	}
	return 1
}
