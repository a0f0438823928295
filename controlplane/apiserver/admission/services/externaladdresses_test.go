package services

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/apiserver/admission"
	"keelson.dev/keelson/controlplane/apiserver/admission/admissiontest"
)

// externalService returns a Service with external addresses and TCP ports.
func externalService(name string, ips []string, ports ...int32) *corev1.Service {
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name},
		Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeClusterIP, ClusterIP: "10.96.0.77",
			ClusterIPs: []string{"10.96.0.77"}, ExternalIPs: ips}}
	for _, p := range ports {
		s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: fmt.Sprint("p", p), Port: p,
			Protocol: corev1.ProtocolTCP})
	}
	return s
}

// externalConfig returns the ServiceConfig of a dual-stack cluster: a machine with a replica and an
// agent, a worker node, and an additional ServiceCIDR.
func externalConfig() Config {
	machine := func(name, cidr string, addresses ...string) *corev1.Node {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.NodeSpec{PodCIDRs: []string{cidr}}}
		for i, a := range addresses {
			kind := []corev1.NodeAddressType{corev1.NodeInternalIP, corev1.NodeExternalIP}[i]
			n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: kind, Address: a})
		}
		n.Status.DaemonEndpoints.KubeletEndpoint.Port = 10350
		return n
	}
	dns := externalService("kube-dns", nil, 53)
	dns.Namespace, dns.Spec.ClusterIP, dns.Spec.ClusterIPs = "kube-system", "172.20.0.10", []string{"172.20.0.10"}
	w := admissiontest.World{"nodes": {machine("cp1", "10.250.1.0/24", "10.89.0.11", "198.51.100.11"),
		machine("w1", "10.244.2.0/24", "10.89.0.101")},
		"services": {dns},
		"servicecidrs": {&networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: "more"},
			Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.112.0.0/16"}}}}}
	return Config{Cluster: w, Kinds: kinds.All(), ServiceCIDR: netip.MustParsePrefix("10.96.0.0/16"),
		SecondServiceCIDR: netip.MustParsePrefix("fd00:96::/112"),
		PodCIDRs:          []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")},
		ReplicaAddresses: func() []netip.AddrPort {
			return []netip.AddrPort{netip.MustParseAddrPort("10.89.0.11:6443"),
				netip.MustParseAddrPort("10.89.0.11:6444"), netip.MustParseAddrPort("10.89.0.11:6445")}
		}}
}

// F117: external addresses that belong to the cluster itself are refused with 422 and the field; a
// machine's other ports are not.
func TestExternalAddressesOfTheClusterAreRefused(t *testing.T) {
	c := externalConfig()
	for _, test := range []struct {
		ip   string
		port int32
		want string // "" = accepted
	}{
		{"192.0.2.1", 6443, ""},
		{"10.89.0.11", 80, ""},
		{"10.89.0.101", 443, ""},
		{"10.89.0.101", 6443, ""}, // no replica listens at this address
		{"10.89.0.11", 6443, "port 6443/TCP of this address is used by a control plane replica"},
		{"10.89.0.11", 6444, "used by a control plane replica"},
		{"10.89.0.11", 6445, "used by a control plane replica"},
		{"198.51.100.11", 6443, "used by a control plane replica"},
		{"::ffff:10.89.0.11", 6443, "used by a control plane replica"},
		{"010.089.000.011", 6443, "used by a control plane replica"},
		{"10.89.0.101", 10250, "used by the agent of node w1"},
		{"10.89.0.101", 10350, "used by the agent of node w1"},
		{"10.89.0.11", 10256, "used by the agent of node cp1"},
		{"10.244.9.9", 80, "pod range 10.244.0.0/16"},
		{"10.250.1.7", 80, "pod range 10.250.1.0/24"},
		{"10.96.0.1", 443, "Service range 10.96.0.0/16"},
		{"10.96.200.1", 80, "Service range 10.96.0.0/16"},
		{"10.112.0.5", 80, "Service range 10.112.0.0/16"},
		{"fd00:96::7", 80, "Service range fd00:96::/112"},
		{"172.20.0.10", 53, "address of the cluster DNS"},
		{"127.0.0.1", 80, "loopback"},
		{"169.254.20.10", 53, "link-local"},
		{"fe80::1", 80, "link-local"},
	} {
		err := CheckExternalAddresses(c)(t.Context(),
			admissiontest.CreateAttempt(c.Kinds, externalService("s", []string{"192.0.2.9", test.ip}, test.port)))
		switch {
		case test.want == "" && err != nil:
			t.Errorf("%s port %d: %v", test.ip, test.port, err)
		case test.want != "" && (!apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "spec.externalIPs[1]") ||
			!strings.Contains(err.Error(), test.want)):
			t.Errorf("%s port %d: %v, want 422 with %q", test.ip, test.port, err, test.want)
		}
	}
}

