package webhooks

import (
	"slices"

	"k8s.io/apimachinery/pkg/runtime/schema"
)

// heartbeatResources are the resources of heartbeats: nodes and leader replicas update them to show
// that they are alive. Without these updates nothing in the cluster can restart, including
// webhooks.
var heartbeatResources = []schema.GroupResource{
	{Group: "coordination.k8s.io", Resource: "leases"},
	{Resource: "nodes"},
}

// systemNamespaces are the namespaces with the Leases of nodes and control plane components.
var systemNamespaces = []string{"kube-node-lease", "kube-system"}

// isEssentialWrite reports whether the write is admitted if a webhook call fails, despite the
// failure policy Fail. This applies to writes by the cluster's own components on which the recovery
// of the webhook may depend: heartbeats of nodes and leaders, and all objects in namespaces with
// Services of webhooks. A webhook that responds can still deny these writes.
func (a *invocation) isEssentialWrite(*hook) bool {
	if !a.attempt.Leads && (a.engine.cfg.Own == nil || !a.engine.cfg.Own(a.attempt.User)) {
		return false
	}
	if a.set.serviceNamespaces[a.attempt.Namespace] {
		return true
	}
	return slices.Contains(heartbeatResources, a.attempt.Resource.GroupResource()) &&
		(a.attempt.Namespace == "" || slices.Contains(systemNamespaces, a.attempt.Namespace))
}
