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

// Maximum length of condition messages, and maximum number of parents in the status of a route, as
// the CustomResourceDefinitions of the Gateway API require.
const (
	maxMessageBytes = 32 << 10
	maxParents      = 32
)

// ProxyState is the state of the proxy pods of a Gateway, as far as the Gateway's status needs it.
type ProxyState struct {
	// Waiting is the reason why no proxy serves the current spec of the Gateway yet; "" if a proxy
	// serves it.
	Waiting string
	// Addresses are the addresses where clients reach the Gateway.
	Addresses []gw.GatewayStatusAddress
	// Unaddressed is the reason why there are no addresses.
	Unaddressed string
}

// conditions sets conditions in a list of conditions. Conditions of other types in the list are
// kept.
type conditions struct {
	list       []metav1.Condition
	generation int64
	now        metav1.Time
}

// setBool sets the condition of type kind to True if holds is true, and to False otherwise.
func (c *conditions) setBool(kind string, holds bool, reason, message string) {
	status := metav1.ConditionFalse
	if holds {
		status = metav1.ConditionTrue
	}
	c.setCondition(kind, status, reason, message)
}

func (c *conditions) setCondition(kind string, status metav1.ConditionStatus, reason, message string) {
	if len(message) > maxMessageBytes {
		message = message[:maxMessageBytes]
	}
	meta.SetStatusCondition(&c.list, metav1.Condition{Type: kind, Status: status, Reason: reason,
		Message:            strings.ToValidUTF8(message, "?"),
		ObservedGeneration: c.generation, LastTransitionTime: c.now})
}

// setUnlessProblem sets the condition of type kind to True with reason and message if p is nil.
// Otherwise it sets the condition to False with reason and message of p.
func setUnlessProblem[T, R ~string](c *conditions, kind T, p *problem, reason R, message string) {
	if p != nil {
		c.setBool(string(kind), false, p.reason, p.message)
		return
	}
	c.setBool(string(kind), true, string(reason), message)
}

// ClassStatus returns the status of a GatewayClass of Keelson's controller. It shares no memory
// with the class.
func ClassStatus(o *gw.GatewayClass, now metav1.Time) gw.GatewayClassStatus {
	out := *o.Status.DeepCopy()
	c := &conditions{list: out.Conditions, generation: o.Generation, now: now}
	refused := classProblem(o)
	setUnlessProblem(c, gw.GatewayClassConditionStatusAccepted, refused, gw.GatewayClassReasonAccepted,
		"Gateways of this class are served")
	out.Conditions, out.SupportedFeatures = c.list, classFeatures(refused)
	return out
}

// ServedPorts returns the sorted ports of the listeners that the proxy serves. If it is empty, no
// proxy must run for the Gateway.
func (g *Gateway) ServedPorts() (ports []int32) {
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

// Status returns the status of Gateway g for the state s of its proxies. It shares no memory with
// g.
func (g *Gateway) Status(s ProxyState, now metav1.Time) gw.GatewayStatus {
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
		c.setBool(string(gw.GatewayConditionAccepted), false, g.refused.reason, g.refused.message)
	case g.acceptedListeners() == 0:
		c.setBool(string(gw.GatewayConditionAccepted), false, none.reason, none.message)
	case len(bad) > 0:
		c.setBool(string(gw.GatewayConditionAccepted), true, string(gw.GatewayReasonListenersNotValid),
			fmt.Sprintf("served without listeners %s: see their conditions", strings.Join(bad, ", ")))
	default:
		c.setBool(string(gw.GatewayConditionAccepted), true, string(gw.GatewayReasonAccepted),
			"every listener is served")
	}
	programmed := g.programmedProblem(s)
	setUnlessProblem(c, gw.GatewayConditionProgrammed, programmed, gw.GatewayReasonProgrammed,
		"a proxy serves the Gateway")
	out.Conditions = c.list
	out.Addresses = nil
	if g.refused == nil {
		out.Addresses = slices.Clone(s.Addresses)
	}
	out.AttachedListenerSets = nil
	out.Listeners = nil
	for _, l := range g.Listeners {
		out.Listeners = append(out.Listeners, l.listenerStatus(g, programmed, o.Status.Listeners, now))
	}
	return out
}

// acceptedListeners returns the number of listeners that are accepted and have no conflict, with or
// without certificates.
func (g *Gateway) acceptedListeners() (n int) {
	for _, l := range g.Listeners {
		if l.notAccepted == nil && l.conflict == nil {
			n++
		}
	}
	return n
}

// programmedProblem returns why no proxy serves Gateway g, or nil if a proxy serves it.
func (g *Gateway) programmedProblem(s ProxyState) *problem {
	switch {
	case g.refused != nil:
		return problemf(gw.GatewayReasonInvalid, "it is not accepted: %s", g.refused.message)
	case len(g.ServedPorts()) == 0:
		return problemf(gw.GatewayReasonInvalid, "no listener can be served: see their conditions")
	case len(g.requestedAddresses()) > 1:
		return problemf(gw.GatewayReasonAddressNotUsable, "spec.addresses: a Gateway can have one address, not %d",
			len(g.requestedAddresses()))
	case len(s.Addresses) == 0 && g.Address() == "":
		return problemf(gw.GatewayReasonAddressNotAssigned, "%s", s.Unaddressed)
	case g.Address() != "" && !slices.ContainsFunc(s.Addresses, func(a gw.GatewayStatusAddress) bool {
		return a.Value == g.Address()
	}):
		return problemf(gw.GatewayReasonAddressNotUsable, "address %s could not be assigned%s", g.Address(),
			addressReasonSuffix(s))
	case s.Waiting != "":
		return problemf(gw.GatewayReasonPending, "%s", s.Waiting)
	}
	return nil
}

