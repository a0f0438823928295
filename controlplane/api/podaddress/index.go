package podaddress

import (
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api/podref"
)

// The indexes that New adds to the informers of Nodes and Pods.
const (
	machineIndex = "podaddress.machine" // Nodes by address
	rangeIndex   = "podaddress.range"   // Nodes with Keelson's network configuration, by podCIDR
	holderIndex  = "podaddress.holder"  // pods by address
	blockIndex   = "podaddress.block"   // pods by the blocks (see block4) that contain their addresses
)

// block4 and block6 are the prefix lengths of the blocks of blockIndex, for IPv4 and IPv6. They are
// the most common prefix lengths of podCIDRs.
const block4, block6 = 24, 64

// Informer is the part of an informer that an Index uses.
type Informer interface {
	AddIndexers(indexers cache.Indexers) error
	GetIndexer() cache.Indexer
}

// Index decides which pod addresses can be trusted, based on the stores of informers (see the
// package comment). Informers update their stores before they call handlers, so a handler gets the
// result for the new state. Index is safe for concurrent use. With a nil Index all addresses are
// trusted.
type Index struct {
	rules                 Rules
	nodes, pods, services cache.Indexer
	// prefix lengths of the podCIDRs seen so far, as a set of 128 bits
	lengths       [2]atomic.Uint64
	hasFullPrefix atomic.Bool // prefix length 128 (a single IPv6 address) has been seen
}

// New returns an Index and adds its indexes to the informers. It must be called before the
// informers of Nodes, Pods and ServiceCIDRs start. services may be nil.
func New(rules Rules, nodes, pods, services Informer) (*Index, error) {
	x := &Index{rules: rules, nodes: nodes.GetIndexer(), pods: pods.GetIndexer()}
	if services != nil {
		x.services = services.GetIndexer()
	}
	if err := nodes.AddIndexers(cache.Indexers{machineIndex: nodeAddressKeys, rangeIndex: x.nodeRangeKeys}); err !=
		nil {
		return nil, fmt.Errorf("podaddress: index Nodes: %w", err)
	}
	if err := pods.AddIndexers(cache.Indexers{holderIndex: podAddressKeys, blockIndex: podBlockKeys}); err != nil {
		return nil, fmt.Errorf("podaddress: index Pods: %w", err)
	}
	return x, nil
}

func nodeAddressKeys(o any) ([]string, error) {
	n, ok := o.(*corev1.Node)
	if !ok {
		return nil, nil
	}
	var out []string
	for _, a := range NewNode(n).Addresses {
		out = append(out, a.String())
	}
	return out, nil
}

func (x *Index) nodeRangeKeys(o any) ([]string, error) {
	n, ok := o.(*corev1.Node)
	if !ok || n.Annotations[NetworkAnnotation] != OwnNetwork {
		return nil, nil
	}
	var out []string
	for _, p := range podCIDRs(n) {
		if bits := p.Bits(); bits == 128 {
			x.hasFullPrefix.Store(true)
		} else {
			x.lengths[bits/64].Or(1 << (bits % 64))
		}
		out = append(out, p.String())
	}
	return out, nil
}

// podAddressKeys returns the index keys of a pod: its addresses. It returns no keys for mirror
// pods, which a node can create at will, and for pods that use their node's network.
func podAddressKeys(obj any) ([]string, error) {
	p, ok := obj.(*corev1.Pod)
	if !ok || p.Spec.HostNetwork || p.Spec.NodeName == "" || isTerminal(&p.Status) || podref.IsMirror(p) {
		return nil, nil
	}
	var out []string
	for _, ip := range ReportedIPs(&p.Status) {
		if a, ok := parseAddress(ip.IP); ok {
			out = append(out, a.String())
		}
	}
	return out, nil
}

func blockKey(a netip.Addr) string {
	bits := block6
	if a.Is4() {
		bits = block4
	}
	return netip.PrefixFrom(a, bits).Masked().String()
}

func podBlockKeys(o any) ([]string, error) {
	p, ok := o.(*corev1.Pod)
	if !ok || p.Spec.NodeName == "" || isTerminal(&p.Status) {
		return nil, nil
	}
	var out []string
	for _, ip := range ReportedIPs(&p.Status) {
		if a, ok := parseAddress(ip.IP); ok {
			out = append(out, blockKey(a))
		}
	}
	return out, nil
}

