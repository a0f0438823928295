package gateway

import (
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gw "sigs.k8s.io/gateway-api/apis/v1"
)

// most conditions and parents that the kinds hold, by their definitions.
const (
	mostMessage = 32 << 10
	mostParents = 32
)

// Serving is what is known of the proxies of a Gateway.
type Serving struct {
	// Waiting is why no proxy serves what the Gateway says; "" when one does.
	Waiting string
	// Addresses are those under which clients reach it.
	Addresses []gw.GatewayStatusAddress
	// Unaddressed is why there are none.
	Unaddressed string
}

// conditions are set into a list; what others have put there stays.
type conditions struct {
	list       []metav1.Condition
	generation int64
	now        metav1.Time
}

// set sets a condition: by is nil where it is as it should be.
func (c *conditions) set(kind string, holds bool, reason, message string) {
	status := metav1.ConditionFalse
	if holds {
		status = metav1.ConditionTrue
	}
	c.put(kind, status, reason, message)
}

func (c *conditions) put(kind string, status metav1.ConditionStatus, reason, message string) {
	if len(message) > mostMessage {
		message = message[:mostMessage]
	}
	meta.SetStatusCondition(&c.list, metav1.Condition{Type: kind, Status: status, Reason: reason, Message: strings.ToValidUTF8(message, "?"),
		ObservedGeneration: c.generation, LastTransitionTime: c.now})
}

// judged sets a condition that is true unless there is a problem.
func judged[T, R ~string](c *conditions, kind T, p *problem, reason R, message string) {
	if p != nil {
		c.set(string(kind), false, p.reason, p.message)
		return
	}
	c.set(string(kind), true, string(reason), message)
}

// ClassStatus is the status of a class of ours; it shares nothing with the class.
func ClassStatus(o *gw.GatewayClass, now metav1.Time) gw.GatewayClassStatus {
	out := *o.Status.DeepCopy()
	c := &conditions{list: out.Conditions, generation: o.Generation, now: now}
	refused := refusedClass(o)
	judged(c, gw.GatewayClassConditionStatusAccepted, refused, gw.GatewayClassReasonAccepted, "Gateways of this class are served")
	out.Conditions, out.SupportedFeatures = c.list, features(refused)
	return out
}

// Serves says whether a proxy is to run for the Gateway, and on which ports.
func (g *Gateway) Serves() (ports []int32) {
	if g.refused != nil {
		return nil
	}
	for _, l := range g.Listeners {
		if l.Served() && !slices.Contains(ports, l.spec.Port) {
			ports = append(ports, l.spec.Port)
		}
	}
	slices.Sort(ports)
	return ports
}

// Status is the Gateway's; it shares nothing with the Gateway.
func (g *Gateway) Status(s Serving, now metav1.Time) gw.GatewayStatus {
	o := g.Object
	out := *o.Status.DeepCopy()
	c := &conditions{list: out.Conditions, generation: o.Generation, now: now}
	var bad []string
	for _, l := range g.Listeners {
		if !l.Served() {
			bad = append(bad, l.Name())
		}
	}
	none := problemf(gw.GatewayReasonListenersNotValid, "no listener can be served: see their conditions")
	switch {
	case g.refused != nil:
		c.set(string(gw.GatewayConditionAccepted), false, g.refused.reason, g.refused.message)
	case g.accepted() == 0:
		c.set(string(gw.GatewayConditionAccepted), false, none.reason, none.message)
	case len(bad) > 0:
		c.set(string(gw.GatewayConditionAccepted), true, string(gw.GatewayReasonListenersNotValid),
			fmt.Sprintf("served without listeners %s: see their conditions", strings.Join(bad, ", ")))
	default:
		c.set(string(gw.GatewayConditionAccepted), true, string(gw.GatewayReasonAccepted), "every listener is served")
	}
	programmed := g.programmed(s)
	judged(c, gw.GatewayConditionProgrammed, programmed, gw.GatewayReasonProgrammed, "a proxy serves it")
	out.Conditions = c.list
	out.Addresses = nil
	if g.refused == nil {
		out.Addresses = slices.Clone(s.Addresses)
	}
	out.AttachedListenerSets = nil
	out.Listeners = nil
	for _, l := range g.Listeners {
		out.Listeners = append(out.Listeners, l.status(g, programmed, o.Status.Listeners, now))
	}
	return out
}

// accepted is the number of listeners that could be served if their certificates were there.
func (g *Gateway) accepted() (n int) {
	for _, l := range g.Listeners {
		if l.accepted == nil && l.conflicted == nil {
			n++
		}
	}
	return n
}

