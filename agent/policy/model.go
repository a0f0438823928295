// Package policy enforces NetworkPolicies on a node. A pure model computes which peers each pod may
// communicate with, from the policies that select pods of this node. nftables rules implement it
// with maps by pod address and sets of addresses. A packet of a pod without policies costs one
// lookup per direction; a packet of an established connection costs none.
//
// A connection is evaluated twice: when it leaves a pod of this node and when it reaches one. Both
// evaluations follow the destination NAT of Services, so that policies apply to the selected
// endpoint. Both precede the source NAT. Pods with the same policies share a chain. Peers with the
// same allowed ports form one set in the chain, whichever policies name them. The cost of a
// connection's first packet therefore does not depend on the number of policies.
package policy

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"keelson.dev/keelson/agent"
)

// Pod contains the properties of a pod on which policies depend. The pod runs on this node and has
// its own network namespace.
type Pod struct {
	UID       types.UID
	Namespace string
	Labels    map[string]string
	Ports     []NamedPort // named ports of its containers
	Addresses []netip.Addr
}

// NamedPort is a named port of a container.
type NamedPort struct {
	Name, Proto string // Proto is "tcp", "udp" or "sctp"
	Port        uint16
}

// newPod returns the Pod for the API object p and its addresses.
func newPod(p *v1.Pod, addresses []netip.Addr) Pod {
	out := Pod{UID: p.UID, Namespace: p.Namespace, Labels: p.Labels, Addresses: addresses}
	for n, list := range [][]v1.Container{p.Spec.InitContainers, p.Spec.Containers} {
		for i := range list {
			if r := list[i].RestartPolicy; n == 0 && (r == nil || *r != v1.ContainerRestartPolicyAlways) {
				continue // a regular init container has exited before the pod serves
			}
			for _, port := range list[i].Ports {
				if port.Name != "" && port.ContainerPort > 0 && port.ContainerPort < 1<<16 {
					out.Ports = append(out.Ports, NamedPort{port.Name, protocolName(port.Protocol),
						uint16(port.ContainerPort)})
				}
			}
		}
	}
	return out
}

func protocolName(p v1.Protocol) string { return strings.ToLower(string(cmp.Or(p, v1.ProtocolTCP))) }

// policy is a NetworkPolicy, converted to parsed rules.
type policy struct {
	key, namespace string // key is "namespace/name"
	selector       labels.Selector
	ingress        *[]rule // nil: the policy does not isolate pods in this direction
	egress         *[]rule
	named          bool // ingress rules use named ports; their numbers differ by pod
}

// rule is an ingress or egress rule of a policy. It allows traffic that matches one of its peers
// and one of its ports.
type rule struct {
	anyPeer bool
	groups  []string
	blocks  []addressRange // disjoint, in order
	anyPort bool
	ports   []portRange
	named   []NamedPort // named ports, without a number
	// portGroups maps each named port to the address group of the pods that have it. It is set only
	// for egress rules that allow destinations without selectors.
	portGroups map[NamedPort]string
}

type portRange struct {
	proto    string
	from, to uint16
}

// parsePolicy parses a NetworkPolicy. Parts that cannot be parsed allow nothing and are reported in
// the error.
func parsePolicy(p *networkingv1.NetworkPolicy) (*policy, error) {
	out := &policy{key: p.Namespace + "/" + p.Name, namespace: p.Namespace}
	var err error
	if out.selector, err = metav1.LabelSelectorAsSelector(&p.Spec.PodSelector); err != nil {
		return nil, fmt.Errorf("NetworkPolicy %s: spec.podSelector: %w", out.key, err)
	}
	r := policyParser{key: out.key, portGroups: parseNamedPortGroups(p.Annotations[agent.NamedPortGroups])}
	if names := p.Annotations[agent.AddressGroups]; names != "" {
		r.groups = strings.Split(names, ",")
	}
	in, eg := []rule{}, []rule{}
	for i := range p.Spec.Ingress {
		from := &p.Spec.Ingress[i]
		in = append(in, r.parseRule(from.From, from.Ports))
		out.named = out.named || len(in[i].named) > 0
	}
	for i := range p.Spec.Egress {
		to := &p.Spec.Egress[i]
		rule := r.parseRule(to.To, to.Ports)
		if rule.anyPeer || len(rule.blocks) > 0 {
			rule.portGroups = r.portGroups
		}
		eg = append(eg, rule)
	}
	if len(p.Spec.PolicyTypes) == 0 || slices.Contains(p.Spec.PolicyTypes, networkingv1.PolicyTypeIngress) {
		out.ingress = &in
	}
	if len(p.Spec.PolicyTypes) == 0 && len(eg) > 0 ||
		slices.Contains(p.Spec.PolicyTypes, networkingv1.PolicyTypeEgress) {
		out.egress = &eg
	}
	return out, r.err
}

