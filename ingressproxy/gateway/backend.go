package gateway

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	gw "sigs.k8s.io/gateway-api/apis/v1"

	"keelson.dev/keelson/ingressproxy/backends"
	"keelson.dev/keelson/ingressproxy/route"
)

// backendTarget is a Service port to which a route sends requests, and the protocol of its
// endpoints.
type backendTarget struct {
	namespace, service string
	port               int32
	protocol           route.BackendProtocol
}

// poolKey returns the key for the endpoints of t in the field Pools of route.Table.
func (t backendTarget) poolKey() string {
	return fmt.Sprintf("service/%s/%s:%d/%s", t.namespace, t.service, t.port, t.protocol)
}

// resolveBackendRef returns the Service port that a backend reference of route r names. It returns
// a problem if the reference is not supported, not granted, or names no existing object.
func (w *World) resolveBackendRef(r *Route, ref gw.BackendObjectReference) (backendTarget, *problem) {
	if group, kind := stringOr(ref.Group, ""), stringOr(ref.Kind, "Service"); group != "" || kind != "Service" {
		return backendTarget{}, problemf(gw.RouteReasonInvalidKind, "a backend is a Service, not a %s of group %q",
			kind, group)
	}
	in := stringOr(ref.Namespace, r.meta.Namespace)
	if in != r.meta.Namespace && !w.grantsReference(r.kind, r.meta.Namespace, "Service", in, string(ref.Name)) {
		return backendTarget{}, problemf(gw.RouteReasonRefNotPermitted,
			"no ReferenceGrant in namespace %s allows %ss of namespace %s to refer to Service %s",
			in, r.kind, r.meta.Namespace, ref.Name)
	}
	s := w.Service(in, string(ref.Name))
	if s == nil {
		return backendTarget{}, problemf(gw.RouteReasonBackendNotFound, "Service %s/%s does not exist", in, ref.Name)
	}
	if s.Spec.Type == corev1.ServiceTypeExternalName {
		return backendTarget{}, problemf(gw.RouteReasonUnsupportedValue,
			"Service %s/%s is of type ExternalName, which is not supported as a backend", in, ref.Name)
	}
	if ref.Port == nil {
		return backendTarget{}, problemf(gw.RouteReasonUnsupportedValue,
			"the reference to Service %s/%s has no port", in, ref.Name)
	}
	i := slices.IndexFunc(s.Spec.Ports, func(p corev1.ServicePort) bool {
		return p.Port == *ref.Port && backends.IsTCP(p.Protocol)
	})
	if i < 0 {
		return backendTarget{}, problemf(gw.RouteReasonBackendNotFound, "Service %s/%s has no TCP port %d", in,
			ref.Name, *ref.Port)
	}
	t := backendTarget{namespace: in, service: s.Name, port: *ref.Port}
	var ok bool
	if t.protocol, ok = backendProtocol(r.kind, stringOr(s.Spec.Ports[i].AppProtocol, "")); !ok {
		return backendTarget{}, problemf(gw.RouteReasonUnsupportedProtocol,
			"port %d of Service %s/%s has appProtocol %q, which backends of an %s cannot have",
			*ref.Port, in, ref.Name, *s.Spec.Ports[i].AppProtocol, r.kind)
	}
	return t, nil
}

// backendProtocol returns the protocol of a Service port with this appProtocol. It returns false if
// routes of this kind do not support it.
func backendProtocol(kind, appProtocol string) (route.BackendProtocol, bool) {
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

// poolOf returns the pool of endpoints of t. The pool has no endpoints if the Service or its port
// no longer exists.
func (w *World) poolOf(t backendTarget) route.Pool {
	out := route.Pool{Protocol: t.protocol}
	s := w.Service(t.namespace, t.service)
	if s == nil {
		return out
	}
	i := slices.IndexFunc(s.Spec.Ports, func(p corev1.ServicePort) bool {
		return p.Port == t.port && backends.IsTCP(p.Protocol)
	})
	if i < 0 {
		return out
	}
	out.Endpoints = backends.Endpoints(s, &s.Spec.Ports[i], w.Slices(t.namespace, t.service))
	out.ByClient = s.Spec.SessionAffinity == corev1.ServiceAffinityClientIP
	return out
}
