package ingress

import (
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"keelson.dev/keelson/entry/route"
)

// Pool is the endpoints behind a port of a Service, in order of their addresses: the ready ones, or, where none is, those
// that still serve while they end. The error is about the port's appProtocol.
func Pool(s *corev1.Service, port *corev1.ServicePort, slicesOf []*discoveryv1.EndpointSlice) (route.Pool, error) {
	p := route.Pool{ByClient: s.Spec.SessionAffinity == corev1.ServiceAffinityClientIP}
	if port.AppProtocol != nil {
		switch *port.AppProtocol {
		case "http", "kubernetes.io/ws":
		case "kubernetes.io/h2c", "grpc":
			p.Protocol = route.H2C
		case "https", "kubernetes.io/wss":
			p.Protocol = route.TLS
		default:
			return p, fmt.Errorf("its appProtocol %q is none of http, https, grpc, kubernetes.io/h2c, kubernetes.io/ws, kubernetes.io/wss: its requests are answered 503", *port.AppProtocol)
		}
	}
	family := discoveryv1.AddressTypeIPv4
	if len(s.Spec.IPFamilies) > 0 {
		family = discoveryv1.AddressType(s.Spec.IPFamilies[0])
	}
	var ready, ending []netip.AddrPort
	for _, slice := range slicesOf {
		if slice.AddressType != family && len(s.Spec.IPFamilies) > 0 {
			continue
		}
		number := uint16(0)
		for _, sp := range slice.Ports {
			if sp.Port != nil && (sp.Name == nil && port.Name == "" || sp.Name != nil && *sp.Name == port.Name) && (sp.Protocol == nil || *sp.Protocol == corev1.ProtocolTCP) {
				number = uint16(*sp.Port)
			}
		}
		if number == 0 {
			continue
		}
		for _, e := range slice.Endpoints {
			if len(e.Addresses) == 0 {
				continue
			}
			// All addresses of an endpoint lead to the same place.
			addr, err := netip.ParseAddr(e.Addresses[0])
			if err != nil {
				continue
			}
			at := netip.AddrPortFrom(addr, number)
			switch is := func(b *bool, unset bool) bool { return b == nil && unset || b != nil && *b }; {
			case is(e.Conditions.Ready, true):
				ready = append(ready, at)
			case is(e.Conditions.Serving, false) && is(e.Conditions.Terminating, false):
				ending = append(ending, at)
			}
		}
	}
	if p.Endpoints = ready; len(ready) == 0 {
		p.Endpoints = ending
	}
	slices.SortFunc(p.Endpoints, netip.AddrPort.Compare)
	p.Endpoints = slices.Compact(p.Endpoints)
	return p, nil
}
