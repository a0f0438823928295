package nettrace

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
)

// endpoint is the remote side of a connection, with the properties that NetworkPolicies match.
type endpoint struct {
	ip        netip.Addr // zero if the address is not known; then no ipBlock matches
	namespace string     // empty if the remote side is not a pod
	labels    map[string]string
	ports     []corev1.ContainerPort // declared container ports of the destination pod
	port      int32                  // 0 stands for any port
	proto     corev1.Protocol
}

// direction is a direction of NetworkPolicy rules, ingress or egress.
type direction networkingv1.PolicyType

const (
	ingress = direction(networkingv1.PolicyTypeIngress)
	egress  = direction(networkingv1.PolicyTypeEgress)
)

// verdict is the decision of the NetworkPolicies that select a pod about one connection. A pod that
// no NetworkPolicy selects is not isolated, and its connections are allowed.
type verdict struct {
	allowed bool
	by      []string // names of the policy that allows the connection, or of all policies that isolate the pod
}

func (v verdict) policyNames() string {
	if len(v.by) == 1 {
		return "policy " + v.by[0]
	}
	return "policies " + strings.Join(v.by, ", ")
}

// isolationText returns a clause for messages about a denied connection, such as "policy web
// isolates it". It names the policies in v.by.
func (v verdict) isolationText() string {
	if len(v.by) == 1 {
		return v.policyNames() + " isolates it"
	}
	return v.policyNames() + " isolate it"
}

// policyStep returns the step with the decisions of the NetworkPolicies. For each of the backends,
// it evaluates the egress policies of the source pod and the ingress policies of the backend's pod.
// The step fails if no backend is allowed.
func (x *tracer) policyStep(backends []backend) Step {
	s := Step{Name: "policy"}
	if slices.Contains(x.Unread, Policies) || slices.Contains(x.Unread, Namespaces) {
		s.Says = "not judged: policies or namespaces may not be read"
		return s
	}
	passed := 0
	by := map[string]bool{}
	tell := func(line string) {
		if !by[line] && len(by) < maxListed {
			by[line] = true
			s.Details = append(s.Details, line)
		}
	}
	for _, b := range backends {
		out := x.evaluatePolicies(x.Pod, egress, x.remoteBackend(b))
		if !out.allowed {
			tell(fmt.Sprintf("pod %s/%s may not send to %s: %s, and no rule of egress allows that", x.Pod.Namespace,
				x.Pod.Name, x.backendText(b), out.isolationText()))
			s.Mend = append(s.Mend, allowCommand(x.Pod, egress, x.remoteBackend(b), out))
		} else if len(out.by) > 0 {
			tell("sending is allowed by " + out.policyNames())
		}
		in := verdict{allowed: true}
		if b.pod != nil && !(x.Pod.Spec.HostNetwork && x.Pod.Spec.NodeName == b.pod.Spec.NodeName) {
			// a node always reaches its own pods
			in = x.evaluatePolicies(b.pod, ingress, x.remoteSource(b))
		}
		if !in.allowed {
			tell(fmt.Sprintf("pod %s/%s does not take it: %s, and no rule of ingress allows that", b.pod.Namespace,
				b.pod.Name, in.isolationText()))
			s.Mend = append(s.Mend, allowCommand(b.pod, ingress, x.remoteSource(b), in))
		} else if len(in.by) > 0 {
			tell("taking it is allowed by " + in.policyNames())
		}
		if out.allowed && in.allowed {
			passed++
		}
	}
	slices.Sort(s.Mend)
	s.Mend = slices.Compact(s.Mend)
	switch {
	case passed == len(backends) && len(s.Details) == 0:
		s.Says = "no policy isolates either side"
	case passed == len(backends):
		s.Says = "allowed"
	case passed > 0:
		s.Partly, s.Says = true, fmt.Sprintf("only %d of %d are allowed: connections to the others hang",
			passed, len(backends))
	default:
		s.Stops, s.Says = true, "dropped"
	}
	return s
}

// allowCommand returns a kctl command that adds a NetworkPolicy for pod p. The policy allows the
// connection with other in direction d. Policies are additive, so the policies in v that isolate
// the pod stay unchanged.
func allowCommand(p *corev1.Pod, d direction, other endpoint, v verdict) string {
	side := "from"
	if d == egress {
		side = "to"
	}
	peer := "pods " + labels.Set(other.labels).String() + " of namespace " + other.namespace
	switch {
	case other.namespace != "" && len(other.labels) == 0:
		peer = "namespace " + other.namespace
	case other.namespace == "" && other.ip.IsValid():
		peer = fmt.Sprintf("ipBlock %s/%d", other.ip, other.ip.BitLen())
	case other.namespace == "":
		peer = "that address"
	}
	selected := "all pods"
	if len(p.Labels) > 0 {
		selected = "pods " + labels.Set(p.Labels).String()
	}
	port := ""
	if other.port != 0 {
		port = fmt.Sprintf(", port %d/%s", other.port, other.proto)
	}
	return fmt.Sprintf("kctl -n %s apply -f FILE   # a further NetworkPolicy for %s with a rule of %s %s %s%s; "+
		"leave %s as it is",
		p.Namespace, selected, strings.ToLower(string(d)), side, peer, port, v.policyNames())
}

// remoteBackend returns backend b as the remote side of a connection, for the egress policies of
// the source pod.
func (x *tracer) remoteBackend(b backend) endpoint {
	e := endpoint{ip: b.ip, port: b.port, proto: b.proto}
	if b.pod != nil && !b.pod.Spec.HostNetwork {
		e.namespace, e.labels, e.ports = b.pod.Namespace, b.pod.Labels, portsOf(b.pod)
	}
	return e
}

