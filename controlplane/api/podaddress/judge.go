package podaddress

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/podref"
)

// Source is the network address from which a node sent a report, as observed by the replica that
// received it.
type Source struct {
	Address netip.Addr
	Local   bool // the connection comes from the replica's own machine
}

// NewSource returns the Source of a connection with the given remote and local addresses.
func NewSource(remote, local netip.Addr) Source {
	remote, local = remote.WithZone("").Unmap(), local.WithZone("").Unmap()
	return Source{Address: remote, Local: remote.IsValid() && (remote.IsLoopback() || remote == local)}
}

type sourceKey struct{}

// WithSource returns a copy of ctx that carries the source of the request.
func WithSource(ctx context.Context, s Source) context.Context {
	return context.WithValue(ctx, sourceKey{}, s)
}

func sourceFrom(ctx context.Context) Source {
	s, _ := ctx.Value(sourceKey{}).(Source)
	return s
}

// Sync blocks until the informers include every report that was acknowledged before the call.
func (x *Index) Sync(ctx context.Context) error {
	if x == nil || x.rules.Sync == nil {
		return nil
	}
	return x.rules.Sync(ctx)
}

// ContestedPodAddresses returns those new addresses in a node's report about a pod that a pod of
// another node could report concurrently. For a node with Keelson's network configuration it
// returns nil, because no other node has its podCIDRs.
func (x *Index) ContestedPodAddresses(stored, reported *corev1.Pod) []netip.Addr {
	if x == nil || isTerminal(&reported.Status) || stored.Spec.HostNetwork || podref.IsMirror(stored) ||
		x.nodeByName(stored.Spec.NodeName).Own {
		return nil
	}
	return parseAddresses(newAddresses(stored, reported))
}

// ContestedNodeAddresses returns the addresses that the report of a Node adds to the stored ones.
func (x *Index) ContestedNodeAddresses(stored, reported *corev1.Node) []netip.Addr {
	if x == nil {
		return nil
	}
	var had, out []netip.Addr
	if stored != nil {
		had = NewNode(stored).Addresses
	}
	for _, a := range NewNode(reported).Addresses {
		if a.IsGlobalUnicast() && !slices.Contains(had, a) { // other addresses are never trusted
			out = append(out, a)
		}
	}
	return out
}

// newAddresses returns the addresses of a reported pod that the stored pod does not have.
func newAddresses(stored, reported *corev1.Pod) (out []corev1.PodIP) {
	had := ReportedIPs(&stored.Status)
	all := ReportedIPs(&reported.Status)
	if ip := (corev1.PodIP{IP: reported.Status.PodIP}); ip.IP != "" && !slices.Contains(all, ip) {
		all = append(slices.Clone(all), ip)
	}
	for _, ip := range all {
		if !slices.Contains(had, ip) {
			out = append(out, ip)
		}
	}
	return out
}

func parseAddresses(reported []corev1.PodIP) (out []netip.Addr) {
	for _, ip := range reported {
		if a, ok := parseAddress(ip.IP); ok {
			out = append(out, a)
		}
	}
	return out
}

// CheckPodReport returns an error if a node reports an address for its pod that the pod cannot
// have. It also returns an error if a pod of another node has the address. It does not check
// addresses that the stored pod already has, nor those of a terminal pod.
func (x *Index) CheckPodReport(stored, reported *corev1.Pod) error {
	if x == nil || isTerminal(&reported.Status) {
		return nil
	}
	node := x.nodeByName(stored.Spec.NodeName)
	for _, ip := range newAddresses(stored, reported) {
		if !node.Known && stored.Spec.HostNetwork {
			// the Node is not in the informer yet; the address is checked again when it is used
			continue
		}
		why := x.whyUntrusted(stored, node, ip.IP)
		if a, ok := parseAddress(ip.IP); why == "" && ok && !stored.Spec.HostNetwork {
			if other := x.findHolder(a, node.Name); other != nil {
				why = fmt.Sprintf("is the address of pod %s/%s of node %s", other.Namespace, other.Name,
					other.Spec.NodeName)
			}
		}
		if why != "" {
			return fmt.Errorf("node %q cannot report address %s in status.podIPs of pod %s/%s: it %s; "+
				"report an address that the pod has", node.Name, ip.IP, stored.Namespace, stored.Name, why)
		}
	}
	return nil
}

