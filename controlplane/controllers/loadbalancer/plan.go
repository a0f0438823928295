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

	"keelson.dev/keelson/controlplane/api/balancer"
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/controllers"
)

// Reservation is the IPAddress that says that a Service has an address of a pool. Its name is the address: the store
// keeps a name once, so that no two Services have one address.
func Reservation(s *corev1.Service, a netip.Addr) *networkingv1.IPAddress {
	out := kinds.AddressOf(s, a.String())
	out.Labels[networkingv1.LabelManagedBy] = balancer.Allocator
	return out
}

// holder is the Service for which an IPAddress reserves an address; ok is false where it is not of this allocator.
func holder(a *networkingv1.IPAddress) (key controllers.Key, ok bool) {
	ref := a.Spec.ParentRef
	if a.Labels[networkingv1.LabelManagedBy] != balancer.Allocator || ref == nil || ref.Group != "" || ref.Resource != "services" {
		return controllers.Key{}, false
	}
	return controllers.Key{Namespace: ref.Namespace, Name: ref.Name}, true
}

// given are the addresses that the status of a Service names.
func given(s *corev1.Service) []netip.Addr {
	var out []netip.Addr
	for _, in := range s.Status.LoadBalancer.Ingress {
		if a, err := netip.ParseAddr(in.IP); err == nil {
			out = append(out, a.Unmap())
		}
	}
	return out
}

// has are the addresses that a Service has: those that are reserved for it, and of its status those that a pool has or,
// where it names our class, all. foreign says that somebody else gives it addresses.
func has(s *corev1.Service, reserved []netip.Addr, pools []*balancer.Pool, free func(netip.Addr) bool) (out []netip.Addr, foreign bool) {
	out = slices.Clone(reserved)
	for _, a := range given(s) {
		if slices.Contains(out, a) || !free(a) {
			continue
		}
		if balancer.Asked(s) || balancer.PoolOf(pools, a) != nil {
			out = append(out, a) // its reservation was taken away
		}
	}
	return out, len(out) == 0 && len(s.Status.LoadBalancer.Ingress) > 0 && !balancer.Asked(s)
}

// Status is what the status of a Service shall be.
func Status(s *corev1.Service, answer balancer.Answer, pools []*balancer.Pool, now metav1.Time) corev1.ServiceStatus {
	out := *s.Status.DeepCopy()
	mode := corev1.LoadBalancerIPModeVIP
	out.LoadBalancer.Ingress = nil
	var named []string
	for _, a := range answer.Addresses {
		out.LoadBalancer.Ingress = append(out.LoadBalancer.Ingress, corev1.LoadBalancerIngress{IP: a.String(), IPMode: &mode})
		text := a.String()
		if p := balancer.PoolOf(pools, a); p != nil {
			text += " of pool " + p.Name
		}
		named = append(named, text)
	}
	c := metav1.Condition{Type: balancer.Condition, Status: metav1.ConditionTrue, Reason: balancer.ReasonReady,
		Message: "the Service has " + strings.Join(named, " and "), ObservedGeneration: s.Generation, LastTransitionTime: now}
	switch {
	case answer.Refusal != nil:
		c.Status, c.Reason, c.Message = metav1.ConditionFalse, answer.Refusal.Reason, answer.Refusal.Message
	case answer.Outside != nil:
		c.Reason, c.Message = answer.Outside.Reason, answer.Outside.Message
	}
	meta.SetStatusCondition(&out.Conditions, c)
	return out
}

// news is the Event that tells what a status says anew; "" where it says nothing new.
func news(before, after corev1.ServiceStatus) (eventType, reason, message string) {
	a, b := meta.FindStatusCondition(before.Conditions, balancer.Condition), meta.FindStatusCondition(after.Conditions, balancer.Condition)
	if b == nil || a != nil && a.Reason == b.Reason && a.Message == b.Message {
		return "", "", ""
	}
	eventType = corev1.EventTypeNormal
	if b.Reason != balancer.ReasonReady {
		eventType = corev1.EventTypeWarning
	}
	return eventType, b.Reason, b.Message
}

// sameStatus compares what this controller writes of a status.
func sameStatus(a, b corev1.ServiceStatus) bool { return equality.Semantic.DeepEqual(a, b) }

// Fit says why a node is not to answer for addresses; "" = it may. lease is its session record, nil where there is none.
func Fit(n *corev1.Node, lease *coordinationv1.Lease) string {
	if n == nil || n.DeletionTimestamp != nil {
		return "it is gone"
	}
	if c := controllers.NodeCondition(n, corev1.NodeReady); c == nil || c.Status != corev1.ConditionTrue {
		return "it is not Ready"
	}
	if c := controllers.NodeCondition(n, corev1.NodeNetworkUnavailable); c != nil && c.Status == corev1.ConditionTrue {
		return "its network is not available"
	}
	if lease != nil && lease.Annotations[balancer.Unheard] != "" {
		return "it is not heard"
	}
	if n.Spec.Unschedulable {
		return "it is cordoned"
	}
	if _, excluded := n.Labels[corev1.LabelNodeExcludeBalancers]; excluded {
		return "it has label " + corev1.LabelNodeExcludeBalancers
	}
	if n.Annotations[balancer.Announces] != "true" {
		return "its agent answers for no addresses"
	}
	return ""
}

// Candidate is a node that may answer.
type Candidate struct {
	Node string
	Load int // Services for which it answers
}

// Pick chooses the node with the least to answer for. Among equals the Service's name decides, so that Services that are
// made at once on several leaders in turn do not all meet at one node.
func Pick(service controllers.Key, among []Candidate) string {
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

// withEndpoints are the nodes that have ready endpoints of a Service.
func withEndpoints(slices []*discoveryv1.EndpointSlice) map[string]bool {
	out := map[string]bool{}
	for _, part := range slices {
		for _, e := range part.Endpoints {
			if e.NodeName != nil && (e.Conditions.Ready == nil || *e.Conditions.Ready) {
				out[*e.NodeName] = true
			}
		}
	}
	return out
}

// local says that only nodes with endpoints take connections from outside.
func local(s *corev1.Service) bool {
	return s.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal
}
