package noderestriction_test

import (
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/podaddress"
	"keelson.dev/keelson/controlplane/apiserver"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/controlplane/pki"
)

// fixedInformer is an informer with the objects that a test adds.
type fixedInformer struct{ cache.Indexer }

func (s fixedInformer) GetIndexer() cache.Indexer { return s.Indexer }

func newFixedInformer(t *testing.T, all ...any) fixedInformer {
	t.Helper()
	s := fixedInformer{cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{})}
	for _, o := range all {
		if err := s.Add(o); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

// F32: a node may report only addresses that its pods can have, and for itself no address of
// another node's pod. The error names node, pod, field and address. An administrator's write is
// not validated.
func TestNodeReportsAddresses(t *testing.T) {
	node := func(name, network, ip string, cidrs ...string) *corev1.Node {
		return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name,
			Annotations: map[string]string{podaddress.NetworkAnnotation: network}},
			Spec:   corev1.NodeSpec{PodCIDRs: cidrs},
			Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: ip}}}}
	}
	a, b := node("a", podaddress.OwnNetwork, "192.168.1.1", "10.244.1.0/24", "fd00:1::/64"),
		node("b", podaddress.ForeignNetwork, "192.168.1.2")
	victim := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "victim"},
		Spec:   corev1.PodSpec{NodeName: "b"},
		Status: corev1.PodStatus{PodIP: "10.20.0.1"}}
	x, err := podaddress.New(podaddress.Rules{Services: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")},
		Replicas: func() []netip.AddrPort { return []netip.AddrPort{netip.MustParseAddrPort("192.168.1.88:6443")} }},
		newFixedInformer(t, a, b), newFixedInformer(t, victim), nil)
	if err != nil {
		t.Fatal(err)
	}
	r := apiservertest.StartReplica(t, func(c *apiserver.Config) {
		c.Network.PodAddresses = func() *podaddress.Index {
			return x
		}
	})
	r.Must(a.DeepCopy())
	r.Must(b.DeepCopy())
	r.CreatePodOn("own", "a")
	r.CreatePodOn("other", "b")
	write := func(as, path, status string) apiservertest.Response {
		t.Helper()
		cert := r.Cert(pki.Client(api.NodeUserPrefix+as, api.GroupNodes))
		return r.Call(r.HTTP(&cert), "PATCH", path+"/status", `{"status":`+status+`}`, "Content-Type", merge)
	}
	for _, c := range []struct{ node, path, status, why string }{
		{"a", pods + "own", `{"podIPs":[{"ip":"10.244.2.7"}]}`,
			`node \"a\" cannot report address 10.244.2.7 in status.podIPs of pod default/own`},
		{"a", pods + "own", `{"podIP":"10.244.2.7"}`, "is not in the podCIDRs of node a (10.244.1.0/24, fd00:1::/64)"},
		{"a", pods + "own", `{"podIP":"10.244.1.7","podIPs":[{"ip":"10.244.1.7"},{"ip":"fd00:2::7"}]}`, "fd00:2::7"},
		{"b", pods + "other", `{"podIP":"10.244.1.7"}`, "is in the podCIDRs of node a"},
		{"b", pods + "other", `{"podIP":"192.168.1.1"}`, "is an address of node a"},
		{"b", pods + "other", `{"podIP":"10.96.0.10"}`, "is in the range of Services 10.96.0.0/16"},
		{"a", core + "nodes/a", `{"addresses":[{"type":"InternalIP","address":"10.20.0.1"}]}`,
			"it is the address of pod shop/victim of node b"},
		{"b", core + "nodes/b", `{"addresses":[{"type":"InternalIP","address":"10.244.1.1"}]}`,
			"it is in the podCIDRs of node a"},
		{"b", core + "nodes/b", `{"addresses":[{"type":"ExternalIP","address":"192.168.1.1"}]}`,
			"it is an address of node a"},
		{"b", core + "nodes/b", `{"addresses":[{"type":"InternalIP","address":"10.96.0.9"}]}`,
			"it is in the range of Services 10.96.0.0/16"},
	} {
		got := write(c.node, c.path, c.status)
		if got.Code != 403 || !strings.Contains(got.Body, c.why) {
			t.Errorf("%s %s: %d %.400s, want %s", c.path, c.status, got.Code, got.Body, c.why)
		}
	}
	for _, c := range []struct{ node, path, status string }{
		{"a", pods + "own", `{"podIP":"10.244.1.7","podIPs":[{"ip":"10.244.1.7"},{"ip":"fd00:1::7"}]}`},
		{"a", pods + "own", `{"phase":"Running"}`},
		{"b", pods + "other", `{"podIP":"172.20.0.9"}`},
		{"a", core + "nodes/a", `{"addresses":[{"type":"InternalIP","address":"192.168.1.77"}]}`},
		// of a replica on the client's machine
		{"a", core + "nodes/a", `{"addresses":[{"type":"InternalIP","address":"192.168.1.88"}]}`},
	} {
		if got := write(c.node, c.path, c.status); got.Code != 200 {
			t.Errorf("%s %s: %d %.400s", c.path, c.status, got.Code, got.Body)
		}
	}
}
