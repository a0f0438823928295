// Package nodeports is the Filter plugin NodePorts. It prevents two pods on a node from using the
// same host port.
package nodeports

import (
	"context"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// Name is the name of the plugin in a KubeSchedulerConfiguration.
const Name = "NodePorts"

var refused = framework.Refuse(Name, "node(s) didn't have free ports for the requested pod ports")

// Plugin refuses nodes on which a host port of the pod is in use.
type Plugin struct{}

// Name implements framework.Plugin: it returns the name of the plugin.
func (Plugin) Name() string { return Name }

// PreFilter implements framework.PreFilter. It returns Skip, which disables Filter, if the pod has
// no host ports.
func (Plugin) PreFilter(_ context.Context, c *framework.Cycle) (map[string]struct{}, *framework.Status) {
	if len(c.Pod.Ports) == 0 {
		return nil, framework.SkipStatus
	}
	return nil, nil
}

// Filter implements framework.Filter: it refuses a node on which another pod uses a host port of
// the pod.
func (Plugin) Filter(_ context.Context, c *framework.Cycle, n *framework.NodeInfo) *framework.Status {
	if n.PortConflict(c.Pod.Ports) {
		return refused
	}
	return nil
}

// MayHelp implements framework.Requeue. It returns true for a new node, and for the removal of a
// pod that has host ports. Other events do not help.
func (Plugin) MayHelp(e framework.Event, _ *v1.Pod, obj any) bool {
	switch e {
	case framework.NodeAdded:
		return true
	case framework.PodRemoved:
		pod, ok := obj.(*v1.Pod)
		return !ok || len(framework.NewPodInfo(pod).Ports) > 0
	}
	return false
}