// remoteSource returns the source pod as the remote side of a connection to backend b, for the
// ingress policies of b.pod. The port of the result is the port of b. b.pod must not be nil.
func (x *tracer) remoteSource(b backend) endpoint {
	e := endpoint{port: b.port, proto: b.proto, ports: portsOf(b.pod)}
	e.ip, _ = netip.ParseAddr(x.Pod.Status.PodIP)
	if !x.Pod.Spec.HostNetwork {
		e.namespace, e.labels = x.Pod.Namespace, x.Pod.Labels
	}
	return e
}

func portsOf(p *corev1.Pod) (out []corev1.ContainerPort) {
	for _, c := range p.Spec.Containers {
		out = append(out, c.Ports...)
	}
	return out
}

// evaluatePolicies returns the decision of the NetworkPolicies that select pod p about a connection
// with other in direction d. For a pod in the host network, it always allows the connection,
// because NetworkPolicies do not apply there.
func (x *tracer) evaluatePolicies(p *corev1.Pod, d direction, other endpoint) verdict {
	if p.Spec.HostNetwork {
		return verdict{allowed: true} // policies do not apply in the host network
	}
	var isolating []string
	for i := range x.Policies {
		np := &x.Policies[i]
		if np.Namespace != p.Namespace || !hasDirection(np, d) || !selectorMatches(&np.Spec.PodSelector, p.Labels) {
			continue
		}
		isolating = append(isolating, np.Name)
		if x.policyAllows(np, d, other) {
			return verdict{allowed: true, by: []string{np.Name}}
		}
	}
	return verdict{allowed: len(isolating) == 0, by: isolating}
}

// Isolating returns the names of the NetworkPolicies that isolate pod p for ingress (in) and for
// egress (out). Both are empty for a pod in the host network.
func Isolating(policies []networkingv1.NetworkPolicy, p *corev1.Pod) (in, out []string) {
	for i := range policies {
		np := &policies[i]
		if p.Spec.HostNetwork || np.Namespace != p.Namespace || !selectorMatches(&np.Spec.PodSelector, p.Labels) {
			continue
		}
		if hasDirection(np, ingress) {
			in = append(in, np.Name)
		}
		if hasDirection(np, egress) {
			out = append(out, np.Name)
		}
	}
	return in, out
}

// hasDirection reports whether policy np has rules for direction d, explicitly in policyTypes or by
// their defaults.
func hasDirection(np *networkingv1.NetworkPolicy, d direction) bool {
	if len(np.Spec.PolicyTypes) == 0 {
		return d == ingress || len(np.Spec.Egress) > 0
	}
	return slices.Contains(np.Spec.PolicyTypes, networkingv1.PolicyType(d))
}

func (x *tracer) policyAllows(np *networkingv1.NetworkPolicy, d direction, other endpoint) bool {
	rule := func(peers []networkingv1.NetworkPolicyPeer, ports []networkingv1.NetworkPolicyPort) bool {
		return (len(peers) == 0 || slices.ContainsFunc(peers, func(p networkingv1.NetworkPolicyPeer) bool {
			return x.peerMatches(np, p, other)
		})) &&
			(len(ports) == 0 || slices.ContainsFunc(ports, func(p networkingv1.NetworkPolicyPort) bool {
				return portMatches(p, other)
			}))
	}
	if d == ingress {
		return slices.ContainsFunc(np.Spec.Ingress, func(r networkingv1.NetworkPolicyIngressRule) bool {
			return rule(r.From, r.Ports)
		})
	}
	return slices.ContainsFunc(np.Spec.Egress, func(r networkingv1.NetworkPolicyEgressRule) bool {
		return rule(r.To, r.Ports)
	})
}

// peerMatches reports whether p, a peer in a rule of policy np, matches the remote side other.
func (x *tracer) peerMatches(np *networkingv1.NetworkPolicy, p networkingv1.NetworkPolicyPeer, other endpoint) bool {
	if b := p.IPBlock; b != nil {
		within := func(cidr string) bool {
			c, err := netip.ParsePrefix(cidr)
			return err == nil && c.Contains(other.ip)
		}
		return other.ip.IsValid() && within(b.CIDR) && !slices.ContainsFunc(b.Except, within)
	}
	if other.namespace == "" || p.PodSelector != nil && !selectorMatches(p.PodSelector, other.labels) {
		return false
	}
	if p.NamespaceSelector == nil {
		return other.namespace == np.Namespace
	}
	for _, ns := range x.Namespaces {
		if ns.Name == other.namespace {
			return selectorMatches(p.NamespaceSelector, ns.Labels)
		}
	}
	return false
}

// portMatches reports whether p, a port in a rule of a NetworkPolicy, matches the protocol and port
// of other. A connection to any port matches every port of its protocol.
func portMatches(p networkingv1.NetworkPolicyPort, other endpoint) bool {
	proto := ptr.Deref(p.Protocol, corev1.ProtocolTCP)
	switch {
	case proto != other.proto:
		return false
	case p.Port == nil || other.port == 0:
		return true
	case p.Port.Type == intstr.String:
		return slices.ContainsFunc(other.ports, func(c corev1.ContainerPort) bool {
			return c.Name == p.Port.StrVal && c.ContainerPort == other.port &&
				(c.Protocol == proto || c.Protocol == "" && proto == corev1.ProtocolTCP)
		})
	case p.EndPort != nil:
		return p.Port.IntVal <= other.port && other.port <= *p.EndPort
	}
	return p.Port.IntVal == other.port
}

func selectorMatches(s *metav1.LabelSelector, has map[string]string) bool {
	sel, err := metav1.LabelSelectorAsSelector(s)
	return err == nil && sel.Matches(labels.Set(has))
}
