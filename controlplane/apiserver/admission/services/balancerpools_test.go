package services_test

import (
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/apiserver"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

// F117 F118: load balancer pools that overlap each other, pods, Services or a node are rejected
// with one sentence, and nothing changes. ServiceCIDRs that overlap a pool are rejected too, and
// Services that request an address that no pool can allocate.
func TestBalancerPoolsAreValidated(t *testing.T) {
	r := apiservertest.StartReplica(t, func(c *apiserver.Config) {
		c.Network.PodCIDRs = []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}
	})
	ctx := apiservertest.Within(t)
	core := r.Admin().CoreV1()
	if _, err := core.Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"},
		Spec: corev1.NodeSpec{PodCIDR: "10.55.1.0/24", PodCIDRs: []string{"10.55.1.0/24"}},
		Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP,
			Address: "192.0.2.9"}}}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	pools := func(data map[string]string) *corev1.ConfigMap {
		return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "load-balancer-pools"},
			Data: data}
	}
	if _, err := core.ConfigMaps("kube-system").Create(ctx,
		pools(map[string]string{"good": "addresses: [198.51.100.0/28]"}), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	for addresses, want := range map[string]string{
		"10.244.9.0/24": "pool bad: 10.244.9.0-10.244.9.255 overlaps the pod range 10.244.0.0/16: use other " +
			"addresses for the pool",
		"10.96.0.77":   "pool bad: 10.96.0.77 overlaps the Service range 10.96.0.0/16",
		"10.55.1.4":    "overlaps the pod range of node w1 10.55.1.0/24",
		"198.51.100.3": "pool good: 198.51.100.0-198.51.100.15 overlaps 198.51.100.3 of pool bad",
		"nonsense":     `pool bad: address "nonsense": specify a CIDR`,
	} {
		_, err := core.ConfigMaps("kube-system").Update(ctx,
			pools(map[string]string{"good": "addresses: [198.51.100.0/28]", "bad": "addresses: [" + addresses + "]"}),
			metav1.UpdateOptions{})
		if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", addresses, err, want)
		}
	}
	// A node that names addresses of a pool keeps nobody from changing the pools, nor from making
	// others but of its first four addresses.
	thief := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w2"}}
	for _, a := range []string{"198.51.100.1", "198.51.100.2", "198.51.100.3", "198.51.100.4", "203.0.113.1"} {
		thief.Status.Addresses = append(thief.Status.Addresses,
			corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a})
	}
	thief, err := core.Nodes().Create(ctx, thief, metav1.CreateOptions{})
	if err != nil || len(thief.Status.Addresses) != 5 {
		t.Fatalf("%v %v", thief, err)
	}
	for _, data := range []map[string]string{{"good": "addresses: [198.51.100.0/28]",
		"more": "addresses: [203.0.113.0/30]"}, {"good": "addresses: [198.51.100.0/28]"}} {
		if _, err := core.ConfigMaps("kube-system").Update(ctx, pools(data), metav1.UpdateOptions{}); err != nil {
			t.Errorf("with a node that has an address of a pool: %v", err)
		}
	}
	_, err = core.ConfigMaps("kube-system").Update(ctx,
		pools(map[string]string{"good": "addresses: [198.51.100.0/28]", "bad": "addresses: [192.0.2.0/28]"}),
		metav1.UpdateOptions{})
	if want := "pool bad: 192.0.2.0-192.0.2.15 overlaps the address of node w1 " +
		"192.0.2.9/32"; !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), want) {
		t.Errorf("a new pool with a node's address: %v, want %q", err, want)
	}
	if have, err := core.ConfigMaps("kube-system").Get(ctx, "load-balancer-pools", metav1.GetOptions{}); err != nil ||
		len(have.Data) != 1 {
		t.Errorf("a refusal changed something: %v %v", have, err)
	}
	_, err = r.Admin().NetworkingV1().ServiceCIDRs().Create(ctx,
		&networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: "more"},
			Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"198.51.0.0/16"}}}, metav1.CreateOptions{})
	if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "the range is in use by load balancers: pool good") {
		t.Errorf("a ServiceCIDR over a pool: %v", err)
	}
	for wish, want := range map[string]string{
		"x": `"x" is not an IP address`, "198.51.100.1,198.51.100.2": "two addresses of one family",
		"2001:db8::1": "the Service has no IPv6",
	} {
		_, err := core.Services("default").Create(ctx, &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Name: "web",
				Annotations: map[string]string{"keelson.dev/load-balancer-ips": wish}},
			Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer,
				Ports: []corev1.ServicePort{{Port: 80}}}}, metav1.CreateOptions{})
		if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", wish, err, want)
		}
	}
}
