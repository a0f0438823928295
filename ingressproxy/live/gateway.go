package live

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	gw "sigs.k8s.io/gateway-api/apis/v1"

	"keelson.dev/keelson/ingressproxy/gateway"
	"keelson.dev/keelson/ingressproxy/pairs"
	"keelson.dev/keelson/ingressproxy/route"
)

// gatewayV1Beta1 is the version v1beta1 of ReferenceGrant. It has the same fields as v1.
var (
	gatewayV1      = schema.GroupVersion{Group: gw.GroupName, Version: "v1"}
	gatewayV1Beta1 = schema.GroupVersion{Group: gw.GroupName, Version: "v1beta1"}
)

// Gateway returns the Source for the proxy of one Gateway. reserved are ports that the proxy uses
// itself.
func Gateway(namespace, name string, reserved []int32) Source {
	keys := &pairs.Cache{}
	return Source{
		kinds: []kind{
			services, endpointSlices,
			{"namespaces", []schema.GroupVersion{corev1.SchemeGroupVersion}, &corev1.Namespace{}},
			{"gatewayclasses", []schema.GroupVersion{gatewayV1}, &gw.GatewayClass{}},
			{"gateways", []schema.GroupVersion{gatewayV1}, &gw.Gateway{}},
			{"httproutes", []schema.GroupVersion{gatewayV1}, &gw.HTTPRoute{}},
			{"grpcroutes", []schema.GroupVersion{gatewayV1}, &gw.GRPCRoute{}},
			{"referencegrants", []schema.GroupVersion{gatewayV1, gatewayV1Beta1}, &gw.ReferenceGrant{}},
		},
		table: func(o *Objects) *route.Table {
			if o.informers["gateways"] == nil { // the Gateway API is not installed
				return nil
			}
			w := o.gatewayWorld(namespace, name)
			w.Reserved, w.Keys = reserved, keys
			return gateway.Evaluate(w).Table(namespace, name)
		},
	}
}

// gatewayWorld returns the cached objects as the input of gateway.Evaluate. The only Gateway in it
// is that of this proxy.
func (o *Objects) gatewayWorld(namespace, name string) *gateway.World {
	w := &gateway.World{
		Classes:    listObjects[*gw.GatewayClass](o.informers["gatewayclasses"]),
		HTTPRoutes: listObjects[*gw.HTTPRoute](o.informers["httproutes"]),
		GRPCRoutes: listObjects[*gw.GRPCRoute](o.informers["grpcroutes"]),
		Grants:     listObjects[*gw.ReferenceGrant](o.informers["referencegrants"]),
		Service:    o.Service, Slices: o.Slices, Secret: o.Secret,
		Namespace: func(name string) (map[string]string, bool) {
			n := getObject[*corev1.Namespace](o.informers["namespaces"], name)
			if n == nil {
				return nil, false
			}
			return n.Labels, true
		},
	}
	if g := getObject[*gw.Gateway](o.informers["gateways"], namespace+"/"+name); g != nil {
		w.Gateways = []*gw.Gateway{g}
	}
	return w
}
