package kinds

import (
	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api"
)

func podKind() *api.Kind {
	k := newKind[corev1.Pod, corev1.PodList](names{
		gv: corev1.SchemeGroupVersion, kind: "Pod", plural: "pods", singular: "pod", short: []string{"po"}, all: true,
	})
	k.Namespaced = true
	return k
}