// CheckNodeReport returns an error if a node reports an address as its own that belongs to
// something else: a Service range, the podCIDRs of another node, another machine or a pod of
// another node. It does not check addresses that the stored Node already has.
func (x *Index) CheckNodeReport(ctx context.Context, stored, reported *corev1.Node) error {
	for _, a := range x.ContestedNodeAddresses(stored, reported) {
		why, remedy := x.whyNodeRefused(a, reported, sourceFrom(ctx))
		if why != "" {
			return fmt.Errorf("node %q cannot report address %s in status.addresses: it %s; %s", reported.Name,
				a, why, remedy)
		}
	}
	return nil
}

// whyNodeRefused returns the reason why a node cannot have an address, and a remedy. Both are "" if
// the node can have it.
func (x *Index) whyNodeRefused(address netip.Addr, reported *corev1.Node, source Source) (why, remedy string) {
	const ownAddresses = "report the addresses of its own machine"
	if p, ok := x.ServiceRange(address); ok {
		return fmt.Sprintf("is in the range of Services %s", p), ownAddresses
	}
	if other := x.NodeWithRange(address, reported.Name); other != "" {
		return fmt.Sprintf("is in the podCIDRs of node %s", other), ownAddresses
	}
	if other := x.findOtherNode(address, reported); other != "" {
		return fmt.Sprintf("is an address of node %s", other),
			fmt.Sprintf("%s, or delete Node %s if its machine no longer exists", ownAddresses, other)
	}
	if x.isReplica(address) && !source.Local && !x.isReplica(source.Address) {
		return fmt.Sprintf("is an address of a replica of the control plane, and the node connects from %s", source),
			ownAddresses + ", or connect to the replicas from this address"
	}
	if p := x.findHolder(address, reported.Name); p != nil {
		return fmt.Sprintf("is the address of pod %s/%s of node %s", p.Namespace, p.Name, p.Spec.NodeName), ownAddresses
	}
	return "", ""
}

// String returns the address, or a text if it is unknown.
func (s Source) String() string {
	if !s.Address.IsValid() {
		return "an unknown address"
	}
	return s.Address.String()
}

// findOtherNode returns the name of another Node that reports an address, or "". Nodes with an
// unknown Ready condition are ignored, because their machine may have been replaced. An ExternalIP
// that several Nodes share is allowed: it may belong to a router.
func (x *Index) findOtherNode(address netip.Addr, reported *corev1.Node) string {
	list, _ := x.nodes.ByIndex(machineIndex, address.String())
	var names []string
	for _, o := range list {
		n, ok := o.(*corev1.Node)
		if ok && n.Name != reported.Name && !isLost(n) &&
			(hasInternalIP(n, address) || hasInternalIP(reported, address)) {
			names = append(names, n.Name)
		}
	}
	if len(names) == 0 {
		return ""
	}
	return slices.Min(names)
}

func isLost(n *corev1.Node) bool {
	return api.NodeReadyStatus(n) == corev1.ConditionUnknown
}

func hasInternalIP(n *corev1.Node, a netip.Addr) bool {
	return slices.ContainsFunc(n.Status.Addresses, func(at corev1.NodeAddress) bool {
		have, ok := parseAddress(at.Address)
		return ok && have == a && at.Type == corev1.NodeInternalIP
	})
}

// IsNodeChanged reports whether the change of a Node can make addresses of its pods trusted or
// untrusted.
func IsNodeChanged(old, updated *corev1.Node) bool {
	if old == nil || updated == nil {
		return true
	}
	a, b := NewNode(old), NewNode(updated)
	return a.Own != b.Own || !slices.Equal(a.PodCIDRs, b.PodCIDRs) || !slices.Equal(a.Addresses, b.Addresses)
}
