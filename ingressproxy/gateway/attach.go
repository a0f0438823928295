package gateway

import (
	"strings"

	"k8s.io/apimachinery/pkg/labels"

	gw "sigs.k8s.io/gateway-api/apis/v1"

	"keelson.dev/keelson/ingressproxy/route"
)

// reasonHostnameConflict is the condition reason of a route with hosts that all belong to a route
// of the other kind (HTTPRoute or GRPCRoute).
const reasonHostnameConflict gw.RouteConditionReason = "HostnameConflict"

// attachRoute attaches route r to the listeners of Gateway g that parent reference ref selects. If
// r cannot be attached to any listener, it returns the reason. Routes must be passed in their order
// of precedence.
func (w *World) attachRoute(g *Gateway, r *Route, ref gw.ParentReference) *problem {
	var meant, allowed, matching []*Listener
	for _, l := range g.Listeners {
		if ref.SectionName != nil && *ref.SectionName != "" && *ref.SectionName != l.spec.Name {
			continue
		}
		if ref.Port != nil && *ref.Port != 0 && *ref.Port != l.spec.Port {
			continue
		}
		meant = append(meant, l)
	}
	if len(meant) == 0 {
		return problemf(gw.RouteReasonNoMatchingParent, "the Gateway has no listener that matches the reference%s",
			sectionSuffix(ref))
	}
	for _, l := range meant {
		if l.allowsKind(r.kind) && w.allowsNamespace(g, l, r.meta.Namespace) {
			allowed = append(allowed, l)
		}
	}
	if len(allowed) == 0 {
		return problemf(gw.RouteReasonNotAllowedByListeners, "no listener allows a %s of namespace %s%s", r.kind,
			r.meta.Namespace, sectionSuffix(ref))
	}
	hosts := map[*Listener][]route.Host{}
	for _, l := range allowed {
		if both, ok := commonHosts(l.host, r.hostnames); ok {
			matching = append(matching, l)
			hosts[l] = both
		}
	}
	if len(matching) == 0 {
		return problemf(gw.RouteReasonNoMatchingListenerHostname,
			"no listener that allows the route has a hostname in common with %s", joinHostnames(r.hostnames))
	}
	if r.refused != nil {
		return r.refused
	}
	var other *Route
	attached := false
	for _, l := range matching {
		if o := l.conflictingRoute(r, hosts[l]); o != nil {
			other = o
			continue
		}
		l.addAttachment(r, hosts[l])
		attached = true
	}
	if !attached {
		return problemf(reasonHostnameConflict,
			"%s, which has precedence, has the same hosts: an HTTPRoute and a GRPCRoute cannot share a host", other)
	}
	return nil
}

func sectionSuffix(ref gw.ParentReference) string {
	if ref.SectionName == nil {
		return ""
	}
	return " (sectionName " + string(*ref.SectionName) + ")"
}

func joinHostnames(names []gw.Hostname) string {
	out := make([]string, len(names))
	for i, n := range names {
		out[i] = string(n)
	}
	return strings.Join(out, ", ")
}

// allowsNamespace reports whether listener l of Gateway g allows routes of a namespace.
func (w *World) allowsNamespace(g *Gateway, l *Listener, namespace string) bool {
	if l.namespaces == nil {
		return namespace == g.Object.Namespace
	}
	if l.namespaces.Empty() {
		return true // all namespaces
	}
	has, ok := w.Namespace(namespace)
	return ok && l.namespaces.Matches(labels.Set(has))
}

// commonHosts returns the hosts that a listener has in common with a route that has these
// hostnames. ok is false if there are none. If names is empty, the route matches all hosts of the
// listener: hosts is then empty and ok is true.
func commonHosts(listener route.Host, names []gw.Hostname) (hosts []route.Host, ok bool) {
	if len(names) == 0 {
		return nil, true
	}
	for _, n := range names {
		h, err := route.ParseHost(string(n), route.AnyLabels)
		if err != nil {
			continue
		}
		if both, ok := listener.Intersect(h); ok {
			hosts = append(hosts, both)
		}
	}
	return hosts, len(hosts) > 0
}

// conflictingRoute returns a route of the other kind (HTTPRoute or GRPCRoute) that is already
// attached and has a host in common, or nil.
func (l *Listener) conflictingRoute(r *Route, hosts []route.Host) *Route {
	every := func(h []route.Host) []route.Host {
		if len(h) == 0 {
			return []route.Host{l.host}
		}
		return h
	}
	for _, a := range l.attached {
		if a.route.kind == r.kind {
			continue
		}
		for _, x := range every(a.hosts) {
			for _, y := range every(hosts) {
				if _, both := x.Intersect(y); both {
					return a.route
				}
			}
		}
	}
	return nil
}

// addAttachment attaches route r to listener l for these hosts. A repeated call has no effect.
func (l *Listener) addAttachment(r *Route, hosts []route.Host) {
	for _, a := range l.attached {
		if a.route == r {
			return
		}
	}
	l.attached = append(l.attached, attachment{route: r, hosts: hosts})
}
