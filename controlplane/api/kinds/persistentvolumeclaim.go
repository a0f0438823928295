package kinds

import (
	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api"
)

func persistentVolumeClaimKind() *api.Kind {
	k := newKind[corev1.PersistentVolumeClaim, corev1.PersistentVolumeClaimList](names{
		gv: corev1.SchemeGroupVersion, kind: "PersistentVolumeClaim", plural: "persistentvolumeclaims", singular: "persistentvolumeclaim", short: []string{"pvc"},
	})
	k.Namespaced = true
	return k
}
