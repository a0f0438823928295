package nettrace

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	gw "sigs.k8s.io/gateway-api/apis/v1"

	"keelson.dev/keelson/ingressproxy/gateway"
	ingresstable "keelson.dev/keelson/ingressproxy/ingress"
	"keelson.dev/keelson/ingressproxy/route"
)

// Entrances contains the Ingress and Gateway API objects that route requests from outside the
// cluster to Services.
type Entrances struct {
	Classes   []*networkingv1.IngressClass
	Ingresses []*networkingv1.Ingress
	Secrets   []*corev1.Secret // the Secrets that TLSSecretNames returns, as far as they exist

	GatewayClasses []*gw.GatewayClass
	Gateways       []*gw.Gateway
	HTTPRoutes     []*gw.HTTPRoute
	GRPCRoutes     []*gw.GRPCRoute
	Grants         []*gw.ReferenceGrant
}

// Names of the lists in Entrances. World.Unread contains the names of the lists that could not be
// read.
const (
	IngressClasses = "ingressclasses"
	Ingresses      = "ingresses"
	Secrets        = "secrets"
	GatewayClasses = "gatewayclasses"
	Gateways       = "gateways"
)

const (
	// entryNamespace is the namespace in which Keelson runs its ingress proxies and their Services.
	entryNamespace = "keelson-entry"
	// forGateway is an annotation of a Service of ingress proxies. Its value is the namespace/name
	// of the Gateway that the proxies serve.
	forGateway = "keelson.dev/for-gateway"
	// proxyStatus is the port of the status endpoint of each ingress proxy. Listeners of Gateways
	// cannot use it.
	proxyStatus = 10254
)

// entryPoint is an entry point for requests from outside the cluster: an IngressClass or a Gateway
// that Keelson's ingress proxies serve.
type entryPoint struct {
	class   string                      // name of the IngressClass; empty for a Gateway
	gateway *gateway.Gateway            // the Gateway; nil for an IngressClass
	judged  *gateway.Evaluation         // the evaluation of all Gateways; nil for an IngressClass
	service *corev1.Service             // the Service of the ingress proxies; nil if it does not exist
	table   func() *route.Table         // computes the routing table of the ingress proxies
	problem func() (says string)        // returns why the ingress proxies serve nothing, or ""
	wrong   func(c hostObject) []string // returns the problems of the Ingress or the route in c
}

func (d *entryPoint) String() string {
	if d.gateway != nil {
		return "gateway " + d.gateway.Object.Namespace + "/" + d.gateway.Object.Name
	}
	return "ingress class " + d.class
}

// hostObject is an Ingress, a route or a Gateway listener that names the target's host. Its entry
// point is the IngressClass or the Gateway to which it belongs.
type hostObject struct {
	what    string // kind and name of the object, such as "ingress shop/web"
	entry   *entryPoint
	why     string // why Keelson does not serve the object; set if entry is nil
	ingress *networkingv1.Ingress
	route   *gateway.Route
}

// worldObjects gives read access to the objects of a World. The packages that compute routing
// tables use it.
type worldObjects struct{ *World }

// Service returns the Service with the given namespace and name. It returns nil if the World does
// not contain it.
func (g worldObjects) Service(namespace, name string) *corev1.Service {
	for i := range g.Services {
		if s := &g.Services[i]; s.Namespace == namespace && s.Name == name {
			return s
		}
	}
	return nil
}

// Slices returns those EndpointSlices in the World that belong to the given Service.
func (g worldObjects) Slices(namespace, service string) (out []*discoveryv1.EndpointSlice) {
	for i := range g.World.Slices {
		if s := &g.World.Slices[i]; s.Namespace == namespace && s.Labels[discoveryv1.LabelServiceName] == service {
			out = append(out, s)
		}
	}
	return out
}

// Secret returns the Secret with the given namespace and name. It returns nil if it is not in
// World.Entrances.Secrets.
func (g worldObjects) Secret(namespace, name string) *corev1.Secret {
	for _, s := range g.Entrances.Secrets {
		if s.Namespace == namespace && s.Name == name {
			return s
		}
	}
	return nil
}

func (g worldObjects) labelsOf(name string) (map[string]string, bool) {
	for _, n := range g.Namespaces {
		if n.Name == name {
			return n.Labels, true
		}
	}
	return nil, false
}

