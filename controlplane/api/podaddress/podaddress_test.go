package podaddress

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
)

// informer is a store with indexes.
type informer struct{ cache.Indexer }

func newInformer() informer {
	return informer{cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{})}
}

func (i informer) GetIndexer() cache.Indexer { return i.Indexer }

// world has the stores from which an Index reads the cluster.
type world struct{ nodes, pods, services informer }

func newWorld(t *testing.T, r Rules) (*world, *Index) {
	t.Helper()
	w := &world{newInformer(), newInformer(), newInformer()}
	x, err := New(r, w.nodes, w.pods, w.services)
	if err != nil {
		t.Fatal(err)
	}
	return w, x
}

func put(t *testing.T, i informer, o any) {
	t.Helper()
	if err := i.Add(o); err != nil {
		t.Fatal(err)
	}
}

func node(name, network, ip string, cidrs ...string) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.NodeSpec{PodCIDRs: cidrs}}
	if network != "" {
		n.Annotations = map[string]string{NetworkAnnotation: network}
	}
	for _, one := range strings.Fields(ip) {
		n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: one})
	}
	return n
}

func pod(name, node string, ips ...string) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name}, Spec: corev1.PodSpec{NodeName: node}}
	for _, ip := range ips {
		p.Status.PodIPs = append(p.Status.PodIPs, corev1.PodIP{IP: ip})
	}
	if len(ips) > 0 {
		p.Status.PodIP = ips[0]
	}
	return p
}

func onHost(p *corev1.Pod) *corev1.Pod {
	p.Spec.HostNetwork = true
	return p
}

// typical returns a cluster with all sorts of nodes: own and own2 with Keelson's network, new
// without podCIDRs yet, foreign with another network, and old with an agent of the previous
// release.
func typical(t *testing.T, r Rules) (*world, *Index) {
	t.Helper()
	r.Services = []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd00:96::/108")}
	r.Replicas = func() []netip.AddrPort { return []netip.AddrPort{netip.MustParseAddrPort("192.168.1.5:6443")} }
	w, x := newWorld(t, r)
	put(t, w.nodes, node("own", OwnNetwork, "192.168.1.1 fd01::1", "10.244.1.0/24", "fd00:1::/64"))
	put(t, w.nodes, node("own2", OwnNetwork, "192.168.1.2", "10.244.2.0/24", "fd00:2::/64"))
	put(t, w.nodes, node("new", OwnNetwork, "192.168.1.9"))
	put(t, w.nodes, node("foreign", ForeignNetwork, "192.168.1.3", "10.244.3.0/24"))
	put(t, w.nodes, node("old", "", "192.168.1.4", "10.244.4.0/24"))
	put(t, w.services, &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: "more"},
		Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.112.0.0/16"}}})
	return w, x
}