// maxBlockBits limits the number of blocks that are looked up for an address range to
// 2^maxBlockBits. For larger ranges, all pods are scanned.
const maxBlockBits = 10

// PodsAffectedByNode returns the pods of other nodes with addresses that may become trusted or
// untrusted when the given Node changes or is deleted. These pods have an address in the Node's
// podCIDRs, or one of the Node's own addresses.
func (x *Index) PodsAffectedByNode(changed *corev1.Node) []*corev1.Pod {
	if x == nil {
		return nil
	}
	ranges := podCIDRs(changed)
	for _, a := range NewNode(changed).Addresses {
		ranges = append(ranges, netip.PrefixFrom(a, a.BitLen()))
	}
	return slices.DeleteFunc(x.podsIn(ranges), func(p *corev1.Pod) bool { return p.Spec.NodeName == changed.Name })
}

// PodsAffectedByRange returns the pods with addresses that may become trusted or untrusted when a
// ServiceCIDR changes or is deleted. These pods have an address in one of its ranges.
func (x *Index) PodsAffectedByRange(c *networkingv1.ServiceCIDR) []*corev1.Pod {
	if x == nil {
		return nil
	}
	var ranges []netip.Prefix
	for _, text := range c.Spec.CIDRs {
		if p, err := netip.ParsePrefix(text); err == nil {
			ranges = append(ranges, p.Masked())
		}
	}
	return x.podsIn(ranges)
}

// podsIn returns the pods with an address in one of the ranges.
func (x *Index) podsIn(ranges []netip.Prefix) (out []*corev1.Pod) {
	for _, r := range ranges {
		for _, o := range x.podCandidates(r) {
			p, ok := o.(*corev1.Pod)
			if ok && slices.ContainsFunc(ReportedIPs(&p.Status), func(ip corev1.PodIP) bool {
				a, ok := parseAddress(ip.IP)
				return ok && r.Contains(a)
			}) {
				out = append(out, p)
			}
		}
	}
	return out
}

// IsRangeChanged reports whether the change of a ServiceCIDR can make addresses of pods trusted or
// untrusted.
func IsRangeChanged(old, updated *networkingv1.ServiceCIDR) bool {
	return old == nil || updated == nil || !slices.Equal(old.Spec.CIDRs, updated.Spec.CIDRs)
}

// podCandidates returns all pods with an address in a range, and possibly other pods. The caller
// checks their addresses.
func (x *Index) podCandidates(prefix netip.Prefix) (out []any) {
	bits := block6
	if prefix.Addr().Is4() {
		bits = block4
	}
	more := bits - prefix.Bits()
	if more > maxBlockBits {
		return x.pods.List()
	}
	block := blockKey(prefix.Masked().Addr())
	for range 1 << max(more, 0) {
		list, _ := x.pods.ByIndex(blockIndex, block)
		out = append(out, list...)
		p := netip.MustParsePrefix(block)
		next := nextBlock(p)
		if !next.IsValid() {
			break
		}
		block = blockKey(next)
	}
	return out
}

// nextBlock returns the first address after a prefix. It returns the zero Addr after the last
// prefix.
func nextBlock(prefix netip.Prefix) netip.Addr {
	raw := prefix.Addr().AsSlice()
	for i := prefix.Bits() - 1; i >= 0; i-- {
		bit := byte(1) << (7 - i%8)
		if raw[i/8] ^= bit; raw[i/8]&bit != 0 {
			a, _ := netip.AddrFromSlice(raw)
			return a
		}
	}
	return netip.Addr{}
}

// ServiceRange returns the Service range that contains an address: one of Rules.Services or a range
// of a ServiceCIDR. It returns false if no range contains the address.
func (x *Index) ServiceRange(address netip.Addr) (netip.Prefix, bool) {
	for _, p := range x.rules.Services {
		if p.Contains(address) {
			return p, true
		}
	}
	if x.services == nil {
		return netip.Prefix{}, false
	}
	for _, o := range x.services.List() {
		c, ok := o.(*networkingv1.ServiceCIDR)
		if !ok {
			continue
		}
		for _, text := range c.Spec.CIDRs {
			if p, err := netip.ParsePrefix(text); err == nil && p.Contains(address) {
				return p.Masked(), true
			}
		}
	}
	return netip.Prefix{}, false
}

