package gateway

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	gw "sigs.k8s.io/gateway-api/apis/v1"

	"keelson.dev/keelson/ingressproxy/backends"
	"keelson.dev/keelson/ingressproxy/route"
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
	i := slices.IndexFunc(s.Spec.Ports, func(p corev1.ServicePort) bool { return p.Port == *ref.Port && backends.TCP(p.Protocol) })
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

// pool is a target's endpoints.
func (w *World) pool(t target) route.Pool {
	out := route.Pool{Protocol: t.protocol}
	s := w.Service(t.namespace, t.service)
	if s == nil {
		return out
	}
	i := slices.IndexFunc(s.Spec.Ports, func(p corev1.ServicePort) bool { return p.Port == t.port && backends.TCP(p.Protocol) })
	if i < 0 {
		return out
	}
	out.Endpoints = backends.Of(s, &s.Spec.Ports[i], w.Slices(t.namespace, t.service))
	out.ByClient = s.Spec.SessionAffinity == corev1.ServiceAffinityClientIP
	return out
}
