package kinds

import (
	appsv1 "k8s.io/api/apps/v1"

	"keelson.dev/keelson/controlplane/api"
)

func deploymentKind() *api.Kind {
	k := newKind[appsv1.Deployment, appsv1.DeploymentList](names{
		gv: appsv1.SchemeGroupVersion, kind: "Deployment", plural: "deployments", singular: "deployment", short: []string{"deploy"}, all: true,
	})
	k.Namespaced = true
	return k
}
