package webhooks

import (
	"slices"

	"k8s.io/apimachinery/pkg/runtime/schema"
)

// lifelines are the resources with which nodes and leaders show that they are alive. Without their
// updates nothing in the cluster can restart, including webhooks.
var lifelines = []schema.GroupResource{
	{Group: "coordination.k8s.io", Resource: "leases"},
	{Resource: "nodes"},
}

// systemNamespaces contain the Leases of nodes and control plane components.
var systemNamespaces = []string{"kube-node-lease", "kube-system"}

// lifeline reports whether a failed webhook call is ignored despite its failure policy. It is for
// writes by the cluster's own components on which the recovery of the webhook may depend. They are
// heartbeats of nodes and leaders, and all objects in namespaces with Services of webhooks. A
// denial by a webhook that responds still applies to these writes.
func (a *attempt) lifeline(*hook) bool {
	if !a.Leads && (a.of.cfg.Own == nil || !a.of.cfg.Own(a.User)) {
		return false
	}
	if a.set.homes[a.Namespace] {
		return true
	}
	return slices.Contains(lifelines, a.Resource.GroupResource()) &&
		(a.Namespace == "" || slices.Contains(systemNamespaces, a.Namespace))
}