// programmed says why no proxy serves the Gateway.
func (g *Gateway) programmed(s Serving) *problem {
	switch {
	case g.refused != nil:
		return problemf(gw.GatewayReasonInvalid, "it is not accepted: %s", g.refused.message)
	case len(g.Serves()) == 0:
		return problemf(gw.GatewayReasonInvalid, "no listener can be served: see their conditions")
	case len(g.addresses()) > 1:
		return problemf(gw.GatewayReasonAddressNotUsable, "spec.addresses: a Gateway can have one address, not %d", len(g.addresses()))
	case len(s.Addresses) == 0 && g.Address() == "":
		return problemf(gw.GatewayReasonAddressNotAssigned, "%s", s.Unaddressed)
	case g.Address() != "" && !slices.ContainsFunc(s.Addresses, func(a gw.GatewayStatusAddress) bool { return a.Value == g.Address() }):
		return problemf(gw.GatewayReasonAddressNotUsable, "address %s could not be had%s", g.Address(), unaddressed(s))
	case s.Waiting != "":
		return problemf(gw.GatewayReasonPending, "%s", s.Waiting)
	}
	return nil
}

func unaddressed(s Serving) string {
	if len(s.Addresses) > 0 || s.Unaddressed == "" {
		return ""
	}
	return ": " + s.Unaddressed
}

func (l *Listener) status(g *Gateway, programmed *problem, before []gw.ListenerStatus, now metav1.Time) gw.ListenerStatus {
	out := gw.ListenerStatus{Name: l.spec.Name, SupportedKinds: slices.Clone(l.kinds)}
	if out.SupportedKinds == nil {
		out.SupportedKinds = []gw.RouteGroupKind{}
	}
	out.AttachedRoutes = int32(len(l.attached))
	c := &conditions{generation: g.Object.Generation, now: now}
	if i := slices.IndexFunc(before, func(b gw.ListenerStatus) bool { return b.Name == l.spec.Name }); i >= 0 {
		c.list = slices.Clone(before[i].Conditions)
	}
	accepted := l.accepted
	if accepted == nil {
		accepted = l.conflicted
	}
	judged(c, gw.ListenerConditionAccepted, accepted, gw.ListenerReasonAccepted, "the listener can be served")
	if l.conflicted != nil {
		c.set(string(gw.ListenerConditionConflicted), true, l.conflicted.reason, l.conflicted.message)
	} else {
		c.set(string(gw.ListenerConditionConflicted), false, string(gw.ListenerReasonNoConflicts), "no other listener has the same port and hosts")
	}
	judged(c, gw.ListenerConditionResolvedRefs, l.resolved, gw.ListenerReasonResolvedRefs, "every reference leads somewhere")
	switch {
	case !l.Served():
		c.set(string(gw.ListenerConditionProgrammed), false, string(gw.ListenerReasonInvalid), "it cannot be served")
	case programmed != nil:
		c.set(string(gw.ListenerConditionProgrammed), false, string(gw.ListenerReasonPending), programmed.message)
	default:
		c.set(string(gw.ListenerConditionProgrammed), true, string(gw.ListenerReasonProgrammed), "a proxy serves it")
	}
	if len(l.overlaps) > 0 {
		c.set(string(gw.ListenerConditionOverlappingTLSConfig), true, string(gw.ListenerReasonOverlappingHostnames),
			fmt.Sprintf("hosts overlap with those of listeners %s on port %d: clients that reuse connections may come to the wrong one",
				strings.Join(l.overlaps, ", "), l.spec.Port))
	} else {
		meta.RemoveStatusCondition(&c.list, string(gw.ListenerConditionOverlappingTLSConfig))
	}
	out.Conditions = c.list
	return out
}

// Status is the route's: the words of other controllers as they are, and ours for the Gateways that it names. It shares
// nothing with the route.
func (r *Route) Status(now metav1.Time) gw.RouteStatus {
	out := gw.RouteStatus{Parents: []gw.RouteParentStatus{}}
	var ours []gw.RouteParentStatus
	for _, p := range r.status.DeepCopy().Parents {
		if p.ControllerName == Controller {
			ours = append(ours, p)
		} else {
			out.Parents = append(out.Parents, p)
		}
	}
	for _, p := range r.parents {
		if len(out.Parents) >= mostParents {
			break
		}
		c := &conditions{generation: r.meta.Generation, now: now}
		if i := slices.IndexFunc(ours, func(b gw.RouteParentStatus) bool { return equality.Semantic.DeepEqual(b.ParentRef, p.ref) }); i >= 0 {
			c.list = ours[i].Conditions
		}
		judged(c, gw.RouteConditionAccepted, p.refused, gw.RouteReasonAccepted, "the Gateway has attached it")
		judged(c, gw.RouteConditionResolvedRefs, r.resolved, gw.RouteReasonResolvedRefs, "every reference leads somewhere")
		if p.refused == nil && len(r.dropped) > 0 {
			c.set(string(gw.RouteConditionPartiallyInvalid), true, string(gw.RouteReasonUnsupportedValue),
				"Dropped Rule: "+strings.Join(r.dropped, ", "))
		} else {
			meta.RemoveStatusCondition(&c.list, string(gw.RouteConditionPartiallyInvalid))
		}
		out.Parents = append(out.Parents, gw.RouteParentStatus{ParentRef: *p.ref.DeepCopy(), ControllerName: Controller, Conditions: c.list})
	}
	return out
}

// Said is the status that the route has.
func (r *Route) Said() gw.RouteStatus { return *r.status }

// Object is the route's metadata.
func (r *Route) Object() metav1.ObjectMetaAccessor {
	if r.HTTP != nil {
		return r.HTTP
	}
	return r.GRPC
}
