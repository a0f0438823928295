package ingress

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"keelson.dev/keelson/ingressproxy/backends"
	"keelson.dev/keelson/ingressproxy/route"
)

// NewPool returns the pool of the endpoints of a port of Service s. endpointSlices are the
// EndpointSlices of s. It returns an error if the appProtocol of the port is not supported.
func NewPool(
	s *corev1.Service, port *corev1.ServicePort, endpointSlices []*discoveryv1.EndpointSlice,
) (route.Pool, error) {
	p := route.Pool{ByClient: s.Spec.SessionAffinity == corev1.ServiceAffinityClientIP}
	if port.AppProtocol != nil {
		switch *port.AppProtocol {
		case "http", "kubernetes.io/ws":
		case "kubernetes.io/h2c", "grpc":
			p.Protocol = route.H2C
		case "https", "kubernetes.io/wss":
			p.Protocol = route.TLS
		default:
			return p,
				fmt.Errorf("its appProtocol %q is none of http, https, grpc, kubernetes.io/h2c, kubernetes.io/ws, "+
					"kubernetes.io/wss: its requests get status 503", *port.AppProtocol)
		}
	}
	p.Endpoints = backends.Endpoints(s, port, endpointSlices)
	return p, nil
}