// An address of a pod counts only where the pod can have it.
func TestRefusal(t *testing.T) {
	limited := Rules{ForeignRanges: []netip.Prefix{netip.MustParsePrefix("10.10.0.0/16")}}
	for _, c := range []struct {
		name, node, address string
		host                bool
		rules               Rules
		why                 string // "": it counts
	}{
		{"own podCIDR", "own", "10.244.1.7", false, Rules{}, ""},
		{"own IPv6 podCIDR", "own", "fd00:1::7", false, Rules{}, ""},
		{"IPv4 address in IPv6 form", "own", "::ffff:10.244.1.7", false, Rules{}, ""},
		{"podCIDR of another node", "own", "10.244.2.7", false, Rules{}, "is not in the podCIDRs of node own"},
		{"IPv6 podCIDR of another node", "own", "fd00:2::7", false, Rules{}, "is not in the podCIDRs of node own"},
		{"outside of all ranges", "own", "203.0.113.9", false, Rules{}, "is not in the podCIDRs of node own"},
		{"podCIDR not assigned yet", "new", "10.244.9.2", false, Rules{}, "(none yet)"},
		{"foreign range does not help Keelson's network", "own", "10.10.0.1", false, limited, "is not in the podCIDRs"},
		{"Service range", "own", "10.96.0.10", false, Rules{}, "is in the range of Services 10.96.0.0/16"},
		{"IPv6 Service range", "foreign", "fd00:96::a", false, Rules{}, "is in the range of Services"},
		{"Service range added later", "foreign", "10.112.3.4", false, Rules{},
			"is in the range of Services 10.112.0.0/16"},
		{"loopback", "foreign", "127.0.0.1", false, Rules{}, "loopback"},
		{"link-local", "foreign", "169.254.169.254", false, Rules{}, "link-local"},
		{"the node's own machine", "own", "192.168.1.1", false, Rules{}, "is an address of node own"},
		{"another machine", "foreign", "192.168.1.2", false, Rules{}, "is an address of node own2"},
		{"a replica's machine", "foreign", "192.168.1.5", false, Rules{}, "is an address of a replica"},
		{"foreign network, any address", "foreign", "10.10.0.1", false, Rules{}, ""},
		{"foreign network, its podCIDR", "foreign", "10.244.3.7", false, limited, ""},
		{"foreign network, allowed range", "foreign", "10.10.0.1", false, limited, ""},
		{"foreign network, range not allowed", "foreign", "203.0.113.9", false, limited,
			"--pod-address-ranges (10.10.0.0/16)"},
		{"foreign network, podCIDR of a node of Keelson's", "foreign", "10.244.2.7", false, Rules{},
			"is in the podCIDRs of node own2"},
		{"foreign network, podCIDR of a foreign node", "foreign", "10.244.4.7", false, Rules{}, ""},
		{"agent of the previous release, its podCIDR", "old", "10.244.4.7", false, Rules{}, ""},
		{"agent of the previous release, podCIDR of another", "old", "10.244.1.7", false, Rules{},
			"is in the podCIDRs of node own"},
		{"agent of the previous release, other network", "old", "10.10.0.1", false, Rules{}, ""},
		{"node that does not exist", "gone", "10.10.0.1", false, Rules{}, ""},
		{"host network", "own", "192.168.1.1", true, Rules{}, ""},
		{"host network, IPv6", "own", "fd01::1", true, Rules{}, ""},
		{"host network, another machine", "own", "192.168.1.2", true, Rules{}, "is not an address of node own"},
		{"host network, podCIDR", "own", "10.244.1.7", true, Rules{}, "is not an address of node own"},
		{"host network on a node that does not exist", "gone", "192.168.1.1", true, Rules{},
			"is not an address of node gone"},
	} {
		_, x := typical(t, c.rules)
		a := netip.MustParseAddr(c.address).Unmap()
		if why := WhyUntrusted(a, c.host, x.nodeByName(c.node), c.rules, x); (why == "") != (c.why == "") ||
			!strings.Contains(why, c.why) {
			t.Errorf("%s: %q, want %q", c.name, why, c.why)
		}
	}
}

// A node does not gain another node's pod addresses, or take them away, by what it reports of its own machine.
func TestLyingNode(t *testing.T) {
	w, x := typical(t, Rules{})
	put(t, w.nodes, node("foreign", ForeignNetwork, "192.168.1.3 10.244.1.7 10.96.0.10", "10.244.3.0/24"))
	if x.TrustedPod(pod("victim", "own", "10.244.1.7")) == nil {
		t.Error("a node took the address of a pod in another node's podCIDR by naming it its own")
	}
	for _, ip := range []string{"10.244.1.7", "10.96.0.10"} {
		if x.TrustedPod(onHost(pod("thief", "foreign", ip))) != nil {
			t.Errorf("a pod of the host network has address %s, which its node invented", ip)
		}
	}
	put(t, w.pods, pod("calico", "old", "10.10.0.1"))
	claimed := node("foreign", ForeignNetwork, "192.168.1.3 10.10.0.1")
	if err := x.CheckNodeReport(t.Context(), node("foreign", ForeignNetwork, "192.168.1.3"), claimed); err == nil ||
		!strings.Contains(err.Error(), "pod shop/calico of node old") {
		t.Errorf("a node reports the address of another node's pod as its own: %v", err)
	}
	if err := x.CheckNodeReport(t.Context(), claimed, claimed); err != nil {
		t.Errorf("an address that the stored Node has: %v", err)
	}
}