// listEntryPoints returns all entry points for requests from outside the cluster: the
// IngressClasses and Gateways that Keelson's ingress proxies serve.
func (x proxyTracer) listEntryPoints() (out []*entryPoint) {
	e, w := x.trace.Entrances, worldObjects{x.trace.World}
	for _, c := range e.Classes {
		if c.Spec.Controller != ingresstable.Controller || c.DeletionTimestamp != nil {
			continue
		}
		out = append(out, &entryPoint{class: c.Name, service: w.Service(entryNamespace, c.Name),
			table:   func() *route.Table { return ingresstable.Translate(c.Name, e.Ingresses, w, nil) },
			problem: func() string { return "" },
			wrong: func(c hostObject) []string {
				if c.ingress == nil {
					return nil
				}
				return ingresstable.Problems(c.ingress, w)
			}})
	}
	judged := gateway.Evaluate(&gateway.World{Classes: e.GatewayClasses, Gateways: e.Gateways, HTTPRoutes: e.HTTPRoutes,
		GRPCRoutes: e.GRPCRoutes, Grants: e.Grants,
		Namespace: w.labelsOf, Service: w.Service, Secret: w.Secret, Slices: w.Slices, Reserved: []int32{proxyStatus}})
	for _, g := range judged.Gateways {
		d := &entryPoint{gateway: g, judged: judged, table: func() *route.Table {
			return judged.Table(g.Object.Namespace, g.Object.Name)
		},
			problem: func() string {
				return deniedReason(g.Status(gateway.ProxyState{}, metav1.Time{}).Conditions,
					string(gw.GatewayConditionAccepted))
			},
			wrong: func(c hostObject) []string { return routeProblems(c.route, g) }}
		for i := range x.trace.Services {
			if s := &x.trace.Services[i]; s.Namespace == entryNamespace &&
				s.Annotations[forGateway] == g.Object.Namespace+"/"+g.Object.Name {
				d.service = s
			}
		}
		out = append(out, d)
	}
	return out
}

// deniedReason returns the message and the reason of the first condition in list that has status
// False and one of the given types. It returns "" if there is no such condition.
func deniedReason(list []metav1.Condition, conditionTypes ...string) string {
	for _, c := range list {
		if c.Status == metav1.ConditionFalse && slices.Contains(conditionTypes, c.Type) {
			return fmt.Sprintf("%s (%s)", c.Message, c.Reason)
		}
	}
	return ""
}

