package kinds

import (
	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api"
)

func serviceAccountKind() *api.Kind {
	k := newKind[corev1.ServiceAccount, corev1.ServiceAccountList](names{
		gv: corev1.SchemeGroupVersion, kind: "ServiceAccount", plural: "serviceaccounts", singular: "serviceaccount", short: []string{"sa"},
	})
	k.Namespaced = true
	return k
}
