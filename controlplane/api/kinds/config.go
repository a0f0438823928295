package kinds

import (
	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api"
)

func configMapKind() *api.Kind {
	k := newKind[corev1.ConfigMap, corev1.ConfigMapList](names{
		gv: corev1.SchemeGroupVersion, kind: "ConfigMap", plural: "configmaps", singular: "configmap", short: []string{"cm"},
	})
	k.Namespaced = true
	return k
}

func secretKind() *api.Kind {
	k := newKind[corev1.Secret, corev1.SecretList](names{
		gv: corev1.SchemeGroupVersion, kind: "Secret", plural: "secrets", singular: "secret",
	})
	k.Namespaced = true
	return k
}
