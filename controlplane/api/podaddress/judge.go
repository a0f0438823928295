package podaddress

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api/podref"
)

// Source is the origin of a node's report, as observed by the replica that received it.
type Source struct {
	Address netip.Addr
	Local   bool // the connection comes from the replica's own machine
}

// SourceOf returns the source of a connection with these remote and local addresses.
func SourceOf(remote, local netip.Addr) Source {
	remote, local = remote.WithZone("").Unmap(), local.WithZone("").Unmap()
	return Source{Address: remote, Local: remote.IsValid() && (remote.IsLoopback() || remote == local)}
}

type sourceKey struct{}

// WithSource returns a copy of ctx that carries the source of the request.
func WithSource(ctx context.Context, s Source) context.Context {
	return context.WithValue(ctx, sourceKey{}, s)
}

func sourceIn(ctx context.Context) Source {
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

// Contested returns the new addresses of a pod's report that a pod of another node could report
// concurrently. For a node with Keelson's network the result is empty, because its podCIDRs belong
// to it alone.
func (x *Index) Contested(stored, reported *corev1.Pod) []netip.Addr {
	if x == nil || hasEnded(&reported.Status) || stored.Spec.HostNetwork || podref.IsMirror(stored) || x.node(stored.Spec.NodeName).Own {
		return nil
	}
	return parseAll(newAddresses(stored, reported))
}

// ContestedMachine returns the addresses that a Node newly reports as its own.
func (x *Index) ContestedMachine(stored, reported *corev1.Node) []netip.Addr {
	if x == nil {
		return nil
	}
	var had, out []netip.Addr
	if stored != nil {
		had = NodeOf(stored).Addresses
	}
	for _, a := range NodeOf(reported).Addresses {
		if a.IsGlobalUnicast() && !slices.Contains(had, a) { // other addresses are never trusted
			out = append(out, a)
		}
	}
	return out
}

// newAddresses returns the addresses of a report that the stored pod does not have.
func newAddresses(stored, reported *corev1.Pod) (out []corev1.PodIP) {
	had := Reported(&stored.Status)
	all := Reported(&reported.Status)
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

func parseAll(all []corev1.PodIP) (out []netip.Addr) {
	for _, ip := range all {
		if a, ok := parse(ip.IP); ok {
			out = append(out, a)
		}
	}
	return out
}

// JudgeReport returns an error if a node reports an address for its pod that the pod cannot have or
// that another node's pod has. Addresses that the stored pod already has are not checked again, nor
// are those of a terminal pod.
func (x *Index) JudgeReport(stored, reported *corev1.Pod) error {
	if x == nil || hasEnded(&reported.Status) {
		return nil
	}
	node := x.node(stored.Spec.NodeName)
	for _, ip := range newAddresses(stored, reported) {
		if !node.Known && stored.Spec.HostNetwork {
			// the Node is not in the informer yet; the address is checked again when it is used
			continue
		}
		why := x.refusal(stored, node, ip.IP)
		if a, ok := parse(ip.IP); why == "" && ok && !stored.Spec.HostNetwork {
			if other := x.holder(a, node.Name); other != nil {
				why = fmt.Sprintf("is the address of pod %s/%s of node %s", other.Namespace, other.Name, other.Spec.NodeName)
			}
		}
		if why != "" {
			return fmt.Errorf("node %q cannot report address %s in status.podIPs of pod %s/%s: it %s; "+
				"report an address that the pod has", node.Name, ip.IP, stored.Namespace, stored.Name, why)
		}
	}
	return nil
}

// JudgeMachine returns an error if a node reports an address as its own that belongs to something
// else. That is a Service range, the podCIDRs of another node, another machine or a pod of another
// node. Addresses that the stored Node already has are not checked again.
func (x *Index) JudgeMachine(ctx context.Context, stored, reported *corev1.Node) error {
	for _, a := range x.ContestedMachine(stored, reported) {
		why, remedy := x.refuseMachine(a, reported, sourceIn(ctx))
		if why != "" {
			return fmt.Errorf("node %q cannot report address %s in status.addresses: it %s; %s", reported.Name, a, why, remedy)
		}
	}
	return nil
}

// refuseMachine returns the reason why a node cannot have an address, and a remedy. Both are "" if
// it can.
func (x *Index) refuseMachine(a netip.Addr, reported *corev1.Node, from Source) (why, remedy string) {
	const ownAddresses = "report the addresses of its own machine"
	if p, ok := x.ServiceRange(a); ok {
		return fmt.Sprintf("is in the range of Services %s", p), ownAddresses
	}
	if other := x.RangeOf(a, reported.Name); other != "" {
		return fmt.Sprintf("is in the podCIDRs of node %s", other), ownAddresses
	}
	if other := x.otherMachine(a, reported); other != "" {
		return fmt.Sprintf("is an address of node %s", other), fmt.Sprintf("%s, or delete Node %s if its machine no longer exists", ownAddresses, other)
	}
	if x.isReplica(a) && !from.Local && !x.isReplica(from.Address) {
		return fmt.Sprintf("is an address of a replica of the control plane, and the node connects from %s", from),
			ownAddresses + ", or connect to the replicas from this address"
	}
	if p := x.holder(a, reported.Name); p != nil {
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

// otherMachine returns the name of another Node that reports an address, or "". Nodes with an
// unknown Ready condition are ignored, because their machine may have been replaced. An ExternalIP
// shared by several Nodes is allowed: it may belong to a router.
func (x *Index) otherMachine(a netip.Addr, reported *corev1.Node) string {
	list, _ := x.nodes.ByIndex(machineIndex, a.String())
	var names []string
	for _, o := range list {
		n, ok := o.(*corev1.Node)
		if ok && n.Name != reported.Name && !isLost(n) && (hasInternal(n, a) || hasInternal(reported, a)) {
			names = append(names, n.Name)
		}
	}
	if len(names) == 0 {
		return ""
	}
	return slices.Min(names)
}

func isLost(n *corev1.Node) bool {
	return slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionUnknown
	})
}

func hasInternal(n *corev1.Node, a netip.Addr) bool {
	return slices.ContainsFunc(n.Status.Addresses, func(at corev1.NodeAddress) bool {
		have, ok := parse(at.Address)
		return ok && have == a && at.Type == corev1.NodeInternalIP
	})
}

// NodeChanged reports whether a change of a Node may change which addresses of its pods are
// trusted.
func NodeChanged(old, now *corev1.Node) bool {
	if old == nil || now == nil {
		return true
	}
	a, b := NodeOf(old), NodeOf(now)
	return a.Own != b.Own || !slices.Equal(a.PodCIDRs, b.PodCIDRs) || !slices.Equal(a.Addresses, b.Addresses)
}
