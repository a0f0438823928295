package kinds

import (
	appsv1 "k8s.io/api/apps/v1"

	"keelson.dev/keelson/controlplane/api"
)

func replicaSetKind() *api.Kind {
	k := newKind[appsv1.ReplicaSet, appsv1.ReplicaSetList](names{
		gv: appsv1.SchemeGroupVersion, kind: "ReplicaSet", plural: "replicasets", singular: "replicaset", short: []string{"rs"}, all: true,
	})
	k.Namespaced = true
	return k
}
