package engine

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/component-helpers/storage/ephemeral"

	"keelson.dev/keelson/controlplane/api"
)

// PodNodeIndex indexes pods by the node to which they are bound. Unbound pods are under "".
const PodNodeIndex = "keelson.node"

// PodNodeKeys is the index function of PodNodeIndex.
func PodNodeKeys(o api.Object) []string {
	if p, ok := o.(*corev1.Pod); ok {
		return []string{p.Spec.NodeName}
	}
	return nil
}

// PodClaimIndex indexes pods by the PersistentVolumeClaims that they mount, as namespace/name.
const PodClaimIndex = "keelson.claim"

// PodClaimKeys returns the PersistentVolumeClaims that a pod mounts, as namespace/name. The claims
// of its ephemeral volumes are included. It is the index function of PodClaimIndex, and returns nil
// for any other object.
func PodClaimKeys(o api.Object) []string {
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

// PodGroupIndex indexes pods by the PodGroup that they name, as namespace/name.
const PodGroupIndex = "keelson.podgroup"

// PodGroupKeys returns the PodGroup that a pod names, as namespace/name. It is the index function
// of PodGroupIndex, and returns nil for any other object.
func PodGroupKeys(o api.Object) []string {
	p, ok := o.(*corev1.Pod)
	if !ok || p.Spec.SchedulingGroup == nil || p.Spec.SchedulingGroup.PodGroupName == nil {
		return nil
	}
	return []string{p.Namespace + "/" + *p.Spec.SchedulingGroup.PodGroupName}
}

// NamespaceIndex indexes objects by namespace. Every informer of package client has it.
const NamespaceIndex = cache.NamespaceIndex

// DescribePodEnd returns the phase, reason and message of terminal pod p, such as "Failed: Evicted:
// the node was low on memory".
func DescribePodEnd(p *corev1.Pod) string {
	out := string(p.Status.Phase)
	for _, s := range []string{p.Status.Reason, p.Status.Message} {
		if s != "" {
			out += ": " + s
		}
	}
	return out
}

// IsPodAvailable reports whether pod p has been ready for minReadySeconds. If p is ready but not
// available yet, wait is the remaining time. Otherwise wait is 0.
func IsPodAvailable(p *corev1.Pod, minReadySeconds int32, now time.Time) (available bool, wait time.Duration) {
	c := api.PodCondition(p, corev1.PodReady)
	if c == nil || c.Status != corev1.ConditionTrue {
		return false, 0
	}
	if minReadySeconds == 0 {
		return true, 0
	}
	left := c.LastTransitionTime.Add(time.Duration(minReadySeconds) * time.Second).Sub(now)
	return left <= 0, max(0, left)
}

// ToleratesTaint reports whether a toleration matches a taint.
func ToleratesTaint(tol *corev1.Toleration, t *corev1.Taint) bool {
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

// TrueFirst compares two booleans for sorting: true comes before false.
func TrueFirst(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return -1
	}
	return 1
}