// DescribeMachine returns a description of the node or control plane replica that has an address.
// It returns "" if no node or replica has the address.
func (x *Index) DescribeMachine(address netip.Addr) string {
	if names, _ := x.nodes.IndexKeys(machineIndex, address.String()); len(names) > 0 {
		return "node " + slices.Min(names)
	}
	if x.isReplica(address) {
		return "a replica of the control plane"
	}
	return ""
}

func (x *Index) isReplica(a netip.Addr) bool {
	return x.rules.Replicas != nil && slices.ContainsFunc(x.rules.Replicas(), func(r netip.AddrPort) bool {
		return r.Addr() == a
	})
}

// NodeWithRange returns the name of a node with podCIDRs that contain an address, or "". It ignores
// the excluded node and nodes without Keelson's network configuration.
func (x *Index) NodeWithRange(address netip.Addr, excludedNode string) string {
	for bits := address.BitLen(); bits >= 0; bits-- {
		if bits == 128 && !x.hasFullPrefix.Load() || bits < 128 && x.lengths[bits/64].Load()&(1<<(bits%64)) == 0 {
			continue
		}
		p, err := address.Prefix(bits)
		if err != nil {
			continue
		}
		names, _ := x.nodes.IndexKeys(rangeIndex, p.String())
		for _, name := range names {
			if name != excludedNode {
				return name
			}
		}
	}
	return ""
}

// findHolder returns a pod that reports an address and is not on the excluded node. It returns nil
// if no such pod exists.
func (x *Index) findHolder(address netip.Addr, excludedNode string) *corev1.Pod {
	list, _ := x.pods.ByIndex(holderIndex, address.String())
	for _, o := range list {
		if p, ok := o.(*corev1.Pod); ok && p.Spec.NodeName != excludedNode {
			return p
		}
	}
	return nil
}

func (x *Index) nodeByName(name string) Node {
	if o, ok, err := x.nodes.GetByKey(name); err == nil && ok {
		if n, ok := o.(*corev1.Node); ok {
			return NewNode(n)
		}
	}
	return Node{Name: name}
}

// whyUntrusted returns the reason why a pod cannot have an address that its status reports. It
// returns "" if the pod can have it.
func (x *Index) whyUntrusted(pod *corev1.Pod, node Node, address string) string {
	a, ok := parseAddress(address)
	if !ok {
		return "is not an address"
	}
	return WhyUntrusted(a, pod.Spec.HostNetwork, node, x.rules, x)
}

// TrustedPod returns the pod with only its trusted addresses. It is the pod itself if all addresses
// are trusted, otherwise a shallow copy. It returns nil if all addresses are untrusted.
func (x *Index) TrustedPod(pod *corev1.Pod) *corev1.Pod {
	reported := ReportedIPs(&pod.Status)
	if x == nil || len(reported) == 0 {
		return pod
	}
	node := x.nodeByName(pod.Spec.NodeName)
	var counted []corev1.PodIP
	for _, ip := range reported {
		if x.whyUntrusted(pod, node, ip.IP) == "" {
			counted = append(counted, ip)
		}
	}
	switch {
	case len(counted) == 0:
		return nil
	case len(counted) == len(reported) && isReported(reported, pod.Status.PodIP):
		return pod
	}
	out := *pod
	out.Status.PodIPs, out.Status.PodIP = counted, counted[0].IP
	return &out
}

// isReported reports whether podIP is empty or one of the reported addresses.
func isReported(reported []corev1.PodIP, podIP string) bool {
	return podIP == "" || slices.Contains(reported, corev1.PodIP{IP: podIP})
}

// PeerPod is like TrustedPod, for a pod as an endpoint of a Service or a peer of a network policy.
// It also returns nil for a mirror pod, unless Rules.MirrorPeers is set.
func (x *Index) PeerPod(pod *corev1.Pod) *corev1.Pod {
	if x != nil && !x.rules.IsPeer(pod) {
		return nil
	}
	return x.TrustedPod(pod)
}

// PeerPods calls PeerPod for each pod, and returns the results that are not nil.
func (x *Index) PeerPods(pods []*corev1.Pod) []*corev1.Pod {
	if x == nil {
		return pods
	}
	out := make([]*corev1.Pod, 0, len(pods))
	for _, p := range pods {
		if q := x.PeerPod(p); q != nil {
			out = append(out, q)
		}
	}
	return out
}
