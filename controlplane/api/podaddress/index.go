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

// The indexes that New adds to the informers.
const (
	machineIndex = "podaddress.machine" // Nodes by address
	rangeIndex   = "podaddress.range"   // Nodes with Keelson's network, by podCIDR
	holderIndex  = "podaddress.holder"  // pods by address
	blockIndex   = "podaddress.block"   // pods by the blocks that contain their addresses
)

// block4 and block6 are the prefix lengths of the blocks of blockIndex, for IPv4 and IPv6: those of
// common podCIDRs.
const block4, block6 = 24, 64

// Informer is the part of an informer that an Index uses.
type Informer interface {
	AddIndexers(indexers cache.Indexers) error
	GetIndexer() cache.Indexer
}

// Index decides which addresses of pods are trusted, from the stores of informers. Informers update
// their stores before they call handlers, so a handler gets the result for the new state. Index is
// safe for concurrent use. With a nil Index all addresses are trusted.
type Index struct {
	rules                 Rules
	nodes, pods, services cache.Indexer
	// prefix lengths of the podCIDRs seen so far, as 128 bits
	lengths [2]atomic.Uint64
	whole   atomic.Bool // prefix length 128 has been seen
}

// New returns an Index. It must be called before the informers of Nodes, Pods and ServiceCIDRs
// start; services may be nil.
func New(rules Rules, nodes, pods, services Informer) (*Index, error) {
	x := &Index{rules: rules, nodes: nodes.GetIndexer(), pods: pods.GetIndexer()}
	if services != nil {
		x.services = services.GetIndexer()
	}
	if err := nodes.AddIndexers(cache.Indexers{machineIndex: machinesOf, rangeIndex: x.rangesOf}); err != nil {
		return nil, fmt.Errorf("podaddress: index Nodes: %w", err)
	}
	if err := pods.AddIndexers(cache.Indexers{holderIndex: holdersOf, blockIndex: blocksOf}); err != nil {
		return nil, fmt.Errorf("podaddress: index Pods: %w", err)
	}
	return x, nil
}

func machinesOf(o any) ([]string, error) {
	n, ok := o.(*corev1.Node)
	if !ok {
		return nil, nil
	}
	var out []string
	for _, a := range NodeOf(n).Addresses {
		out = append(out, a.String())
	}
	return out, nil
}

func (x *Index) rangesOf(o any) ([]string, error) {
	n, ok := o.(*corev1.Node)
	if !ok || n.Annotations[NetworkAnnotation] != OwnNetwork {
		return nil, nil
	}
	var out []string
	for _, p := range podCIDRs(n) {
		if bits := p.Bits(); bits == 128 {
			x.whole.Store(true)
		} else {
			x.lengths[bits/64].Or(1 << (bits % 64))
		}
		out = append(out, p.String())
	}
	return out, nil
}

// holdersOf returns the index keys of a pod. It omits mirror pods, which a node can create at will,
// and pods without an address of their own.
func holdersOf(o any) ([]string, error) {
	p, ok := o.(*corev1.Pod)
	if !ok || p.Spec.HostNetwork || p.Spec.NodeName == "" || hasEnded(&p.Status) || podref.IsMirror(p) {
		return nil, nil
	}
	var out []string
	for _, ip := range Reported(&p.Status) {
		if a, ok := parse(ip.IP); ok {
			out = append(out, a.String())
		}
	}
	return out, nil
}

func blockOf(a netip.Addr) string {
	bits := block6
	if a.Is4() {
		bits = block4
	}
	return netip.PrefixFrom(a, bits).Masked().String()
}

func blocksOf(o any) ([]string, error) {
	p, ok := o.(*corev1.Pod)
	if !ok || p.Spec.NodeName == "" || hasEnded(&p.Status) {
		return nil, nil
	}
	var out []string
	for _, ip := range Reported(&p.Status) {
		if a, ok := parse(ip.IP); ok {
			out = append(out, blockOf(a))
		}
	}
	return out, nil
}

// mostBlocks limits the number of blocks that are looked up for a range, as a power of two. For
// larger ranges all pods are scanned.
const mostBlocks = 10

// Concerned returns the pods of other nodes for which a change or deletion of n may change which
// addresses are trusted. Those are the pods with an address in the podCIDRs of n, or equal to an
// address of n.
func (x *Index) Concerned(n *corev1.Node) []*corev1.Pod {
	if x == nil {
		return nil
	}
	ranges := podCIDRs(n)
	for _, a := range NodeOf(n).Addresses {
		ranges = append(ranges, netip.PrefixFrom(a, a.BitLen()))
	}
	return slices.DeleteFunc(x.podsIn(ranges), func(p *corev1.Pod) bool { return p.Spec.NodeName == n.Name })
}

// ConcernedByRange returns the pods for which a change or deletion of a ServiceCIDR may change
// which addresses are trusted: those with an address in its ranges.
func (x *Index) ConcernedByRange(c *networkingv1.ServiceCIDR) []*corev1.Pod {
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
		for _, o := range x.within(r) {
			p, ok := o.(*corev1.Pod)
			if ok && slices.ContainsFunc(Reported(&p.Status), func(ip corev1.PodIP) bool {
				a, ok := parse(ip.IP)
				return ok && r.Contains(a)
			}) {
				out = append(out, p)
			}
		}
	}
	return out
}

// RangeChanged reports whether a change of a ServiceCIDR may change which addresses of pods are
// trusted.
func RangeChanged(old, now *networkingv1.ServiceCIDR) bool {
	return old == nil || now == nil || !slices.Equal(old.Spec.CIDRs, now.Spec.CIDRs)
}