// lost returns the Node with an unknown Ready condition.
func lost(n *corev1.Node) *corev1.Node {
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionUnknown}}
	return n
}

// external returns the Node with an additional ExternalIP.
func external(n *corev1.Node, ip string) *corev1.Node {
	n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeExternalIP, Address: ip})
	return n
}

// A Node reports as its own no address that belongs to another part of the cluster. It keeps what is stored.
func TestJudgeMachine(t *testing.T) {
	far := NewSource(netip.MustParseAddr("192.168.1.44"), netip.MustParseAddr("192.168.1.5"))
	for _, c := range []struct {
		name             string
		stored, reported *corev1.Node
		from             Source
		want             string // "": it is accepted
	}{
		{"a free address", nil, node("fresh", OwnNetwork, "192.168.1.44"), far, ""},
		{"another machine", nil, node("fresh", OwnNetwork, "192.168.1.2"), far,
			`node "fresh" cannot report address 192.168.1.2 in status.addresses: it is an address of node own2; ` +
				`report the addresses of its own machine, ` +
				"or delete Node own2 if its machine no longer exists"},
		{"another machine as ExternalIP", nil, external(node("fresh", OwnNetwork, "192.168.1.44"), "192.168.1.2"), far,
			"is an address of node own2"},
		{"the ExternalIP of another machine", nil, node("fresh", OwnNetwork, "203.0.113.1"), far,
			"is an address of node routed"},
		{"an ExternalIP of two machines", nil, external(node("fresh", OwnNetwork, "192.168.1.44"), "203.0.113.1"), far,
			""},
		{"a machine that is lost", nil, node("fresh", OwnNetwork, "192.168.1.8"), far, ""},
		{"a range of Services", nil, node("fresh", OwnNetwork, "10.96.0.10"), far,
			"is in the range of Services 10.96.0.0/16"},
		{"a range of Services added later", nil, node("fresh", OwnNetwork, "10.112.0.10"), far,
			"is in the range of Services 10.112.0.0/16"},
		{"podCIDR of another node", nil, node("fresh", OwnNetwork, "10.244.2.1"), far,
			"is in the podCIDRs of node own2"},
		{"a pod of another node", nil, node("fresh", OwnNetwork, "10.10.0.1"), far,
			"is the address of pod shop/calico of node old"},
		{"a replica", nil, node("fresh", OwnNetwork, "192.168.1.5"), far,
			"is an address of a replica of the control plane, and the node connects from 192.168.1.44; " +
				"report the addresses of its own machine, or connect to the replicas from this address"},
		{"a replica, unknown source", nil, node("fresh", OwnNetwork, "192.168.1.5"), Source{},
			"the node connects from an unknown address"},
		{"a replica on the node's machine", nil, node("fresh", OwnNetwork, "192.168.1.5"),
			Source{Address: netip.MustParseAddr("192.168.1.5")}, ""},
		{"a replica on the node's machine, by loopback", nil, node("fresh", OwnNetwork, "192.168.1.5"),
			NewSource(netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("127.0.0.1")), ""},
		{"a replica on the node's machine, by a shared address", nil, node("fresh", OwnNetwork, "192.168.1.5"),
			NewSource(netip.MustParseAddr("192.168.1.99"), netip.MustParseAddr("::ffff:192.168.1.99")), ""},
		{"loopback, which never counts", nil, node("fresh", OwnNetwork, "127.0.0.1"), far, ""},
		{"an address that is stored", node("fresh", OwnNetwork, "192.168.1.2"),
			node("fresh", OwnNetwork, "192.168.1.2"), far, ""},
		{"one more address", node("fresh", OwnNetwork, "192.168.1.44"),
			node("fresh", OwnNetwork, "192.168.1.44 192.168.1.2"), far, "is an address of node own2"},
	} {
		w, x := typical(t, Rules{})
		put(t, w.pods, pod("calico", "old", "10.10.0.1"))
		put(t, w.nodes, lost(node("gone", OwnNetwork, "192.168.1.8")))
		put(t, w.nodes, external(node("routed", OwnNetwork, "192.168.1.10"), "203.0.113.1"))
		err := x.CheckNodeReport(WithSource(t.Context(), c.from), c.stored, c.reported)
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.name, err, c.want)
		}
	}
}

