package live

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	gw "sigs.k8s.io/gateway-api/apis/v1"

	"keelson.dev/keelson/ingressproxy/gateway"
	"keelson.dev/keelson/ingressproxy/pairs"
	"keelson.dev/keelson/ingressproxy/route"
)

// beta is where ReferenceGrants were before v1, with the same fields.
var (
	v1   = schema.GroupVersion{Group: gw.GroupName, Version: "v1"}
	beta = schema.GroupVersion{Group: gw.GroupName, Version: "v1beta1"}
)

// Gateway serves one Gateway and its routes. Reserved are ports that the proxy has for itself.
func Gateway(namespace, name string, reserved []int32) Source {
	keys := &pairs.Keys{}
	return Source{
		kinds: []kind{
			services, slices,
			{"namespaces", []schema.GroupVersion{corev1.SchemeGroupVersion}, &corev1.Namespace{}},
			{"gatewayclasses", []schema.GroupVersion{v1}, &gw.GatewayClass{}},
			{"gateways", []schema.GroupVersion{v1}, &gw.Gateway{}},
			{"httproutes", []schema.GroupVersion{v1}, &gw.HTTPRoute{}},
			{"grpcroutes", []schema.GroupVersion{v1}, &gw.GRPCRoute{}},
			{"referencegrants", []schema.GroupVersion{v1, beta}, &gw.ReferenceGrant{}},
		},
		table: func(o *Objects) *route.Table {
			if o.by["gateways"] == nil { // without the Gateway's own kind nothing can be known
				return nil
			}
			w := o.gateways(namespace, name)
			w.Reserved, w.Keys = reserved, keys
			return gateway.Judge(w).Table(namespace, name)
		},
	}
}

// gateways is what the informers know. Of Gateways it has the proxy's own.
func (o *Objects) gateways(namespace, name string) *gateway.World {
	w := &gateway.World{
		Classes: list[*gw.GatewayClass](o.by["gatewayclasses"]), HTTPRoutes: list[*gw.HTTPRoute](o.by["httproutes"]),
		GRPCRoutes: list[*gw.GRPCRoute](o.by["grpcroutes"]), Grants: list[*gw.ReferenceGrant](o.by["referencegrants"]),
		Service: o.Service, Slices: o.Slices, Secret: o.Secret,
		Namespace: func(name string) (map[string]string, bool) {
			n := get[*corev1.Namespace](o.by["namespaces"], name)
			if n == nil {
				return nil, false
			}
			return n.Labels, true
		},
	}
	if g := get[*gw.Gateway](o.by["gateways"], namespace+"/"+name); g != nil {
		w.Gateways = []*gw.Gateway{g}
	}
	return w
}
