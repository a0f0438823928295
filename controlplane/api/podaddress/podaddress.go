// Package podaddress decides which of the addresses that nodes report for their pods are trusted:
// as endpoints of Services, as peers of network policies, and as targets of the API server's own
// connections. A node may be hostile, so an address is trusted only if the pod can really have it.
package podaddress

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api"
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

// Node contains the properties of a pod's Node on which WhyUntrusted depends.
type Node struct {
	Name      string
	Known     bool // the Node exists
	Own       bool // the node uses Keelson's own network configuration
	PodCIDRs  []netip.Prefix
	Addresses []netip.Addr
}

// NewNode returns the properties of a Node on which WhyUntrusted depends.
func NewNode(node *corev1.Node) Node {
	out := Node{Name: node.Name, Known: true, Own: node.Annotations[NetworkAnnotation] == OwnNetwork,
		PodCIDRs: podCIDRs(node)}
	for _, at := range node.Status.Addresses {
		if a, err := netip.ParseAddr(at.Address); err == nil &&
			(at.Type == corev1.NodeInternalIP || at.Type == corev1.NodeExternalIP) {
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

// Cluster provides the properties of the other objects of a cluster on which WhyUntrusted depends.
type Cluster interface {
	// ServiceRange returns the Service range that contains an address. It returns false if no range
	// contains the address.
	ServiceRange(a netip.Addr) (netip.Prefix, bool)
	// DescribeMachine returns a description of the cluster's machine that has an address, or "" if
	// no machine has the address.
	DescribeMachine(a netip.Addr) string
	// NodeWithRange returns the name of a node, other than except, with Keelson's network
	// configuration and with podCIDRs that contain an address. It returns "" if no such node
	// exists.
	NodeWithRange(a netip.Addr, except string) string
}

// WhyUntrusted returns the reason why a pod on a node cannot have an address. It returns "" if the
// pod can have it. hostNetwork reports whether the pod uses its node's network.
func WhyUntrusted(address netip.Addr, hostNetwork bool, node Node, r Rules, c Cluster) string {
	in := func(p netip.Prefix) bool { return p.Contains(address) }
	if !address.IsGlobalUnicast() {
		return "is an unspecified, loopback, link-local or multicast address"
	}
	if p, ok := c.ServiceRange(address); ok {
		return fmt.Sprintf("is in the range of Services %s", p)
	}
	if hostNetwork {
		switch {
		case !slices.Contains(node.Addresses, address):
			return fmt.Sprintf("is not an address of node %s, whose network the pod uses", node.Name)
		case c.NodeWithRange(address, node.Name) != "":
			return fmt.Sprintf("is in the podCIDRs of node %s", c.NodeWithRange(address, node.Name))
		}
		return ""
	}
	switch {
	case slices.Contains(node.Addresses, address):
		return fmt.Sprintf("is an address of node %s, and the pod does not use the network of its node", node.Name)
	case slices.ContainsFunc(node.PodCIDRs, in):
		return "" // a podCIDR belongs to one node, whichever addresses other nodes report
	case node.Own:
		return fmt.Sprintf("is not in the podCIDRs of node %s (%s)", node.Name, joinPrefixes(node.PodCIDRs))
	}
	if other := c.NodeWithRange(address, node.Name); other != "" {
		return fmt.Sprintf("is in the podCIDRs of node %s", other)
	}
	if what := c.DescribeMachine(address); what != "" {
		return "is an address of " + what
	}
	if len(r.ForeignRanges) > 0 && !slices.ContainsFunc(r.ForeignRanges, in) {
		return fmt.Sprintf("is neither in the podCIDRs of node %s nor in the ranges of --pod-address-ranges (%s)",
			node.Name, joinPrefixes(r.ForeignRanges))
	}
	return ""
}

func joinPrefixes(prefixes []netip.Prefix) string {
	if len(prefixes) == 0 {
		return "none yet"
	}
	out := make([]string, len(prefixes))
	for i, p := range prefixes {
		out[i] = p.String()
	}
	return strings.Join(out, ", ")
}

// IsPeer reports whether a pod may be an endpoint of a Service or a peer of a network policy.
func (r Rules) IsPeer(p *corev1.Pod) bool { return r.MirrorPeers || !podref.IsMirror(p) }

// ReportedIPs returns the addresses in a pod's status: podIPs, or podIP if podIPs is empty.
func ReportedIPs(s *corev1.PodStatus) []corev1.PodIP {
	if len(s.PodIPs) == 0 && s.PodIP != "" {
		return []corev1.PodIP{{IP: s.PodIP}}
	}
	return s.PodIPs
}

func parseAddress(text string) (netip.Addr, bool) {
	a, err := netip.ParseAddr(text)
	return a.WithZone("").Unmap(), err == nil
}

// isTerminal reports whether the phase of a pod is Succeeded or Failed, so that other pods may have
// its addresses.
func isTerminal(s *corev1.PodStatus) bool {
	return api.IsTerminalPhase(s.Phase)
}