// F117: a stored Service with an external address of the cluster can still be updated, but can gain
// neither addresses nor ports.
func TestStoredExternalAddressesCanBeUpdated(t *testing.T) {
	c := externalConfig()
	stored := externalService("s", []string{"10.89.0.11", "10.244.9.9"}, 6443)
	for name, test := range map[string]struct {
		change func(*corev1.Service)
		want   string
	}{
		"label":     {func(s *corev1.Service) { s.Labels = map[string]string{"a": "b"} }, ""},
		"selector":  {func(s *corev1.Service) { s.Spec.Selector = map[string]string{"a": "b"} }, ""},
		"fewer":     {func(s *corev1.Service) { s.Spec.ExternalIPs = s.Spec.ExternalIPs[:1] }, ""},
		"good port": {func(s *corev1.Service) { s.Spec.Ports = externalService("", nil, 6443, 80).Spec.Ports }, ""},
		"further port": {func(s *corev1.Service) {
			s.Spec.Ports = externalService("", nil, 6443, 6444).Spec.Ports
		}, "used by a control plane replica"},
		"further pod": {func(s *corev1.Service) {
			s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, "10.244.9.8")
		}, "pod range"},
		"other machine": {func(s *corev1.Service) {
			s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, "198.51.100.11")
		}, "used by a control plane replica"},
	} {
		next := stored.DeepCopy()
		test.change(next)
		err := CheckExternalAddresses(c)(t.Context(), admissiontest.UpdateAttempt(c.Kinds, stored, next))
		if test.want == "" && err != nil || test.want != "" &&
			(!apierrors.IsInvalid(err) || !strings.Contains(err.Error(), test.want)) {
			t.Errorf("%s: %v, want %q", name, err, test.want)
		}
	}
	was := externalService("s", []string{"10.89.0.11"}, 6443)
	was.Spec.Type, was.Spec.ClusterIP, was.Spec.ClusterIPs = corev1.ServiceTypeExternalName, "", nil
	if err := CheckExternalAddresses(c)(t.Context(),
		admissiontest.UpdateAttempt(c.Kinds, was,
			externalService("s", []string{"10.89.0.11"}, 6443))); !apierrors.IsInvalid(err) {
		t.Errorf("a Service of type ExternalName becomes one with a cluster address: %v, want 422", err)
	}
}

// F117: --service-external-ip-ranges refuses other addresses.
func TestExternalAddressRanges(t *testing.T) {
	c := externalConfig()
	c.ExternalIPRanges = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}
	if err := CheckExternalAddresses(c)(t.Context(),
		admissiontest.CreateAttempt(c.Kinds, externalService("s", []string{"192.0.2.1"}, 80))); err != nil {
		t.Error(err)
	}
	err := CheckExternalAddresses(c)(t.Context(),
		admissiontest.CreateAttempt(c.Kinds, externalService("s", []string{"203.0.113.1"}, 80)))
	if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "--service-external-ip-ranges): 192.0.2.0/24") {
		t.Errorf("%v, want 422", err)
	}
}

// F117: plugin DenyServiceExternalIPs refuses external addresses that a Service had not.
func TestDenyServiceExternalIPs(t *testing.T) {
	c := externalConfig()
	const want = `services "s" is forbidden: Use of external IPs is denied by admission control`
	stored := externalService("s", []string{"192.0.2.1", "192.0.2.2"}, 80)
	if err := DenyExternalIPs(t.Context(), admissiontest.CreateAttempt(c.Kinds, stored)); err == nil ||
		err.Error() != want {
		t.Errorf("%v, want %s", err, want)
	}
	if err := DenyExternalIPs(t.Context(), admissiontest.UpdateAttempt(c.Kinds, stored,
		externalService("s", []string{"192.0.2.2"}, 80, 81))); err != nil {
		t.Error(err)
	}
	if err := DenyExternalIPs(t.Context(), admissiontest.UpdateAttempt(c.Kinds, stored,
		externalService("s", []string{"192.0.2.3"}, 80))); err == nil {
		t.Error("a further address is accepted")
	}
}

