package kinds

import (
	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api"
)

func namespaceKind() *api.Kind {
	k := newKind[corev1.Namespace, corev1.NamespaceList](names{
		gv: corev1.SchemeGroupVersion, kind: "Namespace", plural: "namespaces", singular: "namespace", short: []string{"ns"},
	})
	return k
}
