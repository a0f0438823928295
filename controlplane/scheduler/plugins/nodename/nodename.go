// Package nodename restricts a pod that names a node to that node.
package nodename

import (
	"context"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// Name of the plugin.
const Name = "NodeName"

var refused = framework.RefuseForGood(Name, "node(s) didn't match the requested node name")

// Plugin filters by spec.nodeName.
type Plugin struct{}

// Name implements framework.Plugin.
func (Plugin) Name() string { return Name }

// PreFilter implements framework.PreFilter.
func (Plugin) PreFilter(_ context.Context, c *framework.Cycle) (map[string]struct{}, *framework.Status) {
	if c.Pod.Pod.Spec.NodeName == "" {
		return nil, framework.SkipStatus
	}
	return nil, nil
}

// Filter implements framework.Filter.
func (Plugin) Filter(_ context.Context, c *framework.Cycle, n *framework.NodeInfo) *framework.Status {
	if want := c.Pod.Pod.Spec.NodeName; want != "" && want != n.Node.Name {
		return refused
	}
	return nil
}

// MayHelp implements framework.Requeue.
func (Plugin) MayHelp(e framework.Event, _ *v1.Pod, _ any) bool { return e == framework.NodeAdded }
