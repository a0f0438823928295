package kinds

import (
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"keelson.dev/keelson/controlplane/api"
)

func endpointsKind() *api.Kind {
	k := newKind[corev1.Endpoints, corev1.EndpointsList](names{
		gv: corev1.SchemeGroupVersion, kind: "Endpoints", plural: "endpoints", singular: "endpoints", short: []string{"ep"},
	})
	k.Namespaced = true
	return k
}

func endpointSliceKind() *api.Kind {
	k := newKind[discoveryv1.EndpointSlice, discoveryv1.EndpointSliceList](names{
		gv: discoveryv1.SchemeGroupVersion, kind: "EndpointSlice", plural: "endpointslices", singular: "endpointslice",
	})
	k.Namespaced = true
	return k
}