// parseNamedPortGroups parses the annotation agent.NamedPortGroups. It omits entries that cannot be
// parsed. The ports of such entries allow no traffic.
func parseNamedPortGroups(text string) map[NamedPort]string {
	out := map[NamedPort]string{}
	for part := range strings.SplitSeq(text, ",") {
		port, group, _ := strings.Cut(strings.TrimSpace(part), "=")
		proto, name, _ := strings.Cut(port, "/")
		if name != "" && group != "" {
			out[NamedPort{Name: name, Proto: proto}] = group
		}
	}
	return out
}

// policyParser parses the rules of one NetworkPolicy in order. The control plane lists the address
// groups of all peers with selectors in an annotation. The parser assigns them to these peers in
// order.
type policyParser struct {
	key    string
	groups []string
	// portGroups maps each named port to the address group of the pods that have it.
	portGroups map[NamedPort]string
	err        error // the first parse error
}

func (r *policyParser) recordError(format string, args ...any) {
	if r.err == nil {
		r.err = fmt.Errorf("NetworkPolicy "+r.key+": "+format, args...)
	}
}

func (r *policyParser) parseRule(peers []networkingv1.NetworkPolicyPeer, ports []networkingv1.NetworkPolicyPort) rule {
	out := rule{anyPeer: len(peers) == 0, anyPort: len(ports) == 0}
	for _, p := range peers {
		if p.IPBlock != nil {
			spans, err := parseIPBlock(p.IPBlock.CIDR, p.IPBlock.Except)
			if err != nil {
				r.recordError("ipBlock: %w", err)
			}
			out.blocks = append(out.blocks, spans...)
			continue
		}
		if p.PodSelector == nil && p.NamespaceSelector == nil {
			continue // matches no peer
		}
		if len(r.groups) == 0 {
			r.recordError("a peer has no address group")
			continue
		}
		if name := strings.TrimSpace(r.groups[0]); name != "" && !slices.Contains(out.groups, name) {
			out.groups = append(out.groups, name)
		}
		r.groups = r.groups[1:]
	}
	out.blocks = mergeRanges(out.blocks)
	for _, p := range ports {
		out.addPort(p)
	}
	out.ports = joinPorts(out.ports)
	return out
}

func (r *rule) addPort(p networkingv1.NetworkPolicyPort) {
	proto := "tcp"
	if p.Protocol != nil {
		proto = protocolName(*p.Protocol)
	}
	switch {
	case proto != "tcp" && proto != "udp" && proto != "sctp": // allows nothing
	case p.Port == nil:
		r.ports = append(r.ports, portRange{proto, 0, 1<<16 - 1})
	case p.Port.Type == intstr.String:
		r.named = append(r.named, NamedPort{Name: p.Port.StrVal, Proto: proto})
	case p.Port.IntVal > 0 && p.Port.IntVal < 1<<16:
		last := p.Port.IntVal
		if p.EndPort != nil {
			last = min(*p.EndPort, 1<<16-1)
		}
		if last >= p.Port.IntVal {
			r.ports = append(r.ports, portRange{proto, uint16(p.Port.IntVal), uint16(last)})
		}
	}
}

// resolvePorts returns the rule with each named port replaced by the port number that a pod assigns
// to the name. pod contains the pod's named ports.
func (r rule) resolvePorts(pod []NamedPort) rule {
	if len(r.named) == 0 {
		return r
	}
	r.ports = slices.Clone(r.ports)
	for _, n := range r.named {
		for _, p := range pod {
			if p.Name == n.Name && p.Proto == n.Proto {
				r.ports = append(r.ports, portRange{p.Proto, p.Port, p.Port})
			}
		}
	}
	r.ports, r.named = joinPorts(r.ports), nil
	return r
}

// joinPorts returns the port ranges sorted, with overlapping and adjoining ranges merged. nft
// rejects overlapping intervals.
func joinPorts(in []portRange) []portRange {
	slices.SortFunc(in, func(a, b portRange) int {
		return cmp.Or(cmp.Compare(a.proto, b.proto), cmp.Compare(a.from, b.from), cmp.Compare(a.to, b.to))
	})
	var out []portRange
	for _, p := range in {
		if n := len(out) - 1; n >= 0 && out[n].proto == p.proto && int(p.from) <= int(out[n].to)+1 {
			out[n].to = max(out[n].to, p.to)
			continue
		}
		out = append(out, p)
	}
	return out
}

// hashID returns a short hash of the parts that is valid in nft names.
func hashID(parts ...string) string {
	h := sha256.New()
	for _, p := range parts {
		fmt.Fprintf(h, "%d:%s", len(p), p)
	}
	return hex.EncodeToString(h.Sum(nil)[:8])
}
