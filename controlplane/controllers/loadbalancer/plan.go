package loadbalancer

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"net/netip"
	"slices"
	"strings"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/balancer"
	"keelson.dev/keelson/controlplane/api/kinds/networking"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// Reservation returns the IPAddress object that reserves address a for Service s. The address is
// its name. Names are unique in the store, so that two Services cannot have one address.
func Reservation(s *corev1.Service, a netip.Addr) *networkingv1.IPAddress {
	out := networking.NewServiceIPAddress(s, a.String())
	out.Labels[networkingv1.LabelManagedBy] = balancer.Allocator
	return out
}

// reservingService returns the Service for which IPAddress a reserves its address. ok is false if
// this controller did not create a.
func reservingService(a *networkingv1.IPAddress) (key engine.Key, ok bool) {
	ref := a.Spec.ParentRef
	if a.Labels[networkingv1.LabelManagedBy] != balancer.Allocator || ref == nil || ref.Group != "" ||
		ref.Resource != "services" {
		return engine.Key{}, false
	}
	return engine.Key{Namespace: ref.Namespace, Name: ref.Name}, true
}

// statusAddresses returns the addresses in the status of a Service.
func statusAddresses(s *corev1.Service) []netip.Addr {
	var out []netip.Addr
	for _, in := range s.Status.LoadBalancer.Ingress {
		if a, err := netip.ParseAddr(in.IP); err == nil {
			out = append(out, a.Unmap())
		}
	}
	return out
}

// currentAddresses returns the addresses that Service s already has: reserved, and the addresses in
// its status that belong to a pool. If s names the loadBalancerClass of this controller, all
// addresses in its status count. free reports whether s may use an address. foreign reports that
// another controller manages the addresses of s.
func currentAddresses(s *corev1.Service, reserved []netip.Addr, pools []*balancer.Pool, free func(netip.Addr) bool) (
	out []netip.Addr, foreign bool,
) {
	out = slices.Clone(reserved)
	for _, a := range statusAddresses(s) {
		if slices.Contains(out, a) || !free(a) {
			continue
		}
		if balancer.HasClass(s) || balancer.FindPool(pools, a) != nil {
			out = append(out, a) // the status still has the address, but its reservation was deleted
		}
	}
	return out, len(out) == 0 && len(s.Status.LoadBalancer.Ingress) > 0 && !balancer.HasClass(s)
}

// ServiceStatus returns the new status of Service s for the result of the address allocation.
func ServiceStatus(
	s *corev1.Service, answer balancer.ChooseResult, pools []*balancer.Pool, now metav1.Time,
) corev1.ServiceStatus {
	out := *s.Status.DeepCopy()
	mode := corev1.LoadBalancerIPModeVIP
	out.LoadBalancer.Ingress = nil
	var named []string
	for _, a := range answer.Addresses {
		out.LoadBalancer.Ingress = append(out.LoadBalancer.Ingress,
			corev1.LoadBalancerIngress{IP: a.String(), IPMode: &mode})
		text := a.String()
		if p := balancer.FindPool(pools, a); p != nil {
			text += " of pool " + p.Name
		}
		named = append(named, text)
	}
	c := metav1.Condition{Type: balancer.Condition, Status: metav1.ConditionTrue, Reason: balancer.ReasonReady,
		Message: "the Service has " + strings.Join(named, " and "), ObservedGeneration: s.Generation,
		LastTransitionTime: now}
	switch {
	case answer.Refusal != nil:
		c.Status, c.Reason, c.Message = metav1.ConditionFalse, answer.Refusal.Reason, answer.Refusal.Message
	case answer.Outside != nil:
		c.Reason, c.Message = answer.Outside.Reason, answer.Outside.Message
	}
	meta.SetStatusCondition(&out.Conditions, c)
	return out
}

// statusEvent returns type, reason and message of the Event for a change of the Service's condition
// between the statuses previous and current. reason is "" if the change needs no Event.
func statusEvent(previous, current corev1.ServiceStatus) (eventType, reason, message string) {
	a, b := meta.FindStatusCondition(previous.Conditions, balancer.Condition),
		meta.FindStatusCondition(current.Conditions, balancer.Condition)
	if b == nil || a != nil && a.Reason == b.Reason && a.Message == b.Message {
		return "", "", ""
	}
	eventType = corev1.EventTypeNormal
	if b.Reason != balancer.ReasonReady {
		eventType = corev1.EventTypeWarning
	}
	return eventType, b.Reason, b.Message
}

// sameStatus reports whether two Service statuses are semantically equal.
func sameStatus(a, b corev1.ServiceStatus) bool { return equality.Semantic.DeepEqual(a, b) }

// UnfitReason returns why node n may not announce addresses, or "" if the node may announce them.
// lease is the Lease that records the session of the node's agent, or nil.
func UnfitReason(n *corev1.Node, lease *coordinationv1.Lease) string {
	if n == nil || n.DeletionTimestamp != nil {
		return "it is gone"
	}
	if !api.IsNodeReady(n) {
		return "it is not Ready"
	}
	if c := api.NodeCondition(n, corev1.NodeNetworkUnavailable); c != nil && c.Status == corev1.ConditionTrue {
		return "its network is not available"
	}
	if lease != nil && lease.Annotations[balancer.MissingSince] != "" {
		return "it does not report"
	}
	if n.Spec.Unschedulable {
		return "it is cordoned"
	}
	if _, excluded := n.Labels[corev1.LabelNodeExcludeBalancers]; excluded {
		return "it has label " + corev1.LabelNodeExcludeBalancers
	}
	if n.Annotations[balancer.Announces] != "true" {
		return "its agent does not announce addresses"
	}
	return ""
}

// Candidate is a node that may announce the addresses of a Service.
type Candidate struct {
	Node string
	Load int // number of Services that the node announces
}

// PickAnnouncer returns the candidate that announces the fewest Services, or "" if there are no
// candidates. Among equal candidates, a hash of the Service's name decides. Services created at the
// same time are therefore spread.
func PickAnnouncer(service engine.Key, among []Candidate) string {
	weigh := func(c Candidate) uint64 {
		sum := sha256.Sum256([]byte(service.String() + " " + c.Node))
		return binary.BigEndian.Uint64(sum[:])
	}
	if len(among) == 0 {
		return ""
	}
	return slices.MinFunc(among, func(a, b Candidate) int {
		return cmp.Or(cmp.Compare(a.Load, b.Load), cmp.Compare(weigh(a), weigh(b)), cmp.Compare(a.Node, b.Node))
	}).Node
}

// withEndpoints returns the nodes that have ready endpoints in the EndpointSlices of a Service.
func withEndpoints(endpointSlices []*discoveryv1.EndpointSlice) map[string]bool {
	out := map[string]bool{}
	for _, part := range endpointSlices {
		for _, e := range part.Endpoints {
			if e.NodeName != nil && (e.Conditions.Ready == nil || *e.Conditions.Ready) {
				out[*e.NodeName] = true
			}
		}
	}
	return out
}

// isLocalTraffic reports whether Service s has externalTrafficPolicy Local: only nodes with
// endpoints accept its external connections.
func isLocalTraffic(s *corev1.Service) bool {
	return s.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal
}
