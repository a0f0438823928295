// Package gateway says what Gateway API's objects mean: which listeners a Gateway has, which routes are attached to
// them, what the proxy does with a request, and what the status of each object says of it. It is pure: the control
// plane writes the statuses and the proxy serves the table, both by the same judgement.
//
// What is not supported is refused in the status with the specification's reason, and not served.
package gateway

import (
	"cmp"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	gw "sigs.k8s.io/gateway-api/apis/v1"

	"keelson.dev/keelson/ingressproxy/pairs"
)

// Controller is the controllerName of the classes that Keelson serves.
const Controller = "keelson.dev/gateway"

// The kinds of routes.
const (
	httpRoute = "HTTPRoute"
	grpcRoute = "GRPCRoute"
)

// World is what the cluster says. Nothing in it is changed.
type World struct {
	Classes    []*gw.GatewayClass
	Gateways   []*gw.Gateway // of any class
	HTTPRoutes []*gw.HTTPRoute
	GRPCRoutes []*gw.GRPCRoute
	Grants     []*gw.ReferenceGrant

	// Namespace gives the labels of a namespace; ok is false when there is none.
	Namespace func(name string) (labels map[string]string, ok bool)
	// Service and Secret give nil when there is none.
	Service func(namespace, name string) *corev1.Service
	Secret  func(namespace, name string) *corev1.Secret
	// Slices are the EndpointSlices of a Service. Only Table asks for them.
	Slices func(namespace, service string) []*discoveryv1.EndpointSlice
	// Reserved are ports that the proxy has for itself.
	Reserved []int32
	// Keys keeps key pairs that were read before; nil reads them each time.
	Keys *pairs.Keys
}

// Judgement is what is so in a World.
type Judgement struct {
	Gateways []*Gateway // those of Keelson's classes
	Routes   []*Route   // those that name one of them, the older first
	world    *World
}

// Gateway is one Gateway as it is served.
type Gateway struct {
	Object    *gw.Gateway
	Listeners []*Listener // as in the spec
	refused   *problem    // the whole of it
}

// Route is an HTTPRoute or a GRPCRoute.
type Route struct {
	HTTP *gw.HTTPRoute // or
	GRPC *gw.GRPCRoute

	kind      string
	meta      *metav1.ObjectMeta
	common    *gw.CommonRouteSpec
	hostnames []gw.Hostname
	status    *gw.RouteStatus

	rules    []rule
	resolved *problem // the first reference that leads nowhere
	refused  *problem // the whole of it
	dropped  []string // the rules that are not served
	parents  []parent
}

// parent is a reference to a Gateway of ours, and what became of it.
type parent struct {
	ref     gw.ParentReference
	refused *problem
}

// problem is why something is not as it was asked for.
type problem struct{ reason, message string }

func problemf[R ~string](reason R, format string, args ...any) *problem {
	return &problem{reason: string(reason), message: fmt.Sprintf(format, args...)}
}

// Judge works out what is so. One Gateway's listeners and routes do not depend on other Gateways.
func Judge(w *World) *Judgement {
	j := &Judgement{world: w}
	ours := map[types.NamespacedName]*Gateway{}
	for _, o := range w.Gateways {
		class := w.class(string(o.Spec.GatewayClassName))
		if class == nil || class.Spec.ControllerName != Controller {
			continue
		}
		g := &Gateway{Object: o, refused: refusedGateway(o, class)}
		g.Listeners = w.listeners(o)
		ours[types.NamespacedName{Namespace: o.Namespace, Name: o.Name}] = g
		j.Gateways = append(j.Gateways, g)
	}
	for _, r := range w.routes() {
		named := false
		for _, ref := range r.common.ParentRefs {
			g := ours[types.NamespacedName{Namespace: deref(ref.Namespace, r.meta.Namespace), Name: string(ref.Name)}]
			if g == nil || deref(ref.Group, gw.GroupName) != gw.GroupName || deref(ref.Kind, "Gateway") != "Gateway" {
				continue
			}
			if !named {
				w.translate(r)
				named = true
			}
			r.parents = append(r.parents, parent{ref: ref, refused: w.attach(g, r, ref)})
		}
		if named || r.hasStatus() {
			j.Routes = append(j.Routes, r)
		}
	}
	return j
}

func (w *World) class(name string) *gw.GatewayClass {
	for _, c := range w.Classes {
		if c.Name == name {
			return c
		}
	}
	return nil
}

// routes are all routes in the order of the specification: the older first, then by namespace and name.
func (w *World) routes() []*Route {
	out := make([]*Route, 0, len(w.HTTPRoutes)+len(w.GRPCRoutes))
	for _, o := range w.HTTPRoutes {
		out = append(out, &Route{HTTP: o, kind: httpRoute, meta: &o.ObjectMeta, common: &o.Spec.CommonRouteSpec,
			hostnames: o.Spec.Hostnames, status: &o.Status.RouteStatus})
	}
	for _, o := range w.GRPCRoutes {
		out = append(out, &Route{GRPC: o, kind: grpcRoute, meta: &o.ObjectMeta, common: &o.Spec.CommonRouteSpec,
			hostnames: o.Spec.Hostnames, status: &o.Status.RouteStatus})
	}
	slices.SortFunc(out, func(a, b *Route) int {
		return cmp.Or(a.meta.CreationTimestamp.Compare(b.meta.CreationTimestamp.Time),
			cmp.Compare(a.meta.Namespace+"/"+a.meta.Name, b.meta.Namespace+"/"+b.meta.Name), cmp.Compare(a.kind, b.kind))
	})
	return out
}

// hasStatus says whether the route has words of ours that may have to go.
func (r *Route) hasStatus() bool {
	return slices.ContainsFunc(r.status.Parents, func(p gw.RouteParentStatus) bool { return p.ControllerName == Controller })
}

// String is the route's kind, namespace and name.
func (r *Route) String() string { return r.kind + " " + r.meta.Namespace + "/" + r.meta.Name }

// granted says whether an object of a kind of Gateway API may refer to one of the core group in another namespace.
func (w *World) granted(kind, from, toKind, to, name string) bool {
	for _, g := range w.Grants {
		if g.Namespace != to {
			continue
		}
		source := slices.ContainsFunc(g.Spec.From, func(f gw.ReferenceGrantFrom) bool {
			return f.Group == gw.GroupName && string(f.Kind) == kind && string(f.Namespace) == from
		})
		target := slices.ContainsFunc(g.Spec.To, func(t gw.ReferenceGrantTo) bool {
			return t.Group == "" && string(t.Kind) == toKind && (t.Name == nil || *t.Name == "" || string(*t.Name) == name)
		})
		if source && target {
			return true
		}
	}
	return false
}

// deref is what a pointer to some sort of string points at, or a default.
func deref[S ~string](p *S, without string) string {
	if p == nil {
		return without
	}
	return string(*p)
}
