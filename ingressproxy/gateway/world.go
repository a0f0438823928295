// Package gateway evaluates Gateway API objects. It computes the listeners of a Gateway, the routes
// that are attached to them, the proxy's rules for requests, and the status of each object. The
// control plane writes the statuses, and the proxy serves the rules; both use the same evaluation.
// The package does no I/O.
//
// A setting that is not supported is not served, and the status of its object contains the reason
// that the specification defines.
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

// Controller is the controllerName of the GatewayClasses that Keelson serves.
const Controller = "keelson.dev/gateway"

// The supported kinds of routes.
const (
	httpRoute = "HTTPRoute"
	grpcRoute = "GRPCRoute"
)

// World is the input of Evaluate: the Gateway API objects of the cluster and the objects to which
// they refer. They are not modified.
type World struct {
	Classes    []*gw.GatewayClass
	Gateways   []*gw.Gateway // Gateways of any GatewayClass
	HTTPRoutes []*gw.HTTPRoute
	GRPCRoutes []*gw.GRPCRoute
	Grants     []*gw.ReferenceGrant

	// Namespace returns the labels of a namespace; ok is false if it does not exist.
	Namespace func(name string) (labels map[string]string, ok bool)
	// Service and Secret return nil if the object does not exist.
	Service func(namespace, name string) *corev1.Service
	Secret  func(namespace, name string) *corev1.Secret
	// Slices returns the EndpointSlices of a Service. Only Evaluation.Table calls it.
	Slices func(namespace, service string) []*discoveryv1.EndpointSlice
	// Reserved are ports that no listener may use, because the proxy uses them itself.
	Reserved []int32
	// Keys caches parsed key pairs; nil parses them each time.
	Keys *pairs.Cache
}

// Evaluation is the result of Evaluate: the Gateways and routes that Keelson's controller serves.
type Evaluation struct {
	Gateways []*Gateway // Gateways of Keelson's GatewayClasses
	Routes   []*Route   // routes that refer to one of Gateways or have an old status entry of Keelson's, oldest first
	world    *World
}

// Gateway is a Gateway object with the result of its evaluation.
type Gateway struct {
	Object    *gw.Gateway
	Listeners []*Listener // in the order of the spec
	refused   *problem    // why no listener of the Gateway is served; nil means no such problem
}

// Route is an HTTPRoute or a GRPCRoute with the result of its evaluation. Either HTTP or GRPC is
// set.
type Route struct {
	HTTP *gw.HTTPRoute
	GRPC *gw.GRPCRoute

	kind      string
	meta      *metav1.ObjectMeta
	common    *gw.CommonRouteSpec
	hostnames []gw.Hostname
	status    *gw.RouteStatus

	rules         []translatedRule
	unresolvedRef *problem // problem of the first reference that cannot be resolved
	refused       *problem // why no rule of the route is served; nil means no such problem
	dropped       []string // numbers of the rules that are not served, with the reason
	parents       []parent
}

// parent is a reference from a route to a Gateway that Keelson serves, with the reason if the route
// is not attached to that Gateway.
type parent struct {
	ref     gw.ParentReference
	refused *problem
}

// problem is the reason and message of a status condition that reports a failure.
type problem struct{ reason, message string }

func problemf[R ~string](reason R, format string, args ...any) *problem {
	return &problem{reason: string(reason), message: fmt.Sprintf(format, args...)}
}

// Evaluate returns the Gateways of Keelson's classes and their routes, with statuses and rules. The
// result for one Gateway does not depend on other Gateways.
func Evaluate(w *World) *Evaluation {
	j := &Evaluation{world: w}
	ours := map[types.NamespacedName]*Gateway{}
	for _, o := range w.Gateways {
		class := w.findClass(string(o.Spec.GatewayClassName))
		if class == nil || class.Spec.ControllerName != Controller {
			continue
		}
		g := &Gateway{Object: o, refused: gatewayProblem(o, class)}
		g.Listeners = w.evaluateListeners(o)
		ours[types.NamespacedName{Namespace: o.Namespace, Name: o.Name}] = g
		j.Gateways = append(j.Gateways, g)
	}
	for _, r := range w.sortedRoutes() {
		named := false
		for _, ref := range r.common.ParentRefs {
			g := ours[types.NamespacedName{Namespace: stringOr(ref.Namespace, r.meta.Namespace),
				Name: string(ref.Name)}]
			if g == nil || stringOr(ref.Group, gw.GroupName) != gw.GroupName ||
				stringOr(ref.Kind, "Gateway") != "Gateway" {
				continue
			}
			if !named {
				w.translateRoute(r)
				named = true
			}
			r.parents = append(r.parents, parent{ref: ref, refused: w.attachRoute(g, r, ref)})
		}
		if named || r.hasStatus() {
			j.Routes = append(j.Routes, r)
		}
	}
	return j
}

func (w *World) findClass(name string) *gw.GatewayClass {
	for _, c := range w.Classes {
		if c.Name == name {
			return c
		}
	}
	return nil
}

// sortedRoutes returns all routes in the order of precedence that the specification defines: oldest
// first, then by namespace and name.
func (w *World) sortedRoutes() []*Route {
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
			cmp.Compare(a.meta.Namespace+"/"+a.meta.Name, b.meta.Namespace+"/"+b.meta.Name),
			cmp.Compare(a.kind, b.kind))
	})
	return out
}

// hasStatus reports whether the stored status of r has entries of Keelson's controller, which may
// have to be removed.
func (r *Route) hasStatus() bool {
	return slices.ContainsFunc(r.status.Parents, func(p gw.RouteParentStatus) bool {
		return p.ControllerName == Controller
	})
}

// String returns the route's kind, namespace, and name.
func (r *Route) String() string { return r.kind + " " + r.meta.Namespace + "/" + r.meta.Name }

// grantsReference reports whether a ReferenceGrant allows a reference between two namespaces. The
// referring object is a Gateway API object of this kind in fromNamespace. The referenced object is
// of kind toKind in the core group, with this name in toNamespace.
func (w *World) grantsReference(kind, fromNamespace, toKind, toNamespace, name string) bool {
	for _, g := range w.Grants {
		if g.Namespace != toNamespace {
			continue
		}
		source := slices.ContainsFunc(g.Spec.From, func(f gw.ReferenceGrantFrom) bool {
			return f.Group == gw.GroupName && string(f.Kind) == kind && string(f.Namespace) == fromNamespace
		})
		target := slices.ContainsFunc(g.Spec.To, func(t gw.ReferenceGrantTo) bool {
			return t.Group == "" && string(t.Kind) == toKind &&
				(t.Name == nil || *t.Name == "" || string(*t.Name) == name)
		})
		if source && target {
			return true
		}
	}
	return false
}

// stringOr returns the string to which p points, or fallback if p is nil.
func stringOr[S ~string](p *S, fallback string) string {
	if p == nil {
		return fallback
	}
	return string(*p)
}
