package balancer

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
)

var choosePools, chooseErr = ParsePools(map[string]string{
	"big":   "addresses: [192.0.2.10-192.0.2.11, \"2001:db8::10\"]",
	"named": "{addresses: [198.51.100.1], autoAssign: false}",
	"shop": "{addresses: [203.0.113.1], namespaceSelector: {matchLabels: {team: shop}}, serviceSelector: " +
		"{matchLabels: {tier: front}}}",
})

const chooseFour, chooseSix = corev1.IPv4Protocol, corev1.IPv6Protocol

var chooseBoth = []corev1.IPFamily{chooseFour, chooseSix}

var chooseRequire, choosePrefer = corev1.IPFamilyPolicyRequireDualStack, corev1.IPFamilyPolicyPreferDualStack

// chooseCases are the cases of TestChoose.
var chooseCases = []struct {
	name     string
	change   func(s *corev1.Service)
	team     string
	pools    []*Pool
	has      string
	taken    string
	want     string
	told     string // a part of the refusal
	outsider bool
}{
	{name: "the first free", want: "192.0.2.10"},
	{name: "the next free", taken: "192.0.2.10", want: "192.0.2.11"},
	{name: "none free", taken: "192.0.2.10 192.0.2.11",
		told: "no IPv4 address is free in pool big: add addresses to ConfigMap kube-system/load-balancer-pools"},
	{name: "no pools", pools: []*Pool{}, told: "no address pool for load balancers exists: create a pool in " +
		"ConfigMap kube-system/load-balancer-pools"},
	{name: "both families", change: func(s *corev1.Service) {
		s.Spec.IPFamilies = chooseBoth
		s.Spec.IPFamilyPolicy = &chooseRequire
	}, want: "192.0.2.10 2001:db8::10"},
	{name: "IPv6 first", change: func(s *corev1.Service) {
		s.Spec.IPFamilies = []corev1.IPFamily{chooseSix, chooseFour}
	}, want: "2001:db8::10 192.0.2.10"},
	{name: "one family is full", taken: "2001:db8::10", change: func(s *corev1.Service) {
		s.Spec.IPFamilies = chooseBoth
		s.Spec.IPFamilyPolicy = &chooseRequire
	},
		want: "192.0.2.10", told: "no IPv6 address is free in pool big"},
	{name: "a preferred family that no pool has", pools: choosePools[1:], team: "shop",
		change: func(s *corev1.Service) {
			s.Spec.IPFamilies, s.Spec.IPFamilyPolicy, s.Labels = chooseBoth, &choosePrefer,
				map[string]string{"tier": "front"}
		}, want: "203.0.113.1"},
	{name: "a required family that no pool has", pools: choosePools[1:], team: "shop",
		change: func(s *corev1.Service) {
			s.Spec.IPFamilies, s.Spec.IPFamilyPolicy, s.Labels = chooseBoth, &chooseRequire,
				map[string]string{"tier": "front"}
		}, want: "203.0.113.1", told: "no pool has IPv6 addresses"},
	{name: "what it has stays", has: "192.0.2.11", want: "192.0.2.11"},
	{name: "what it has stays without a pool", has: "192.0.2.77", want: "192.0.2.77", outsider: true},
	{name: "an address by field", change: func(s *corev1.Service) {
		s.Spec.LoadBalancerIP = "192.0.2.11"
	}, want: "192.0.2.11"},
	{name: "the annotation goes first", change: func(s *corev1.Service) {
		s.Spec.LoadBalancerIP = "192.0.2.10"
		s.Annotations = map[string]string{AddressesAnnotation: "192.0.2.11"}
	}, want: "192.0.2.11"},
	{name: "two by annotation", change: func(s *corev1.Service) {
		s.Spec.IPFamilies = chooseBoth
		s.Annotations = map[string]string{AddressesAnnotation: "2001:db8::10, 198.51.100.1"}
	}, want: "198.51.100.1 2001:db8::10"},
	{name: "an address of no pool", change: func(s *corev1.Service) {
		s.Spec.LoadBalancerIP = "192.0.2.99"
	}, told: "spec.loadBalancerIP requests 192.0.2.99, which is in no pool"},
	{name: "no address", change: func(s *corev1.Service) {
		s.Spec.LoadBalancerIP = "example"
	}, told: `"example" is not an IP address`},
	{name: "an address that is taken", taken: "192.0.2.11", change: func(s *corev1.Service) {
		s.Spec.LoadBalancerIP = "192.0.2.11"
	},
		told: "requests 192.0.2.11 of pool big, which a Service, a node or another object uses"},
	{name: "until the other is free it keeps what it has", has: "192.0.2.10", taken: "192.0.2.11",
		change: func(s *corev1.Service) {
			s.Spec.LoadBalancerIP = "192.0.2.11"
		}, want: "192.0.2.10", told: "requests 192.0.2.11"},
	{name: "an address of another's pool", change: func(s *corev1.Service) {
		s.Spec.LoadBalancerIP = "203.0.113.1"
	},
		told: "requests 203.0.113.1 of pool shop, whose namespaceSelector does not select its namespace"},
	{name: "a pool by annotation", change: func(s *corev1.Service) {
		s.Annotations = map[string]string{PoolAnnotation: "named"}
	}, want: "198.51.100.1"},
	{name: "from one pool to another", has: "192.0.2.10", change: func(s *corev1.Service) {
		s.Annotations = map[string]string{PoolAnnotation: "named"}
	}, want: "198.51.100.1"},
	{name: "a pool that there is not", change: func(s *corev1.Service) {
		s.Annotations = map[string]string{PoolAnnotation: "x"}
	}, told: "requests pool x, which does not exist"},
	{name: "only on request", pools: choosePools[1:2], told: "pool named is used on request only"},
	{name: "selected by namespace and not by label", pools: choosePools[2:], team: "shop",
		told: "pool shop, whose serviceSelector does not select it"},
}

// F117: the addresses that a Service gets, and the Refusal if it gets none.
func TestChoose(t *testing.T) {
	if chooseErr != nil {
		t.Fatal(chooseErr)
	}

	for _, c := range chooseCases {
		s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "web"},
			Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer, IPFamilies: []corev1.IPFamily{chooseFour}}}
		if c.change != nil {
			c.change(s)
		}
		if c.pools == nil {
			c.pools = choosePools
		}
		q := ChooseInput{Service: s, Namespace: labels.Set{"team": c.team}, Pools: c.pools,
			Free: func(a netip.Addr) bool { return !slices.Contains(strings.Fields(c.taken), a.String()) }}
		for _, a := range strings.Fields(c.has) {
			q.Reserved = append(q.Reserved, netip.MustParseAddr(a))
		}
		got := ChooseAddresses(q)
		if text := strings.Trim(fmt.Sprint(got.Addresses), "[]"); text != c.want {
			t.Errorf("%s: got %q, want %q", c.name, text, c.want)
		}
		switch {
		case c.told == "" && got.Refusal != nil:
			t.Errorf("%s: refused: %s", c.name, got.Refusal.Message)
		case c.told != "" && (got.Refusal == nil || !strings.Contains(got.Refusal.Message, c.told)):
			t.Errorf("%s: told %+v, want %q", c.name, got.Refusal, c.told)
		}
		if (got.Outside != nil) != c.outsider {
			t.Errorf("%s: outside %+v", c.name, got.Outside)
		}
	}
}
