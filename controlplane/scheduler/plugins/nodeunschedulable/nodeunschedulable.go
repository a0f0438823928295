// Package nodeunschedulable is the Filter plugin NodeUnschedulable. It refuses cordoned nodes,
// unless the pod tolerates the taint node.kubernetes.io/unschedulable.
package nodeunschedulable

import (
	"context"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// Name is the name of the plugin in a KubeSchedulerConfiguration.
const Name = "NodeUnschedulable"

var (
	refused = framework.RefuseForGood(Name, "node(s) were unschedulable")
	taint   = v1.Taint{Key: v1.TaintNodeUnschedulable, Effect: v1.TaintEffectNoSchedule}
)

// Plugin refuses nodes with spec.unschedulable, unless the pod tolerates the taint
// node.kubernetes.io/unschedulable.
type Plugin struct{}

// Name implements framework.Plugin: it returns the name of the plugin.
func (Plugin) Name() string { return Name }

// Filter implements framework.Filter: it refuses a node with spec.unschedulable, unless the pod
// tolerates the taint node.kubernetes.io/unschedulable.
func (Plugin) Filter(_ context.Context, c *framework.Cycle, n *framework.NodeInfo) *framework.Status {
	if !n.Cordoned || framework.Tolerated(c.Pod.Pod.Spec.Tolerations, &taint) {
		return nil
	}
	return refused
}

// MayHelp implements framework.Requeue. It returns true if a node without spec.unschedulable was
// added, or had its taints or spec.unschedulable changed. Other events do not help.
func (Plugin) MayHelp(e framework.Event, _ *v1.Pod, obj any) bool {
	if e != framework.NodeAdded && e != framework.NodeTaints {
		return false
	}
	n, ok := obj.(*v1.Node)
	return !ok || !n.Spec.Unschedulable
}