// A pod keeps the addresses that count, and a mirror pod is a peer only where the administrator allows it.
func TestCounted(t *testing.T) {
	_, x := typical(t, Rules{})
	both := pod("web", "own", "10.244.1.7", "fd00:1::7")
	if got := x.TrustedPod(both); got != both {
		t.Errorf("both addresses count: %v", got)
	}
	half := x.TrustedPod(pod("web", "own", "203.0.113.9", "fd00:1::7"))
	if half == nil || half.Status.PodIP != "fd00:1::7" || len(half.Status.PodIPs) != 1 {
		t.Errorf("one address counts: %v", half)
	}
	split := pod("web", "own", "10.244.1.7")
	split.Status.PodIP = "203.0.113.9"
	if got := x.TrustedPod(split); got == nil || got.Status.PodIP != "10.244.1.7" {
		t.Errorf("podIP that is not in podIPs: %v", got)
	}
	single := &corev1.Pod{Spec: corev1.PodSpec{NodeName: "own"}, Status: corev1.PodStatus{PodIP: "203.0.113.9"}}
	if got := x.TrustedPod(single); got != nil {
		t.Errorf("podIP without podIPs: %v", got)
	}
	mirror := pod("static", "own", "10.244.1.8")
	mirror.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "x"}
	if x.PeerPod(mirror) != nil || x.TrustedPod(mirror) == nil || len(x.PeerPods([]*corev1.Pod{mirror, both})) != 1 {
		t.Error("a mirror pod is a peer")
	}
	if _, allowed := typical(t, Rules{MirrorPeers: true}); allowed.PeerPod(mirror) == nil {
		t.Error("a mirror pod is no peer although the administrator allows it")
	}
	var none *Index
	if none.PeerPod(mirror) != mirror || none.TrustedPod(single) != single ||
		len(none.PeerPods([]*corev1.Pod{mirror})) != 1 {
		t.Error("a nil Index does not count everything")
	}
}

// A node's report is refused for a new address that its pod cannot have; what is stored can still be written.
func TestJudgeReport(t *testing.T) {
	w, x := typical(t, Rules{})
	put(t, w.pods, pod("calico", "old", "10.10.0.1"))
	ended := func(p *corev1.Pod) *corev1.Pod { p.Status.Phase = corev1.PodSucceeded; return p }
	split := pod("web", "own", "10.244.1.7")
	split.Status.PodIP = "203.0.113.9"
	for _, c := range []struct {
		name             string
		stored, reported *corev1.Pod
		want             string
	}{
		{"right address", pod("web", "own"), pod("web", "own", "10.244.1.7", "fd00:1::7"), ""},
		{"podCIDR of another node", pod("web", "own"), pod("web", "own", "10.244.2.7"),
			`node "own" cannot report address 10.244.2.7 in status.podIPs of pod shop/web: it is not in the podCIDRs`},
		{"second address", pod("web", "own"), pod("web", "own", "10.244.1.7", "fd00:2::7"), "fd00:2::7"},
		{"podIP apart from podIPs", pod("web", "own"), split, "203.0.113.9"},
		{"address that is stored", pod("web", "own", "10.244.2.7"), pod("web", "own", "10.244.2.7"), ""},
		{"ended pod", pod("web", "own"), ended(pod("web", "own", "10.244.2.7")), ""},
		{"another node's pod", pod("web", "foreign"), pod("web", "foreign", "10.10.0.1"),
			"is the address of pod shop/calico of node old"},
		{"same node, address of an earlier pod", pod("web", "old"), pod("web", "old", "10.10.0.1"), ""},
		{"host network", onHost(pod("web", "own")), onHost(pod("web", "own", "192.168.1.1")), ""},
		{"host network, another machine", onHost(pod("web", "own")), onHost(pod("web", "own", "192.168.1.2")),
			"is not an address of node own"},
		{"host network, Node not seen yet", onHost(pod("web", "gone")), onHost(pod("web", "gone", "192.168.1.2")), ""},
	} {
		err := x.CheckPodReport(c.stored, c.reported)
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.name, err, c.want)
		}
	}
	put(t, w.pods, ended(pod("calico", "old", "10.10.0.1")))
	if err := x.CheckPodReport(pod("web", "foreign"), pod("web", "foreign", "10.10.0.1")); err != nil {
		t.Errorf("the address of a pod that has ended: %v", err)
	}
}

