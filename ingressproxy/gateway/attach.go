package gateway

import (
	"strings"

	"k8s.io/apimachinery/pkg/labels"

	gw "sigs.k8s.io/gateway-api/apis/v1"

	"keelson.dev/keelson/ingressproxy/route"
)

// reasonHostnameConflict is for a route that another of the other kind leaves no host to.
const reasonHostnameConflict gw.RouteConditionReason = "HostnameConflict"

// attach attaches a route to the listeners that a reference means, and says why there is none. Routes come in the order
// of their precedence.
func (w *World) attach(g *Gateway, r *Route, ref gw.ParentReference) *problem {
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
		return problemf(gw.RouteReasonNoMatchingParent, "the Gateway has no listener that the reference means%s", section(ref))
	}
	for _, l := range meant {
		if l.takes(r.kind) && w.from(g, l, r.meta.Namespace) {
			allowed = append(allowed, l)
		}
	}
	if len(allowed) == 0 {
		return problemf(gw.RouteReasonNotAllowedByListeners, "no listener allows a %s of namespace %s%s", r.kind, r.meta.Namespace, section(ref))
	}
	hosts := map[*Listener][]route.Host{}
	for _, l := range allowed {
		if both, ok := common(l.host, r.hostnames); ok {
			matching = append(matching, l)
			hosts[l] = both
		}
	}
	if len(matching) == 0 {
		return problemf(gw.RouteReasonNoMatchingListenerHostname, "no listener that allows it has a hostname in common with %s", joined(r.hostnames))
	}
	if r.refused != nil {
		return r.refused
	}
	var other *Route
	attached := false
	for _, l := range matching {
		if o := l.otherKind(r, hosts[l]); o != nil {
			other = o
			continue
		}
		l.add(r, hosts[l])
		attached = true
	}
	if !attached {
		return problemf(reasonHostnameConflict, "%s, which is older or comes first in the alphabet, has the same hosts: HTTPRoutes and GRPCRoutes do not share a host", other)
	}
	return nil
}

func section(ref gw.ParentReference) string {
	if ref.SectionName == nil {
		return ""
	}
	return " (sectionName " + string(*ref.SectionName) + ")"
}

func joined(names []gw.Hostname) string {
	out := make([]string, len(names))
	for i, n := range names {
		out[i] = string(n)
	}
	return strings.Join(out, ", ")
}

// from says whether a listener allows routes of a namespace.
func (w *World) from(g *Gateway, l *Listener, namespace string) bool {
	if l.namespaces == nil {
		return namespace == g.Object.Namespace
	}
	if l.namespaces.Empty() {
		return true // all
	}
	has, ok := w.Namespace(namespace)
	return ok && l.namespaces.Matches(labels.Set(has))
}

// common are the hosts of a route below a listener's; none is all of them.
func common(listener route.Host, names []gw.Hostname) (hosts []route.Host, ok bool) {
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

// otherKind is a route of the other kind that is attached already and has a host in common.
func (l *Listener) otherKind(r *Route, hosts []route.Host) *Route {
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

// add attaches a route once, whatever the number of its references.
func (l *Listener) add(r *Route, hosts []route.Host) {
	for _, a := range l.attached {
		if a.route == r {
			return
		}
	}
	l.attached = append(l.attached, attachment{route: r, hosts: hosts})
}
