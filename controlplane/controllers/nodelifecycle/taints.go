// Package nodelifecycle draws the consequences of a node's condition: taints that
// keep new pods away, pods of a lost node out of their Services, and in the end
// their deletion, so that they are replaced elsewhere.
package nodelifecycle

import (
	"cmp"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/controllers"
)

// conditionTaints maps a condition that is true to the key of its NoSchedule taint.
var conditionTaints = []struct {
	condition corev1.NodeConditionType
	key       string
}{
	{corev1.NodeMemoryPressure, corev1.TaintNodeMemoryPressure},
	{corev1.NodeDiskPressure, corev1.TaintNodeDiskPressure},
	{corev1.NodePIDPressure, corev1.TaintNodePIDPressure},
	{corev1.NodeNetworkUnavailable, corev1.TaintNodeNetworkUnavailable},
}

// managed are the taints that this controller alone sets and removes.
var managed = map[string]bool{
	corev1.TaintNodeNotReady: true, corev1.TaintNodeUnreachable: true, corev1.TaintNodeUnschedulable: true,
	corev1.TaintNodeMemoryPressure: true, corev1.TaintNodeDiskPressure: true,
	corev1.TaintNodePIDPressure: true, corev1.TaintNodeNetworkUnavailable: true,
}

// Taints are the taints that a node shall have: those of others as they are, ours
// as its conditions ask. A taint that stays keeps the time at which it was added,
// because evictions are counted from there.
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
	switch readiness(n) {
	case corev1.ConditionFalse:
		add(corev1.TaintNodeNotReady, corev1.TaintEffectNoSchedule)
		if controllers.NodeCondition(n, corev1.NodeReady) != nil { // one that has never reported has no pods to evict
			add(corev1.TaintNodeNotReady, corev1.TaintEffectNoExecute)
		}
	case corev1.ConditionUnknown:
		add(corev1.TaintNodeUnreachable, corev1.TaintEffectNoSchedule)
		add(corev1.TaintNodeUnreachable, corev1.TaintEffectNoExecute)
	}
	for _, c := range conditionTaints {
		if have := controllers.NodeCondition(n, c.condition); have != nil && have.Status == corev1.ConditionTrue {
			add(c.key, corev1.TaintEffectNoSchedule)
		}
	}
	if n.Spec.Unschedulable {
		add(corev1.TaintNodeUnschedulable, corev1.TaintEffectNoSchedule)
	}
	return out
}

// readiness is the status of condition Ready; a node without one is not ready.
func readiness(n *corev1.Node) corev1.ConditionStatus {
	if c := controllers.NodeCondition(n, corev1.NodeReady); c != nil {
		return c.Status
	}
	return corev1.ConditionFalse
}

// sameTaints compares regardless of order.
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
