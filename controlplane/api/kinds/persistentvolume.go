package kinds

import (
	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api"
)

func persistentVolumeKind() *api.Kind {
	k := newKind[corev1.PersistentVolume, corev1.PersistentVolumeList](names{
		gv: corev1.SchemeGroupVersion, kind: "PersistentVolume", plural: "persistentvolumes", singular: "persistentvolume", short: []string{"pv"},
	})
	return k
}
