package kinds

import (
	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api"
)

func nodeKind() *api.Kind {
	k := newKind[corev1.Node, corev1.NodeList](names{
		gv: corev1.SchemeGroupVersion, kind: "Node", plural: "nodes", singular: "node", short: []string{"no"},
	})
	return k
}
