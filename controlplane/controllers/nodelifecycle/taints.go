// Package nodelifecycle acts on a node's conditions. It sets taints that keep new pods away, marks
// the pods of a lost node as not ready, and finally evicts them, so that they are replaced on other
// nodes.
package nodelifecycle

import (
	"cmp"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
)

// conditionTaints maps conditions to the keys of the NoSchedule taints that a node has while the
// condition is true.
var conditionTaints = []struct {
	condition corev1.NodeConditionType
	key       string
}{
	{corev1.NodeMemoryPressure, corev1.TaintNodeMemoryPressure},
	{corev1.NodeDiskPressure, corev1.TaintNodeDiskPressure},
	{corev1.NodePIDPressure, corev1.TaintNodePIDPressure},
	{corev1.NodeNetworkUnavailable, corev1.TaintNodeNetworkUnavailable},
}

// managed holds the keys of the taints that only this controller sets and removes.
var managed = map[string]bool{
	corev1.TaintNodeNotReady: true, corev1.TaintNodeUnreachable: true, corev1.TaintNodeUnschedulable: true,
	corev1.TaintNodeMemoryPressure: true, corev1.TaintNodeDiskPressure: true,
	corev1.TaintNodePIDPressure: true, corev1.TaintNodeNetworkUnavailable: true,
}

// Taints returns the taints that node n must have: its unmanaged taints, and managed taints
// according to its conditions. A taint that n already has keeps its time, because evictions are
// timed from it.
func Taints(n *corev1.Node, now time.Time) []corev1.Taint {
	var out []corev1.Taint
	for _, t := range n.Spec.Taints {
		if !managed[t.Key] {
			out = append(out, t)
		}
	}
	add := func(key string, effect corev1.TaintEffect) {
		for _, t := range n.Spec.Taints {
			if t.Key == key && t.Effect == effect {
				out = append(out, t)
				return
			}
		}
		t := corev1.Taint{Key: key, Effect: effect}
		stamp := metav1.NewTime(now)
		t.TimeAdded = &stamp
		out = append(out, t)
	}
	switch readyStatus(n) {
	case corev1.ConditionFalse:
		add(corev1.TaintNodeNotReady, corev1.TaintEffectNoSchedule)
		if api.NodeCondition(n, corev1.NodeReady) != nil {
			// a node without condition Ready has never reported and has no pods to evict
			add(corev1.TaintNodeNotReady, corev1.TaintEffectNoExecute)
		}
	case corev1.ConditionUnknown:
		add(corev1.TaintNodeUnreachable, corev1.TaintEffectNoSchedule)
		add(corev1.TaintNodeUnreachable, corev1.TaintEffectNoExecute)
	}
	for _, c := range conditionTaints {
		if have := api.NodeCondition(n, c.condition); have != nil && have.Status == corev1.ConditionTrue {
			add(c.key, corev1.TaintEffectNoSchedule)
		}
	}
	if n.Spec.Unschedulable {
		add(corev1.TaintNodeUnschedulable, corev1.TaintEffectNoSchedule)
	}
	return out
}

// readyStatus returns the status of condition Ready of node n. It returns False if n has no such
// condition.
func readyStatus(n *corev1.Node) corev1.ConditionStatus {
	if c := api.NodeCondition(n, corev1.NodeReady); c != nil {
		return c.Status
	}
	return corev1.ConditionFalse
}

// sameTaints reports whether a and b have the same taints, in any order.
func sameTaints(a, b []corev1.Taint) bool {
	order := func(list []corev1.Taint) []corev1.Taint {
		list = slices.Clone(list)
		slices.SortFunc(list, func(a, b corev1.Taint) int {
			return cmp.Or(cmp.Compare(a.Key, b.Key), cmp.Compare(a.Effect, b.Effect))
		})
		return list
	}
	return slices.EqualFunc(order(a), order(b), func(a, b corev1.Taint) bool {
		return a.Key == b.Key && a.Effect == b.Effect && a.Value == b.Value
	})
}
