package live

import (
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/ingressproxy/ingress"
	"keelson.dev/keelson/ingressproxy/pairs"
	"keelson.dev/keelson/ingressproxy/route"
)

// Ingresses returns the Source for the proxies of an IngressClass.
func Ingresses(class string) Source {
	keys := &pairs.Cache{}
	return Source{
		kinds: []kind{services, endpointSlices, {"ingresses", []schema.GroupVersion{networkingv1.SchemeGroupVersion},
			&networkingv1.Ingress{}}},
		table: func(o *Objects) *route.Table {
			return ingress.Translate(class, listObjects[*networkingv1.Ingress](o.informers["ingresses"]), o, keys)
		},
	}
}