// within returns all pods with an address in a range. It may return other pods too.
func (x *Index) within(r netip.Prefix) (out []any) {
	bits := block6
	if r.Addr().Is4() {
		bits = block4
	}
	more := bits - r.Bits()
	if more > mostBlocks {
		return x.pods.List()
	}
	block := blockOf(r.Masked().Addr())
	for range 1 << max(more, 0) {
		list, _ := x.pods.ByIndex(blockIndex, block)
		out = append(out, list...)
		p := netip.MustParsePrefix(block)
		next := nextBlock(p)
		if !next.IsValid() {
			break
		}
		block = blockOf(next)
	}
	return out
}

// nextBlock returns the first address after a prefix; the zero Addr after the last prefix.
func nextBlock(p netip.Prefix) netip.Addr {
	raw := p.Addr().AsSlice()
	for i := p.Bits() - 1; i >= 0; i-- {
		bit := byte(1) << (7 - i%8)
		if raw[i/8] ^= bit; raw[i/8]&bit != 0 {
			a, _ := netip.AddrFromSlice(raw)
			return a
		}
	}
	return netip.Addr{}
}

// ServiceRange returns the Service range that contains an address: one of Rules.Services or of a
// ServiceCIDR.
func (x *Index) ServiceRange(a netip.Addr) (netip.Prefix, bool) {
	for _, p := range x.rules.Services {
		if p.Contains(a) {
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
			if p, err := netip.ParsePrefix(text); err == nil && p.Contains(a) {
				return p.Masked(), true
			}
		}
	}
	return netip.Prefix{}, false
}

// Machine returns a description of the node or control plane replica that has an address, or "".
func (x *Index) Machine(a netip.Addr) string {
	if names, _ := x.nodes.IndexKeys(machineIndex, a.String()); len(names) > 0 {
		return "node " + slices.Min(names)
	}
	if x.isReplica(a) {
		return "a replica of the control plane"
	}
	return ""
}

func (x *Index) isReplica(a netip.Addr) bool {
	return x.rules.Replicas != nil && slices.ContainsFunc(x.rules.Replicas(), func(r netip.AddrPort) bool { return r.Addr() == a })
}

// RangeOf returns the name of a node other than except whose podCIDRs contain an address, or "".
// Only nodes with Keelson's network are considered.
func (x *Index) RangeOf(a netip.Addr, except string) string {
	for bits := a.BitLen(); bits >= 0; bits-- {
		if bits == 128 && !x.whole.Load() || bits < 128 && x.lengths[bits/64].Load()&(1<<(bits%64)) == 0 {
			continue
		}
		p, err := a.Prefix(bits)
		if err != nil {
			continue
		}
		names, _ := x.nodes.IndexKeys(rangeIndex, p.String())
		for _, name := range names {
			if name != except {
				return name
			}
		}
	}
	return ""
}

// holder returns a pod that reports an address and is not on the node except, or nil.
func (x *Index) holder(a netip.Addr, except string) *corev1.Pod {
	list, _ := x.pods.ByIndex(holderIndex, a.String())
	for _, o := range list {
		if p, ok := o.(*corev1.Pod); ok && p.Spec.NodeName != except {
			return p
		}
	}
	return nil
}

func (x *Index) node(name string) Node {
	if o, ok, err := x.nodes.GetByKey(name); err == nil && ok {
		if n, ok := o.(*corev1.Node); ok {
			return NodeOf(n)
		}
	}
	return Node{Name: name}
}

// refusal returns the reason why a pod cannot have an address that its status reports, or "" if it
// can.
func (x *Index) refusal(p *corev1.Pod, node Node, text string) string {
	a, ok := parse(text)
	if !ok {
		return "is not an address"
	}
	return Refusal(a, p.Spec.HostNetwork, node, x.rules, x)
}

// Counted returns the pod with only its trusted addresses. It is the pod itself if all are trusted,
// otherwise a shallow copy, or nil if all are untrusted.
func (x *Index) Counted(p *corev1.Pod) *corev1.Pod {
	reported := Reported(&p.Status)
	if x == nil || len(reported) == 0 {
		return p
	}
	node := x.node(p.Spec.NodeName)
	var counted []corev1.PodIP
	for _, ip := range reported {
		if x.refusal(p, node, ip.IP) == "" {
			counted = append(counted, ip)
		}
	}
	switch {
	case len(counted) == 0:
		return nil
	case len(counted) == len(reported) && counts(reported, p.Status.PodIP):
		return p
	}
	out := *p
	out.Status.PodIPs, out.Status.PodIP = counted, counted[0].IP
	return &out
}

// counts reports whether podIP is empty or one of the reported addresses.
func counts(reported []corev1.PodIP, podIP string) bool {
	return podIP == "" || slices.Contains(reported, corev1.PodIP{IP: podIP})
}

// Peer is Counted for a pod as an endpoint of a Service or a peer of a network policy. It also
// returns nil for a mirror pod, unless Rules.MirrorPeers is set.
func (x *Index) Peer(p *corev1.Pod) *corev1.Pod {
	if x != nil && !x.rules.IsPeer(p) {
		return nil
	}
	return x.Counted(p)
}

// Peers returns the result of Peer for each pod, without nil results.
func (x *Index) Peers(pods []*corev1.Pod) []*corev1.Pod {
	if x == nil {
		return pods
	}
	out := make([]*corev1.Pod, 0, len(pods))
	for _, p := range pods {
		if q := x.Peer(p); q != nil {
			out = append(out, q)
		}
	}
	return out
}
