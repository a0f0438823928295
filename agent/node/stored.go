package node

import (
	"maps"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/agent"
)

// admission is the node against which pods are admitted: resources as the machine has them, and what only the stored
// object says: labels and taints, which belong to the administrator once the node is registered, and extended resources
// that somebody wrote into its status. While the view has no such object, which a checkpoint has too, the node goes by
// what it says of itself. Pure.
func admission(facts, stored *v1.Node) *v1.Node {
	if stored == nil {
		return facts
	}
	n := &v1.Node{ObjectMeta: facts.ObjectMeta, Spec: facts.Spec, Status: facts.Status}
	n.Labels, n.Annotations, n.Spec.Taints = stored.Labels, stored.Annotations, stored.Spec.Taints
	n.Status.Allocatable = maps.Clone(facts.Status.Allocatable)
	for name, q := range stored.Status.Allocatable { // as sent, extended resources alone
		if _, own := n.Status.Allocatable[name]; !own {
			n.Status.Allocatable[name] = q
		}
	}
	return n
}

// admitting returns the node as pods are admitted to it now. Shared: do not modify.
func (f *facts) admitting(objects agent.Objects) func() *v1.Node {
	return func() *v1.Node {
		stored, _ := objects.Node()
		return admission(f.node(), stored)
	}
}
