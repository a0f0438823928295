package node

import (
	"maps"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/agent"
)

// admissionNode returns the Node against which the admission of pods is checked. Its resources come
// from facts, the Node that this agent reports. Its labels, taints and added extended resources
// come from stored, the Node in the API, because an administrator may change them. If stored is
// nil, it returns facts. It is pure.
func admissionNode(facts, stored *v1.Node) *v1.Node {
	if stored == nil {
		return facts
	}
	n := &v1.Node{ObjectMeta: facts.ObjectMeta, Spec: facts.Spec, Status: facts.Status}
	n.Labels, n.Annotations, n.Spec.Taints = stored.Labels, stored.Annotations, stored.Spec.Taints
	n.Status.Allocatable = maps.Clone(facts.Status.Allocatable)
	for name, q := range stored.Status.Allocatable { // the session delivers extended resources only
		if _, own := n.Status.Allocatable[name]; !own {
			n.Status.Allocatable[name] = q
		}
	}
	return n
}

// admissionNodeFunc returns a function that returns the admissionNode for the current facts and the
// node's own object in the view. The result of that function is shared and must not be modified.
func (f *nodeFacts) admissionNodeFunc(objects agent.Objects) func() *v1.Node {
	return func() *v1.Node {
		stored, _ := objects.Node()
		return admissionNode(f.currentNode(), stored)
	}
}
