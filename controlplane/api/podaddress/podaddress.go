// Package podaddress decides which of the addresses that nodes report for their pods are trusted:
// as endpoints of Services, as peers of network policies, and as targets of the API server's own
// connections. A node may be hostile, so an address is trusted only if the pod can have it.
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

// NetworkAnnotation on a Node is set by its agent to OwnNetwork or ForeignNetwork. Older agents and
// kubelets do not set it.
const NetworkAnnotation = "keelson.dev/pod-network"

// Values of NetworkAnnotation.
const (
	// pods get addresses of the node's podCIDRs from Keelson's own CNI configuration
	OwnNetwork = "keelson"
	// another CNI configuration is installed, or pods created with it still exist
	ForeignNetwork = "foreign"
)

// Rules are the administrator's settings, which are equal on every replica.
type Rules struct {
	// Services are the Service ranges with which the cluster was created.
	Services []netip.Prefix
	// ForeignRanges are the allowed addresses of pods on nodes with another network configuration;
	// empty = any.
	ForeignRanges []netip.Prefix
	// MirrorPeers allows mirror pods as endpoints of Services and peers of network policies.
	MirrorPeers bool
	// Replicas returns the addresses on which the control plane's replicas listen; nil = unknown.
	Replicas func() []netip.AddrPort
	// Sync blocks until the informers passed to New include every change that was acknowledged
	// before the call. nil means that they always do.
	Sync func(ctx context.Context) error
}

// Node has the properties of a Node that the decision needs.
type Node struct {
	Name      string
	Known     bool // the Node exists
	Own       bool // the node uses Keelson's own network configuration
	PodCIDRs  []netip.Prefix
	Addresses []netip.Addr
}

// NodeOf returns the properties of a Node that the decision needs.
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

// Cluster has the properties of the rest of the cluster that the decision needs.
type Cluster interface {
	// ServiceRange returns the Service range that contains an address.
	ServiceRange(a netip.Addr) (netip.Prefix, bool)
	// Machine returns a description of the machine of the cluster that has an address, or "".
	Machine(a netip.Addr) string
	// RangeOf returns a node other than except, with Keelson's network, whose podCIDRs contain an
	// address, or "".
	RangeOf(a netip.Addr, except string) string
}

// Refusal returns the reason why a pod on node cannot have the address a, or "" if it can.
// hostNetwork reports whether the pod uses its node's network.
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
		return "" // a podCIDR belongs to one node, whatever addresses other nodes report
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

// IsPeer reports whether a pod may be an endpoint of a Service or a peer of a network policy.
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

// hasEnded reports whether the pod is terminal, so that its addresses are free.
func hasEnded(s *corev1.PodStatus) bool {
	return s.Phase == corev1.PodSucceeded || s.Phase == corev1.PodFailed
}
