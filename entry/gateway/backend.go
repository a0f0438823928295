package gateway

import (
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	gw "sigs.k8s.io/gateway-api/apis/v1"

	"keelson.dev/keelson/entry/route"
)

// target is a port of a Service, and what its endpoints speak.
type target struct {
	namespace, service string
	port               int32
	protocol           route.BackendProtocol
}

// key is the target's pool in a table.
func (t target) key() string {
	return fmt.Sprintf("service/%s/%s:%d/%s", t.namespace, t.service, t.port, t.protocol)
}

// target follows a reference of a route.
func (w *World) target(r *Route, ref gw.BackendObjectReference) (target, *problem) {
	if group, kind := deref(ref.Group, ""), deref(ref.Kind, "Service"); group != "" || kind != "Service" {
		return target{}, problemf(gw.RouteReasonInvalidKind, "a backend is a Service, not a %s of group %q", kind, group)
	}
	in := deref(ref.Namespace, r.meta.Namespace)
	if in != r.meta.Namespace && !w.granted(r.kind, r.meta.Namespace, "Service", in, string(ref.Name)) {
		return target{}, problemf(gw.RouteReasonRefNotPermitted, "no ReferenceGrant in namespace %s lets %ss of namespace %s refer to Service %s",
			in, r.kind, r.meta.Namespace, ref.Name)
	}
	s := w.Service(in, string(ref.Name))
	if s == nil {
		return target{}, problemf(gw.RouteReasonBackendNotFound, "Service %s/%s does not exist", in, ref.Name)
	}
	if s.Spec.Type == corev1.ServiceTypeExternalName {
		return target{}, problemf(gw.RouteReasonUnsupportedValue, "Service %s/%s is a name outside of the cluster, which is no backend", in, ref.Name)
	}
	if ref.Port == nil {
		return target{}, problemf(gw.RouteReasonUnsupportedValue, "no port of Service %s/%s is named", in, ref.Name)
	}
	i := slices.IndexFunc(s.Spec.Ports, func(p corev1.ServicePort) bool { return p.Port == *ref.Port && isTCP(p.Protocol) })
	if i < 0 {
		return target{}, problemf(gw.RouteReasonBackendNotFound, "Service %s/%s has no TCP port %d", in, ref.Name, *ref.Port)
	}
	t := target{namespace: in, service: s.Name, port: *ref.Port}
	var ok bool
	if t.protocol, ok = spoken(r.kind, deref(s.Spec.Ports[i].AppProtocol, "")); !ok {
		return target{}, problemf(gw.RouteReasonUnsupportedProtocol, "port %d of Service %s/%s has appProtocol %q, which backends of an %s cannot have",
			*ref.Port, in, ref.Name, *s.Spec.Ports[i].AppProtocol, r.kind)
	}
	return t, nil
}

func isTCP(p corev1.Protocol) bool { return p == corev1.ProtocolTCP || p == "" }

// spoken is what an appProtocol means.
func spoken(kind, appProtocol string) (route.BackendProtocol, bool) {
	switch appProtocol {
	case "kubernetes.io/h2c", "h2c", "grpc":
		return route.H2C, true
	case "":
		if kind == grpcRoute {
			return route.H2C, true
		}
		return route.HTTP1, true
	case "http", "kubernetes.io/ws":
		return route.HTTP1, kind == httpRoute
	}
	return "", false
}

// pool is a target's endpoints: the ready ones, or where there are none, those that end and still serve.
func (w *World) pool(t target) route.Pool {
	out := route.Pool{Protocol: t.protocol}
	s := w.Service(t.namespace, t.service)
	if s == nil {
		return out
	}
	i := slices.IndexFunc(s.Spec.Ports, func(p corev1.ServicePort) bool { return p.Port == t.port && isTCP(p.Protocol) })
	if i < 0 {
		return out
	}
	all := w.Slices(t.namespace, t.service)
	for _, family := range families(s, all) {
		var ready, ending []netip.AddrPort
		for _, slice := range all {
			if slice.AddressType == family {
				ready, ending = endpoints(slice, s.Spec.Ports[i].Name, ready, ending)
			}
		}
		if out.Endpoints = ready; len(ready) == 0 {
			out.Endpoints = ending
		}
		if len(out.Endpoints) > 0 {
			break
		}
	}
	slices.SortFunc(out.Endpoints, netip.AddrPort.Compare)
	out.Endpoints = slices.Compact(out.Endpoints)
	out.ByClient = s.Spec.SessionAffinity == corev1.ServiceAffinityClientIP
	return out
}

// families are those of a Service, the first one in front: an endpoint that has both is asked by one.
func families(s *corev1.Service, all []*discoveryv1.EndpointSlice) []discoveryv1.AddressType {
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

func endpoints(slice *discoveryv1.EndpointSlice, port string, ready, ending []netip.AddrPort) (_, _ []netip.AddrPort) {
	for _, p := range slice.Ports {
		if p.Port == nil || deref(p.Name, "") != port || p.Protocol != nil && !isTCP(*p.Protocol) {
			continue
		}
		for _, e := range slice.Endpoints {
			if len(e.Addresses) == 0 {
				continue
			}
			addr, err := netip.ParseAddr(e.Addresses[0])
			if err != nil {
				continue
			}
			at := netip.AddrPortFrom(addr, uint16(*p.Port))
			c := e.Conditions
			if c.Ready == nil || *c.Ready {
				ready = append(ready, at)
			} else if c.Serving != nil && *c.Serving && c.Terminating != nil && *c.Terminating {
				ending = append(ending, at)
			}
		}
	}
	return ready, ending
}