// routeProblems returns the messages of those status conditions of route r that report a problem
// with its parent, Gateway g. It returns nil if r is nil.
func routeProblems(r *gateway.Route, g *gateway.Gateway) (out []string) {
	if r == nil {
		return nil
	}
	for _, p := range r.Status(metav1.Time{}).Parents {
		if string(p.ParentRef.Name) != g.Object.Name {
			continue
		}
		for _, kind := range []gw.RouteConditionType{gw.RouteConditionAccepted, gw.RouteConditionResolvedRefs} {
			if says := deniedReason(p.Conditions, string(kind)); says != "" {
				out = append(out, says)
			}
		}
		for _, c := range p.Conditions {
			if c.Type == string(gw.RouteConditionPartiallyInvalid) && c.Status == metav1.ConditionTrue {
				out = append(out, c.Message)
			}
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// matchesHost reports whether host, a host field of an Ingress, a route or a listener, names the
// host name or includes it by a wildcard. wild sets how many labels a wildcard covers. It returns
// false for "" and "*", which match every name.
func matchesHost(host, name string, wild route.Wildcard) bool {
	h, err := route.ParseHost(host, wild)
	return err == nil && h != (route.Host{}) && h.Matches(name)
}

// listHostObjects returns the Ingresses, routes and Gateway listeners that name a host. Objects
// that Keelson serves come first.
func (x proxyTracer) listHostObjects(host string) (out []hostObject) {
	if x.trace.Entrances == nil {
		return nil
	}
	entries := x.listEntryPoints()
	for _, i := range x.trace.Entrances.Ingresses {
		if !slices.ContainsFunc(i.Spec.Rules, func(r networkingv1.IngressRule) bool {
			return matchesHost(r.Host, host, route.OneLabel)
		}) {
			continue
		}
		c := hostObject{what: "ingress " + i.Namespace + "/" + i.Name, ingress: i}
		c.entry, c.why = x.entryPointOfClass(entries, ingresstable.ClassOf(i))
		out = append(out, c)
	}
	out = append(out, x.gatewayHostObjects(entries, host)...)
	slices.SortStableFunc(out, func(a, b hostObject) int {
		switch {
		case (a.entry == nil) == (b.entry == nil):
			return 0
		case a.entry != nil:
			return -1
		}
		return 1
	})
	return out
}

// entryPointOfClass returns the entry point in entries that belongs to the IngressClass with the
// name class. If there is no such entry point, it returns nil and the reason.
func (x proxyTracer) entryPointOfClass(entries []*entryPoint, class string) (*entryPoint, string) {
	for _, d := range entries {
		if d.gateway == nil && d.class == class {
			return d, ""
		}
	}
	if class == "" {
		return nil, "it names no class: nobody serves it"
	}
	for _, c := range x.trace.Entrances.Classes {
		if c.Name == class {
			return nil, fmt.Sprintf("its class %s is served by controller %s, which is not judged here", class,
				c.Spec.Controller)
		}
	}
	if slices.Contains(x.trace.Unread, IngressClasses) {
		return nil, "ingressclasses may not be read, so that it is not known who serves it"
	}
	return nil, fmt.Sprintf("its class %s does not exist: nobody serves it", class)
}

// gatewayHostObjects returns the HTTPRoutes, GRPCRoutes and Gateway listeners that name a host. The
// result has one element for each route and each Gateway in its parentRefs. entries are all entry
// points.
func (x proxyTracer) gatewayHostObjects(entries []*entryPoint, host string) (out []hostObject) {
	served := map[types.NamespacedName]*entryPoint{}
	routes := map[string]*gateway.Route{}
	for _, d := range entries {
		if d.gateway == nil {
			continue
		}
		o := d.gateway.Object
		served[types.NamespacedName{Namespace: o.Namespace, Name: o.Name}] = d
		for _, r := range d.judged.Routes {
			routes[r.String()] = r
		}
	}
	add := func(kind string, o *metav1.ObjectMeta, spec *gw.CommonRouteSpec, hosts []gw.Hostname) {
		if !slices.ContainsFunc(hosts, func(h gw.Hostname) bool {
			return matchesHost(string(h), host, route.AnyLabels)
		}) {
			return
		}
		what := strings.ToLower(kind) + " " + o.Namespace + "/" + o.Name
		if len(spec.ParentRefs) == 0 {
			out = append(out, hostObject{what: what, why: "it names no Gateway in spec.parentRefs: nobody serves it"})
		}
		for _, ref := range spec.ParentRefs {
			at := types.NamespacedName{Namespace: o.Namespace, Name: string(ref.Name)}
			if ref.Namespace != nil {
				at.Namespace = string(*ref.Namespace)
			}
			c := hostObject{what: what, entry: served[at], route: routes[kind+" "+o.Namespace+"/"+o.Name]}
			if c.entry == nil {
				c.why = x.unservedGatewayReason(at)
			}
			out = append(out, c)
		}
	}
	for _, r := range x.trace.Entrances.HTTPRoutes {
		add("HTTPRoute", &r.ObjectMeta, &r.Spec.CommonRouteSpec, r.Spec.Hostnames)
	}
	for _, r := range x.trace.Entrances.GRPCRoutes {
		add("GRPCRoute", &r.ObjectMeta, &r.Spec.CommonRouteSpec, r.Spec.Hostnames)
	}
	for _, d := range entries {
		if d.gateway == nil {
			continue
		}
		for _, l := range d.gateway.Object.Spec.Listeners {
			if l.Hostname != nil && matchesHost(string(*l.Hostname), host, route.AnyLabels) {
				out = append(out, hostObject{what: "listener " + string(l.Name), entry: d})
				break
			}
		}
	}
	return out
}

// unservedGatewayReason returns the reason why Keelson does not serve the Gateway with the given
// name. The caller has checked that the Gateway is not served.
func (x proxyTracer) unservedGatewayReason(name types.NamespacedName) string {
	for _, kind := range []string{Gateways, GatewayClasses} {
		if slices.Contains(x.trace.Unread, kind) {
			return fmt.Sprintf("%s may not be read, so that it is not known whether its gateway %s serves it",
				kind, name)
		}
	}
	for _, g := range x.trace.Entrances.Gateways {
		if g.Namespace != name.Namespace || g.Name != name.Name {
			continue
		}
		for _, c := range x.trace.Entrances.GatewayClasses {
			if c.Name == string(g.Spec.GatewayClassName) {
				return fmt.Sprintf("class %s of its gateway %s is served by controller %s, which is not judged here",
					c.Name, name, c.Spec.ControllerName)
			}
		}
		return fmt.Sprintf("class %s of its gateway %s does not exist: nobody serves it", g.Spec.GatewayClassName, name)
	}
	return fmt.Sprintf("its gateway %s does not exist: nobody serves it", name)
}

// TLSSecretNames returns the names of the TLS Secrets that the Ingresses and Gateways for the
// target use. The caller reads these Secrets into w.Entrances before it calls Trace.
func TLSSecretNames(w *World, t Target) (out []types.NamespacedName) {
	x := &tracer{World: w, target: t}
	add := func(namespace, name string) {
		at := types.NamespacedName{Namespace: namespace, Name: name}
		if name != "" && !slices.Contains(out, at) {
			out = append(out, at)
		}
	}
	for _, d := range x.proxies().candidateEntryPoints() {
		for _, i := range w.Entrances.Ingresses {
			if d.gateway != nil || ingresstable.ClassOf(i) != d.class {
				continue
			}
			for _, s := range i.Spec.TLS {
				if len(s.Hosts) == 0 || slices.ContainsFunc(s.Hosts, func(h string) bool {
					return matchesHost(h, x.targetHost(), route.OneLabel)
				}) {
					add(i.Namespace, s.SecretName)
				}
			}
		}
		if d.gateway == nil {
			continue
		}
		for _, l := range d.gateway.Object.Spec.Listeners {
			for _, ref := range certificateRefs(l) {
				namespace := d.gateway.Object.Namespace
				if ref.Namespace != nil {
					namespace = string(*ref.Namespace)
				}
				add(namespace, string(ref.Name))
			}
		}
	}
	return out
}

func certificateRefs(l gw.Listener) []gw.SecretObjectReference {
	if l.TLS == nil {
		return nil
	}
	return l.TLS.CertificateRefs
}

// ServicesBehind returns the Services through which a request to the target passes: the Services of
// the ingress proxies and of their backends. The caller reads the EndpointSlices of these Services
// before it calls Trace.
func ServicesBehind(w *World, t Target) (out []corev1.Service) {
	x := &tracer{World: w, target: t}
	for _, d := range x.proxies().candidateEntryPoints() {
		if d.service != nil {
			out = append(out, *d.service)
		}
		found, ok := x.proxies().matchRule(d)
		if !ok {
			continue
		}
		for _, b := range found.Rule.Backends {
			if namespace, name, _, ok := splitPoolKey(b.Pool); ok {
				if s := (worldObjects{w}).Service(namespace, name); s != nil {
					out = append(out, *s)
				}
			}
		}
	}
	return out
}

// candidateEntryPoints returns the entry points (IngressClasses and Gateways) that may serve the
// target. If the target is a URL with the address of an ingress proxy, it returns only the entry
// point of that proxy.
func (x proxyTracer) candidateEntryPoints() (out []*entryPoint) {
	if x.trace.Entrances == nil {
		return nil
	}
	if d := x.entryPointWithAddress(); d != nil {
		return []*entryPoint{d}
	}
	for _, c := range x.listHostObjects(x.trace.targetHost()) {
		same := func(d *entryPoint) bool { return d.String() == c.entry.String() }
		if c.entry != nil && !slices.ContainsFunc(out, same) {
			out = append(out, c.entry)
		}
	}
	return out
}

// splitPoolKey splits the key of an endpoint pool in a routing table. The key is
// namespace/service/port for an Ingress and service/namespace/service:port/protocol for a Gateway.
// ok is false for any other form.
func splitPoolKey(key string) (namespace, service, port string, ok bool) {
	parts := strings.Split(key, "/")
	switch len(parts) {
	case 3:
		return parts[0], parts[1], parts[2], true
	case 4:
		service, port, ok = strings.Cut(parts[2], ":")
		return parts[1], service, port, ok
	}
	return "", "", "", false
}

// IsOutside reports whether the target is a host name with a dot that resolves to no Service. An
// Ingress or a Gateway may serve such a name.
func IsOutside(w *World, t Target) bool {
	_, err := netip.ParseAddr(t.Host)
	return err != nil && strings.Contains(t.Host, ".") && len(TargetServices(w, t)) == 0
}