// F117: Kubernetes' deprecation warning is sent where external addresses have an effect.
func TestExternalAddressesWarn(t *testing.T) {
	c := externalConfig()
	for name, test := range map[string]struct {
		change func(*corev1.Service)
		warns  bool
	}{
		"cluster address": {func(*corev1.Service) {}, true},
		"none":            {func(s *corev1.Service) { s.Spec.ExternalIPs = nil }, false},
		"headless":        {func(s *corev1.Service) { s.Spec.ClusterIP = "None" }, false},
		"ExternalName":    {func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeExternalName }, false},
	} {
		s := externalService("s", []string{"192.0.2.1"}, 80)
		test.change(s)
		ctx, warnings := api.WithWarnings(context.Background())
		if err := CheckExternalAddresses(c)(ctx, admissiontest.CreateAttempt(c.Kinds, s)); err != nil {
			t.Error(err)
		}
		if got := slices.Contains(warnings(), externalIPsWarning); got != test.warns {
			t.Errorf("%s: warned %v, want %v", name, got, test.warns)
		}
	}
}

// F117: pairs of an external address and a port are bounded for a Service and for a namespace, with
// 422. A stored Service beyond a bound can be updated without growing.
func TestExternalPairsAreBounded(t *testing.T) {
	c := externalConfig()
	w := c.Cluster.(admissiontest.World)
	addresses := func(n int) (out []string) {
		for i := range n {
			out = append(out, fmt.Sprintf("192.0.%d.%d", 2+i/250, 1+i%250))
		}
		return out
	}
	ports := func(n int) (out []int32) {
		for i := range n {
			out = append(out, int32(20000+i))
		}
		return out
	}
	c.ListHeld = w.ListHeld
	admit := func(a *admission.Attempt) error {
		if err := CheckExternalAddresses(c)(t.Context(), a); err != nil {
			return err
		}
		for _, change := range a.Changes() {
			namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: change.Name}}
			if _, err := change.Next(namespace); err != nil {
				return err
			}
		}
		return nil
	}
	for _, s := range []*corev1.Service{externalService("many-addresses", addresses(1000), ports(4)...),
		externalService("many-ports", addresses(4), ports(1000)...)} {
		if err := admit(admissiontest.CreateAttempt(c.Kinds, s)); err != nil {
			t.Errorf("%s: %v", s.Name, err)
		}
	}
	bomb := externalService("bomb", addresses(400), ports(300)...)
	if err := admit(admissiontest.CreateAttempt(c.Kinds, bomb)); !apierrors.IsInvalid(err) ||
		!strings.Contains(err.Error(), "spec.externalIPs: Forbidden: 400 addresses with 300 ports each are 120000 "+
			"pairs, the maximum per Service is 4096") {
		t.Errorf("%v, want 422", err)
	}
	labeled := bomb.DeepCopy()
	labeled.Labels = map[string]string{"a": "b"}
	if err := admit(admissiontest.UpdateAttempt(c.Kinds, bomb, labeled)); err != nil {
		t.Errorf("a stored Service beyond the bound is labeled: %v", err)
	}
	for i := range 4 {
		s := externalService(fmt.Sprint("s", i), addresses(16), ports(250)...)
		if err := admit(admissiontest.CreateAttempt(c.Kinds, s)); err != nil {
			t.Fatal(err)
		}
		w["services"] = append(w["services"], s)
	}
	err := admit(admissiontest.CreateAttempt(c.Kinds, externalService("s4", addresses(16), ports(250)...)))
	if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(),
		"the other Services in namespace ns have 16000; the maximum per namespace is 16384") {
		t.Errorf("%v, want 422", err)
	}
	s := externalService("s4", addresses(16), ports(250)...)
	s.Namespace = "other"
	if err := admit(admissiontest.CreateAttempt(c.Kinds, s)); err != nil {
		t.Errorf("another namespace: %v", err)
	}
}
