// Package podaddress decides which of the addresses that nodes report for their pods count: as endpoints of Services, as
// peers of network policies, and as targets of the API's own connections. A node may be hostile: an address of a pod
// counts only where the pod can have it.
package podaddress

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api/podref"
)

// NetworkAnnotation of a Node is set by its agent: OwnNetwork or ForeignNetwork. Agents of earlier releases and kubelets
// do not set it.
const NetworkAnnotation = "keelson.dev/pod-network"

// The values of NetworkAnnotation.
const (
	OwnNetwork     = "keelson" // pods have addresses of the node's podCIDRs, by Keelson's own network configuration
	ForeignNetwork = "foreign" // another network configuration is installed, or still has pods
)

// Rules are the settings of the administrator, equal on every replica.
type Rules struct {
	// Services are the ranges of Services that the cluster was created with.
	Services []netip.Prefix
	// ForeignRanges are the addresses of pods on nodes whose network configuration is not Keelson's; empty = any.
	ForeignRanges []netip.Prefix
	// MirrorPeers makes mirror pods endpoints of Services and peers of policies.
	MirrorPeers bool
	// Replicas returns the addresses on which replicas of the control plane listen; nil = not known.
	Replicas func() []netip.AddrPort
	// Sync blocks until the informers of New show every change that was acknowledged before the call; nil = they do.
	Sync func(ctx context.Context) error
}

// Node is what the rule reads of a Node.
type Node struct {
	Name      string
	Known     bool // the Node exists
	Own       bool // its network configuration is Keelson's
	PodCIDRs  []netip.Prefix
	Addresses []netip.Addr
}

// NodeOf returns what the rule reads of a Node.
func NodeOf(n *corev1.Node) Node {
	out := Node{Name: n.Name, Known: true, Own: n.Annotations[NetworkAnnotation] == OwnNetwork, PodCIDRs: podCIDRs(n)}
	for _, at := range n.Status.Addresses {
		if a, err := netip.ParseAddr(at.Address); err == nil && (at.Type == corev1.NodeInternalIP || at.Type == corev1.NodeExternalIP) {
			out.Addresses = append(out.Addresses, a.WithZone("").Unmap())
		}
	}
	return out
}

func podCIDRs(n *corev1.Node) (out []netip.Prefix) {
	all := n.Spec.PodCIDRs
	if len(all) == 0 && n.Spec.PodCIDR != "" {
		all = []string{n.Spec.PodCIDR}
	}
	for _, text := range all {
		if p, err := netip.ParsePrefix(text); err == nil {
			out = append(out, p.Masked())
		}
	}
	return out
}

// Cluster is what the rule reads of the rest of the cluster.
type Cluster interface {
	// ServiceRange returns the range of Services that has an address.
	ServiceRange(a netip.Addr) (netip.Prefix, bool)
	// Machines describes a machine of the cluster that has an address; "" = none.
	Machine(a netip.Addr) string
	// RangeOf returns the other node with Keelson's network whose podCIDRs have an address; "" = none.
	RangeOf(a netip.Addr, except string) string
}

// Refusal returns why a pod cannot have an address; "" = it can.
func Refusal(a netip.Addr, hostNetwork bool, node Node, r Rules, c Cluster) string {
	in := func(p netip.Prefix) bool { return p.Contains(a) }
	if !a.IsGlobalUnicast() {
		return "is an unspecified, loopback, link-local or multicast address"
	}
	if p, ok := c.ServiceRange(a); ok {
		return fmt.Sprintf("is in the range of Services %s", p)
	}
	if hostNetwork {
		switch {
		case !slices.Contains(node.Addresses, a):
			return fmt.Sprintf("is not an address of node %s, whose network the pod uses", node.Name)
		case c.RangeOf(a, node.Name) != "":
			return fmt.Sprintf("is in the podCIDRs of node %s", c.RangeOf(a, node.Name))
		}
		return ""
	}
	switch {
	case slices.Contains(node.Addresses, a):
		return fmt.Sprintf("is an address of node %s, and the pod does not use the network of its node", node.Name)
	case slices.ContainsFunc(node.PodCIDRs, in):
		return "" // a block belongs to one node, whatever addresses other nodes report for themselves
	case node.Own:
		return fmt.Sprintf("is not in the podCIDRs of node %s (%s)", node.Name, join(node.PodCIDRs))
	}
	if other := c.RangeOf(a, node.Name); other != "" {
		return fmt.Sprintf("is in the podCIDRs of node %s", other)
	}
	if what := c.Machine(a); what != "" {
		return "is an address of " + what
	}
	if len(r.ForeignRanges) > 0 && !slices.ContainsFunc(r.ForeignRanges, in) {
		return fmt.Sprintf("is neither in the podCIDRs of node %s nor in the ranges of --pod-address-ranges (%s)",
			node.Name, join(r.ForeignRanges))
	}
	return ""
}

func join(all []netip.Prefix) string {
	if len(all) == 0 {
		return "none yet"
	}
	out := make([]string, len(all))
	for i, p := range all {
		out[i] = p.String()
	}
	return strings.Join(out, ", ")
}

// IsPeer reports whether a pod may be an endpoint of a Service or a peer of a policy.
func (r Rules) IsPeer(p *corev1.Pod) bool { return r.MirrorPeers || !podref.IsMirror(p) }

// Reported returns the addresses of a pod's status: podIPs, or podIP where podIPs is empty.
func Reported(s *corev1.PodStatus) []corev1.PodIP {
	if len(s.PodIPs) == 0 && s.PodIP != "" {
		return []corev1.PodIP{{IP: s.PodIP}}
	}
	return s.PodIPs
}

func parse(text string) (netip.Addr, bool) {
	a, err := netip.ParseAddr(text)
	return a.WithZone("").Unmap(), err == nil
}

// hasEnded reports whether the pod's containers have ended for good: its addresses are free.
func hasEnded(s *corev1.PodStatus) bool {
	return s.Phase == corev1.PodSucceeded || s.Phase == corev1.PodFailed
}