// When a Node gets podCIDRs, the pods of other nodes with such addresses are judged again, whatever the ranges' lengths.
func TestConcerned(t *testing.T) {
	for _, c := range []struct {
		cidr, inside, outside string
	}{
		{"10.244.9.0/24", "10.244.9.200", "10.244.10.1"},
		{"10.244.9.64/26", "10.244.9.70", "10.244.9.1"},
		{"10.244.8.0/22", "10.244.11.3", "10.244.12.3"},
		{"10.0.0.0/8", "10.200.1.1", "11.0.0.1"},
		{"255.255.254.0/23", "255.255.255.1", "10.0.0.1"},
		{"fd00:9::/64", "fd00:9::5", "fd00:a::5"},
		{"fd00:9::/112", "fd00:9::5", "fd00:9::1:5"},
		{"fd00:9::/62", "fd00:9:0:3::5", "fd00:9:0:4::5"},
		{"fd00::/40", "fd00:0:5::5", "fe00::5"},
	} {
		w, x := newWorld(t, Rules{})
		put(t, w.pods, pod("inside", "foreign", c.inside))
		put(t, w.pods, pod("outside", "foreign", c.outside))
		put(t, w.pods, pod("own", "fresh", c.inside))
		put(t, w.pods, pod("machine", "foreign", "192.168.7.7"))
		var got []string
		for _, p := range x.PodsAffectedByNode(node("fresh", OwnNetwork, "192.168.7.7", c.cidr)) {
			got = append(got, p.Name)
		}
		if slices.Sort(got); !slices.Equal(got, []string{"inside", "machine"}) {
			t.Errorf("%s: %v", c.cidr, got)
		}
		put(t, w.nodes, node("fresh", OwnNetwork, "192.168.7.7", c.cidr))
		if x.TrustedPod(pod("inside", "foreign", c.inside)) != nil ||
			x.TrustedPod(pod("outside", "foreign", c.outside)) == nil {
			t.Errorf("%s: the addresses are judged wrong", c.cidr)
		}
	}
}

// An address is judged by look-ups, whatever the number of nodes and pods.
func BenchmarkCounted(b *testing.B) {
	w := &world{newInformer(), newInformer(), newInformer()}
	x, err := New(Rules{}, w.nodes, w.pods, w.services)
	if err != nil {
		b.Fatal(err)
	}
	for i := range 5000 {
		_ = w.nodes.Add(node(fmt.Sprint("n", i), OwnNetwork, fmt.Sprintf("192.168.%d.%d", i/250, i%250),
			fmt.Sprintf("10.%d.%d.0/24", i/250, i%250)))
	}
	_ = w.nodes.Add(node("foreign", ForeignNetwork, "192.168.255.1"))
	p := pod("web", "foreign", "172.20.1.1")
	for b.Loop() {
		if x.TrustedPod(p) == nil {
			b.Fatal("it does not count")
		}
	}
}