func addressReasonSuffix(s ProxyState) string {
	if len(s.Addresses) > 0 || s.Unaddressed == "" {
		return ""
	}
	return ": " + s.Unaddressed
}

func (l *Listener) listenerStatus(
	g *Gateway, programmed *problem, before []gw.ListenerStatus, now metav1.Time,
) gw.ListenerStatus {
	out := gw.ListenerStatus{Name: l.spec.Name, SupportedKinds: slices.Clone(l.kinds)}
	if out.SupportedKinds == nil {
		out.SupportedKinds = []gw.RouteGroupKind{}
	}
	out.AttachedRoutes = int32(len(l.attached))
	c := &conditions{generation: g.Object.Generation, now: now}
	if i := slices.IndexFunc(before, func(b gw.ListenerStatus) bool { return b.Name == l.spec.Name }); i >= 0 {
		c.list = slices.Clone(before[i].Conditions)
	}
	accepted := l.notAccepted
	if accepted == nil {
		accepted = l.conflict
	}
	setUnlessProblem(c, gw.ListenerConditionAccepted, accepted, gw.ListenerReasonAccepted, "the listener can be served")
	if l.conflict != nil {
		c.setBool(string(gw.ListenerConditionConflicted), true, l.conflict.reason, l.conflict.message)
	} else {
		c.setBool(string(gw.ListenerConditionConflicted), false, string(gw.ListenerReasonNoConflicts),
			"no other listener has the same port and hosts")
	}
	setUnlessProblem(c, gw.ListenerConditionResolvedRefs, l.unresolvedRef, gw.ListenerReasonResolvedRefs,
		"all references are resolved")
	switch {
	case !l.Served():
		c.setBool(string(gw.ListenerConditionProgrammed), false, string(gw.ListenerReasonInvalid),
			"the listener cannot be served")
	case programmed != nil:
		c.setBool(string(gw.ListenerConditionProgrammed), false, string(gw.ListenerReasonPending), programmed.message)
	default:
		c.setBool(string(gw.ListenerConditionProgrammed), true, string(gw.ListenerReasonProgrammed),
			"a proxy serves the Gateway")
	}
	if len(l.overlaps) > 0 {
		c.setBool(string(gw.ListenerConditionOverlappingTLSConfig), true, string(gw.ListenerReasonOverlappingHostnames),
			fmt.Sprintf("hosts overlap with those of listeners %s on port %d: clients that reuse connections may "+
				"reach the wrong listener",
				strings.Join(l.overlaps, ", "), l.spec.Port))
	} else {
		meta.RemoveStatusCondition(&c.list, string(gw.ListenerConditionOverlappingTLSConfig))
	}
	out.Conditions = c.list
	return out
}

// Status returns the new status of route r. Entries of other controllers are unchanged. Keelson's
// entries are computed for the Gateways to which r refers. The result shares no memory with r.
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
		if len(out.Parents) >= maxParents {
			break
		}
		c := &conditions{generation: r.meta.Generation, now: now}
		if i := slices.IndexFunc(ours, func(b gw.RouteParentStatus) bool {
			return equality.Semantic.DeepEqual(b.ParentRef, p.ref)
		}); i >= 0 {
			c.list = ours[i].Conditions
		}
		setUnlessProblem(c, gw.RouteConditionAccepted, p.refused, gw.RouteReasonAccepted,
			"the route is attached to the Gateway")
		setUnlessProblem(c, gw.RouteConditionResolvedRefs, r.unresolvedRef, gw.RouteReasonResolvedRefs,
			"all references are resolved")
		if p.refused == nil && len(r.dropped) > 0 {
			c.setBool(string(gw.RouteConditionPartiallyInvalid), true, string(gw.RouteReasonUnsupportedValue),
				"Dropped Rule: "+strings.Join(r.dropped, ", "))
		} else {
			meta.RemoveStatusCondition(&c.list, string(gw.RouteConditionPartiallyInvalid))
		}
		out.Parents = append(out.Parents, gw.RouteParentStatus{ParentRef: *p.ref.DeepCopy(), ControllerName: Controller,
			Conditions: c.list})
	}
	return out
}

// StoredStatus returns the current status of the HTTPRoute or GRPCRoute in the store.
func (r *Route) StoredStatus() gw.RouteStatus { return *r.status }

// Object returns the HTTPRoute or GRPCRoute from which r was evaluated.
func (r *Route) Object() metav1.ObjectMetaAccessor {
	if r.HTTP != nil {
		return r.HTTP
	}
	return r.GRPC
}
