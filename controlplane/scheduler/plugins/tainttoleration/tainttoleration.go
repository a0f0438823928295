// Package tainttoleration is the plugin TaintToleration. Its Filter refuses nodes with taints that
// the pod does not tolerate. Its Score prefers nodes with fewer PreferNoSchedule taints that the
// pod does not tolerate.
package tainttoleration

import (
	"context"
	"fmt"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// Name is the name of the plugin in a KubeSchedulerConfiguration.
const Name = "TaintToleration"

// Plugin filters and scores nodes by their taints and the pod's tolerations.
type Plugin struct{}

// Name implements framework.Plugin: it returns the name of the plugin.
func (Plugin) Name() string { return Name }

// Filter implements framework.Filter: it refuses a node with a NoSchedule or NoExecute taint that
// the pod does not tolerate.
func (Plugin) Filter(_ context.Context, c *framework.Cycle, n *framework.NodeInfo) *framework.Status {
	t := firstUntolerated(c.Pod.Pod, n.Taints)
	if t == nil {
		return nil
	}
	// Nodes often have the same taint: the refusal of the previous such node is reused.
	last, ok := c.Get(Name).(*refusal)
	if !ok || last.key != t.Key || last.value != t.Value {
		last = &refusal{t.Key, t.Value, framework.RefuseForGood(Name,
			fmt.Sprintf("node(s) had untolerated taint {%s: %s}", t.Key, t.Value))}
		c.Put(Name, last)
	}
	return last.status
}

// refusal is the last refusal that Filter returned in a scheduling attempt, with the taint that
// caused it. Filter returns it again for the next node with the same taint, to avoid an allocation.
type refusal struct {
	key, value string
	status     *framework.Status
}

func firstUntolerated(pod *v1.Pod, taints []v1.Taint) *v1.Taint {
	for i := range taints {
		t := &taints[i]
		if t.Effect != v1.TaintEffectPreferNoSchedule && !framework.Tolerated(pod.Spec.Tolerations, t) {
			return t
		}
	}
	return nil
}

// PreScore implements framework.PreScore. It returns Skip, which disables Score, if no node has a
// PreferNoSchedule taint.
func (Plugin) PreScore(_ context.Context, _ *framework.Cycle, nodes []*framework.NodeInfo) *framework.Status {
	for _, n := range nodes {
		for i := range n.Taints {
			if n.Taints[i].Effect == v1.TaintEffectPreferNoSchedule {
				return nil
			}
		}
	}
	return framework.SkipStatus
}

// Score implements framework.Score: it returns the number of PreferNoSchedule taints of the node
// that the pod does not tolerate. A lower result is better; NormalizeScore reverses the order.
func (Plugin) Score(_ context.Context, c *framework.Cycle, n *framework.NodeInfo) (int64, *framework.Status) {
	var count int64
	for i := range n.Taints {
		t := &n.Taints[i]
		if t.Effect == v1.TaintEffectPreferNoSchedule && !framework.Tolerated(c.Pod.Pod.Spec.Tolerations, t) {
			count++
		}
	}
	return count, nil
}

// NormalizeScore implements framework.NormalizeScore: the nodes with the fewest PreferNoSchedule
// taints that the pod does not tolerate get the highest score.
func (Plugin) NormalizeScore(_ context.Context, _ *framework.Cycle, scores []int64) *framework.Status {
	framework.Normalize(scores, true)
	return nil
}

// MayHelp implements framework.Requeue. It returns true if a node was added or its taints changed,
// and the pod tolerates its taints.
func (Plugin) MayHelp(e framework.Event, pod *v1.Pod, obj any) bool {
	if e != framework.NodeAdded && e != framework.NodeTaints {
		return false
	}
	n, ok := obj.(*v1.Node)
	return !ok || firstUntolerated(pod, n.Spec.Taints) == nil
}
