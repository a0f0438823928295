// Package backends computes the endpoint addresses of a port of a Service.
package backends

import (
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

// IsTCP reports whether protocol p is TCP. An empty protocol means TCP.
func IsTCP(p corev1.Protocol) bool { return p == corev1.ProtocolTCP || p == "" }

// Endpoints returns the sorted endpoint addresses for a port of Service s, from its EndpointSlices.
// If no endpoint is ready, it returns the endpoints that are terminating and still serving. All
// addresses are of one IP family: the first family of the Service that has endpoints.
func Endpoints(s *corev1.Service, port *corev1.ServicePort, all []*discoveryv1.EndpointSlice) []netip.AddrPort {
	for _, family := range addressFamilies(s, all) {
		var ready, ending []netip.AddrPort
		for _, slice := range all {
			if slice.AddressType == family {
				ready, ending = appendEndpoints(slice, port.Name, ready, ending)
			}
		}
		out := ready
		if len(ready) == 0 {
			out = ending
		}
		if len(out) > 0 {
			slices.SortFunc(out, netip.AddrPort.Compare)
			return slices.Compact(out)
		}
	}
	return nil
}

// addressFamilies returns the address types of a Service in its order of preference, followed by
// other types for which it has EndpointSlices.
func addressFamilies(s *corev1.Service, all []*discoveryv1.EndpointSlice) []discoveryv1.AddressType {
	var out []discoveryv1.AddressType
	for _, f := range s.Spec.IPFamilies {
		out = append(out, discoveryv1.AddressType(f))
	}
	for _, slice := range all {
		if !slices.Contains(out, slice.AddressType) && slice.AddressType != discoveryv1.AddressTypeFQDN {
			out = append(out, slice.AddressType)
		}
	}
	return out
}

func appendEndpoints(slice *discoveryv1.EndpointSlice, port string, ready, ending []netip.AddrPort) (
	_, _ []netip.AddrPort,
) {
	is := func(b *bool, unset bool) bool { return b == nil && unset || b != nil && *b }
	for _, p := range slice.Ports {
		if p.Port == nil || *p.Port < 1 || *p.Port > 65535 {
			continue // the API accepts numbers that are not valid ports
		}
		if p.Name == nil && port != "" || p.Name != nil && *p.Name != port || p.Protocol != nil && !IsTCP(*p.Protocol) {
			continue
		}
		for _, e := range slice.Endpoints {
			if len(e.Addresses) == 0 {
				continue
			}
			addr, err := netip.ParseAddr(e.Addresses[0]) // all addresses of an endpoint are equivalent
			if err != nil {
				continue
			}
			switch at := netip.AddrPortFrom(addr, uint16(*p.Port)); {
			case is(e.Conditions.Ready, true):
				ready = append(ready, at)
			case is(e.Conditions.Serving, false) && is(e.Conditions.Terminating, false):
				ending = append(ending, at)
			}
		}
	}
	return ready, ending
}
