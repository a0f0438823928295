// Package nodedeclaredfeatures is the Filter plugin NodeDeclaredFeatures. It refuses nodes that do
// not declare the features that the pod requires, such as nodes with an agent of an earlier
// release.
package nodedeclaredfeatures

import (
	"context"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api/nodefeatures"
	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// Name is the name of the plugin in a KubeSchedulerConfiguration.
const Name = "NodeDeclaredFeatures"

// reason is the message of Kubernetes; the names of the missing features follow it.
const reason = "node declared features check failed - unsatisfied requirements: "

// Plugin refuses nodes that lack a feature that the pod requires.
type Plugin struct{}

// Name implements framework.Plugin: it returns the name of the plugin.
func (Plugin) Name() string { return Name }

// PreFilter implements framework.PreFilter. It returns Skip, which disables Filter, if the pod
// requires no features.
func (Plugin) PreFilter(_ context.Context, c *framework.Cycle) (map[string]struct{}, *framework.Status) {
	if len(nodefeatures.RequiredToRun(&c.Pod.Pod.Spec)) == 0 {
		return nil, framework.SkipStatus
	}
	return nil, nil
}

// Filter implements framework.Filter: it refuses a node that does not declare all features that the
// pod requires.
func (Plugin) Filter(_ context.Context, c *framework.Cycle, n *framework.NodeInfo) *framework.Status {
	missing := nodefeatures.Missing(nodefeatures.RequiredToRun(&c.Pod.Pod.Spec), n.Node)
	if len(missing) == 0 {
		return nil
	}
	return framework.RefuseForGood(Name, reason+nodefeatures.List(missing))
}

// MayHelp implements framework.Requeue. It returns true if a node was added or has changed its
// declared features, and the node now declares all features that the pod requires.
func (Plugin) MayHelp(e framework.Event, pod *v1.Pod, obj any) bool {
	if e != framework.NodeAdded && e != framework.NodeFeatures {
		return false
	}
	n, ok := obj.(*v1.Node)
	return !ok || len(nodefeatures.Missing(nodefeatures.RequiredToRun(&pod.Spec), n)) == 0
}
