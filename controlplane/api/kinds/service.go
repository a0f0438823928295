package kinds

import (
	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api"
)

func serviceKind() *api.Kind {
	k := newKind[corev1.Service, corev1.ServiceList](names{
		gv: corev1.SchemeGroupVersion, kind: "Service", plural: "services", singular: "service", short: []string{"svc"}, all: true,
	})
	k.Namespaced = true
	return k
}
