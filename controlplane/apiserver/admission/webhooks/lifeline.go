package webhooks

import (
	"slices"

	"k8s.io/apimachinery/pkg/runtime/schema"
)

// lifelines are what keeps nodes and leaders known to be alive. Without them nothing starts again, no webhook either.
var lifelines = []schema.GroupResource{
	{Group: "coordination.k8s.io", Resource: "leases"},
	{Resource: "nodes"},
}

// systemNamespaces have the leases of nodes and of the control plane's parts.
var systemNamespaces = []string{"kube-node-lease", "kube-system"}

// lifeline says that a failure to call a webhook is ignored, whatever its failure policy: the write is one of the
// cluster's own parts, and without it the webhook itself might never come back. These are the signs of life of nodes
// and leaders, and everything in the namespaces where services of webhooks run: their pods, and what starts and reaches
// them. A webhook that answers is heard in these writes as in all others.
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
