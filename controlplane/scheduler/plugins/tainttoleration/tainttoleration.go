// Package tainttoleration keeps pods away from nodes with taints that they do not tolerate, and prefers nodes with
// fewer PreferNoSchedule taints.
package tainttoleration

import (
	"context"
	"fmt"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// Name of the plugin.
const Name = "TaintToleration"

// Plugin filters and scores by taints.
type Plugin struct{}

// Name implements framework.Plugin.
func (Plugin) Name() string { return Name }

// Filter implements framework.Filter.
func (Plugin) Filter(_ context.Context, c *framework.Cycle, n *framework.NodeInfo) *framework.Status {
	t := untolerated(c.Pod.Pod, n.Node)
	if t == nil {
		return nil
	}
	return framework.RefuseForGood(Name, fmt.Sprintf("node(s) had untolerated taint {%s: %s}", t.Key, t.Value))
}

func untolerated(p *v1.Pod, n *v1.Node) *v1.Taint {
	for i := range n.Spec.Taints {
		t := &n.Spec.Taints[i]
		if t.Effect != v1.TaintEffectPreferNoSchedule && !framework.Tolerated(p.Spec.Tolerations, t) {
			return t
		}
	}
	return nil
}

// PreScore implements framework.PreScore: without a PreferNoSchedule taint anywhere all nodes are alike.
func (Plugin) PreScore(_ context.Context, _ *framework.Cycle, nodes []*framework.NodeInfo) *framework.Status {
	for _, n := range nodes {
		for i := range n.Node.Spec.Taints {
			if n.Node.Spec.Taints[i].Effect == v1.TaintEffectPreferNoSchedule {
				return nil
			}
		}
	}
	return framework.SkipStatus
}

// Score implements framework.Score: the number of PreferNoSchedule taints that the pod does not tolerate.
func (Plugin) Score(_ context.Context, c *framework.Cycle, n *framework.NodeInfo) (int64, *framework.Status) {
	var count int64
	for i := range n.Node.Spec.Taints {
		t := &n.Node.Spec.Taints[i]
		if t.Effect == v1.TaintEffectPreferNoSchedule && !framework.Tolerated(c.Pod.Pod.Spec.Tolerations, t) {
			count++
		}
	}
	return count, nil
}

// NormalizeScore implements framework.NormalizeScore: fewer is better.
func (Plugin) NormalizeScore(_ context.Context, _ *framework.Cycle, scores []int64) *framework.Status {
	framework.Normalize(scores, true)
	return nil
}

// MayHelp implements framework.Requeue.
func (Plugin) MayHelp(e framework.Event, pod *v1.Pod, obj any) bool {
	if e != framework.NodeAdded && e != framework.NodeTaints {
		return false
	}
	n, ok := obj.(*v1.Node)
	return !ok || untolerated(pod, n) == nil
}
