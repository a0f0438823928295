// Package nodename is the Filter plugin NodeName. It restricts a pod with spec.nodeName to that
// node.
package nodename

import (
	"context"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// Name is the name of the plugin in a KubeSchedulerConfiguration.
const Name = "NodeName"

var refused = framework.RefuseForGood(Name, "node(s) didn't match the requested node name")

// Plugin restricts a pod with spec.nodeName to that node.
type Plugin struct{}

// Name implements framework.Plugin: it returns the name of the plugin.
func (Plugin) Name() string { return Name }

// PreFilter implements framework.PreFilter. It returns Skip, which disables Filter, if the pod has
// no spec.nodeName.
func (Plugin) PreFilter(_ context.Context, c *framework.Cycle) (map[string]struct{}, *framework.Status) {
	if c.Pod.Pod.Spec.NodeName == "" {
		return nil, framework.SkipStatus
	}
	return nil, nil
}

// Filter implements framework.Filter: it refuses all nodes except the one in spec.nodeName.
func (Plugin) Filter(_ context.Context, c *framework.Cycle, n *framework.NodeInfo) *framework.Status {
	if want := c.Pod.Pod.Spec.NodeName; want != "" && want != n.Node.Name {
		return refused
	}
	return nil
}

// MayHelp implements framework.Requeue: it returns true if a node was added.
func (Plugin) MayHelp(e framework.Event, _ *v1.Pod, _ any) bool { return e == framework.NodeAdded }
