// Package policy puts NetworkPolicies in force on a worker: a pure model of which pod may talk with whom, compiled from
// the policies that select pods of this node, and nftables rules that express it as maps by pod address and sets of
// addresses, so that a packet of a pod without policies costs one lookup each way and an established connection none.
//
// A connection is judged twice, as it leaves a pod of this node and as it reaches one, after the destination was
// changed (the pod that a Service leads to counts) and before the source is. Pods with the same policies share a chain, in
// which peers that may reach the same ports are one set, whichever policies say so: what a first packet costs does not
// depend on how many policies there are.
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

// Pod is a pod of this node with addresses of its own.
type Pod struct {
	UID       types.UID
	Namespace string
	Labels    map[string]string
	Ports     []NamedPort // that its containers name
	Addresses []netip.Addr
}

// NamedPort is a port of a container.
type NamedPort struct {
	Name, Proto string // "tcp", "udp" or "sctp"
	Port        uint16
}

// podOf takes from a pod what policies ask of it.
func podOf(p *v1.Pod, addresses []netip.Addr) Pod {
	out := Pod{UID: p.UID, Namespace: p.Namespace, Labels: p.Labels, Addresses: addresses}
	for n, list := range [][]v1.Container{p.Spec.InitContainers, p.Spec.Containers} {
		for i := range list {
			if r := list[i].RestartPolicy; n == 0 && (r == nil || *r != v1.ContainerRestartPolicyAlways) {
				continue // it is gone before the pod serves
			}
			for _, port := range list[i].Ports {
				if port.Name != "" && port.ContainerPort > 0 && port.ContainerPort < 1<<16 {
					out.Ports = append(out.Ports, NamedPort{port.Name, protocol(port.Protocol), uint16(port.ContainerPort)})
				}
			}
		}
	}
	return out
}

func protocol(p v1.Protocol) string { return strings.ToLower(string(cmp.Or(p, v1.ProtocolTCP))) }

// policy is a NetworkPolicy, read.
type policy struct {
	key, namespace string // key is "namespace/name"
	selector       labels.Selector
	ingress        *[]rule // nil: the policy says nothing of this direction
	egress         *[]rule
	named          bool // rules of ingress name ports: what they mean differs by pod
}

// rule lets through what matches one of its peers and one of its ports.
type rule struct {
	anybody bool
	groups  []string
	blocks  []span // disjoint, in order
	anyPort bool
	ports   []portRange
	named   []NamedPort // without a number
	// callers are the groups of pods that name a port of named; only of egress rules that allow destinations without
	// selectors.
	callers map[NamedPort]string
}

type portRange struct {
	proto    string
	from, to uint16
}

// read makes a policy of an object. What cannot be read lets nothing through, and is in the error.
func read(p *networkingv1.NetworkPolicy) (*policy, error) {
	out := &policy{key: p.Namespace + "/" + p.Name, namespace: p.Namespace}
	var err error
	if out.selector, err = metav1.LabelSelectorAsSelector(&p.Spec.PodSelector); err != nil {
		return nil, fmt.Errorf("NetworkPolicy %s: spec.podSelector: %w", out.key, err)
	}
	r := reader{key: out.key, callers: readCallers(p.Annotations[agent.NamedPortGroups])}
	if names := p.Annotations[agent.AddressGroups]; names != "" {
		r.groups = strings.Split(names, ",")
	}
	in, eg := []rule{}, []rule{}
	for i := range p.Spec.Ingress {
		from := &p.Spec.Ingress[i]
		in = append(in, r.rule(from.From, from.Ports))
		out.named = out.named || len(in[i].named) > 0
	}
	for i := range p.Spec.Egress {
		to := &p.Spec.Egress[i]
		rule := r.rule(to.To, to.Ports)
		if rule.anybody || len(rule.blocks) > 0 {
			rule.callers = r.callers
		}
		eg = append(eg, rule)
	}
	if len(p.Spec.PolicyTypes) == 0 || slices.Contains(p.Spec.PolicyTypes, networkingv1.PolicyTypeIngress) {
		out.ingress = &in
	}
	if len(p.Spec.PolicyTypes) == 0 && len(eg) > 0 || slices.Contains(p.Spec.PolicyTypes, networkingv1.PolicyTypeEgress) {
		out.egress = &eg
	}
	return out, r.err
}

// readCallers reads the annotation agent.NamedPortGroups. What cannot be read is left out, and its port allows nothing.
func readCallers(text string) map[NamedPort]string {
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

// reader reads the rules of one policy in their order, and takes a group for each peer with selectors.
type reader struct {
	key    string
	groups []string
	// callers are the groups of pods that name a port, by the port.
	callers map[NamedPort]string
	err     error // the first thing that could not be read
}

func (r *reader) fail(format string, args ...any) {
	if r.err == nil {
		r.err = fmt.Errorf("NetworkPolicy "+r.key+": "+format, args...)
	}
}

func (r *reader) rule(peers []networkingv1.NetworkPolicyPeer, ports []networkingv1.NetworkPolicyPort) rule {
	out := rule{anybody: len(peers) == 0, anyPort: len(ports) == 0}
	for _, p := range peers {
		if p.IPBlock != nil {
			spans, err := block(p.IPBlock.CIDR, p.IPBlock.Except)
			if err != nil {
				r.fail("ipBlock: %w", err)
			}
			out.blocks = append(out.blocks, spans...)
			continue
		}
		if p.PodSelector == nil && p.NamespaceSelector == nil {
			continue // nobody
		}
		if len(r.groups) == 0 {
			r.fail("a peer has no group of addresses")
			continue
		}
		if name := strings.TrimSpace(r.groups[0]); name != "" && !slices.Contains(out.groups, name) {
			out.groups = append(out.groups, name)
		}
		r.groups = r.groups[1:]
	}
	out.blocks = join(out.blocks)
	for _, p := range ports {
		out.addPort(p)
	}
	out.ports = joinPorts(out.ports)
	return out
}

func (r *rule) addPort(p networkingv1.NetworkPolicyPort) {
	proto := "tcp"
	if p.Protocol != nil {
		proto = protocol(*p.Protocol)
	}
	switch {
	case proto != "tcp" && proto != "udp" && proto != "sctp": // lets nothing through
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

// resolved gives the names of ports their numbers in a pod.
func (r rule) resolved(pod []NamedPort) rule {
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

// joinPorts sorts ranges and makes one of those that meet: nft refuses intervals that overlap.
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

// id is a short name that nft accepts, for whatever text.
func id(parts ...string) string {
	h := sha256.New()
	for _, p := range parts {
		fmt.Fprintf(h, "%d:%s", len(p), p)
	}
	return hex.EncodeToString(h.Sum(nil)[:8])
}
