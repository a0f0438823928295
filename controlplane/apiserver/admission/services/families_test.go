package services_test

import (
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/apiserver"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

// formatFamilies returns the families, policy and addresses of a Service as text: "IPv4,IPv6
// PreferDualStack 10.96.,fd96::".
func formatFamilies(s *corev1.Service) string {
	var families, addresses []string
	for _, f := range s.Spec.IPFamilies {
		families = append(families, string(f))
	}
	for _, a := range s.Spec.ClusterIPs {
		if ip, err := netip.ParseAddr(a); err == nil {
			a = map[bool]string{true: "4", false: "6"}[ip.Is4()]
		}
		addresses = append(addresses, a)
	}
	policy := ""
	if s.Spec.IPFamilyPolicy != nil {
		policy = string(*s.Spec.IPFamilyPolicy)
	}
	return strings.Join(families, ",") + " " + policy + " " + strings.Join(addresses, ",")
}

// F117: Services get the documented families and addresses, in clusters of one family and of two.
func TestServiceFamilies(t *testing.T) {
	four, six := netip.MustParsePrefix("10.96.0.0/24"), netip.MustParsePrefix("fd96::/112")
	type try struct{ families, policy, addresses, selector, want string }
	for name, c := range map[string]struct {
		first, second netip.Prefix
		tries         []try
	}{
		"IPv4": {four, netip.Prefix{}, []try{
			{"", "", "", "a", "IPv4 SingleStack 4"},
			{"", "PreferDualStack", "", "a", "IPv4 PreferDualStack 4"},
			{"IPv6", "", "", "a", "not configured on this cluster"},
			{"", "RequireDualStack", "", "a", "not configured for dual-stack"},
			{"", "", "None", "a", "IPv4 SingleStack None"},
			{"", "", "None", "", "IPv4,IPv6 RequireDualStack None"},
			{"", "", "fd96::5", "a", "not configured on this cluster"},
		}},
		"IPv6": {six, netip.Prefix{}, []try{
			{"", "", "", "a", "IPv6 SingleStack 6"},
			{"IPv6", "PreferDualStack", "", "a", "IPv6 PreferDualStack 6"},
			{"IPv4", "", "", "a", "not configured on this cluster"},
			{"", "", "fd96::77", "a", "IPv6 SingleStack 6"},
			{"", "", "fd97::77", "a", "not in the valid range"},
		}},
		"both": {four, six, []try{
			{"", "", "", "a", "IPv4 SingleStack 4"},
			{"IPv6", "", "", "a", "IPv6 SingleStack 6"},
			{"", "PreferDualStack", "", "a", "IPv4,IPv6 PreferDualStack 4,6"},
			{"IPv6", "RequireDualStack", "", "a", "IPv6,IPv4 RequireDualStack 6,4"},
			{"IPv6,IPv4", "", "", "a", "IPv6,IPv4 RequireDualStack 6,4"},
			{"", "", "10.96.0.9,fd96::200", "a", "IPv4,IPv6 RequireDualStack 4,6"},
			{"", "RequireDualStack", "fd96::201", "a", "IPv6,IPv4 RequireDualStack 6,4"},
			{"IPv4", "", "fd96::202", "a", "expected an IPv4 value as indicated by `ipFamilies[0]`"},
			{"IPv4,IPv6", "SingleStack", "", "a", "SingleStack allows only one family"},
			{"IPv4,IPv4", "RequireDualStack", "", "a", "Duplicate value"},
			{"", "PreferDualStack", "None", "a", "IPv4,IPv6 PreferDualStack None"},
		}},
	} {
		t.Run(name, func(t *testing.T) {
			r := apiservertest.StartReplica(t, func(cfg *apiserver.Config) {
				cfg.Network.ServiceCIDR, cfg.Network.SecondServiceCIDR = c.first, c.second
			})
			services := r.Admin().CoreV1().Services("default")
			for _, x := range c.tries {
				s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{GenerateName: "s-"},
					Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}}}
				if x.selector != "" {
					s.Spec.Selector = map[string]string{"app": x.selector}
				}
				for f := range strings.SplitSeq(x.families, ",") {
					if f != "" {
						s.Spec.IPFamilies = append(s.Spec.IPFamilies, corev1.IPFamily(f))
					}
				}
				if x.policy != "" {
					p := corev1.IPFamilyPolicy(x.policy)
					s.Spec.IPFamilyPolicy = &p
				}
				if x.addresses != "" {
					s.Spec.ClusterIPs = strings.Split(x.addresses, ",")
					s.Spec.ClusterIP = s.Spec.ClusterIPs[0]
				}
				got, err := services.Create(t.Context(), s, metav1.CreateOptions{})
				said := ""
				if err != nil {
					said = err.Error()
				} else {
					said = formatFamilies(got)
				}
				if err == nil && said != x.want || !strings.Contains(said, x.want) {
					t.Errorf("%+v: %s", x, said)
				}
			}
		})
	}
}

// F117: a Service gets its second address when its policy requires it, and releases only this
// address when the policy no longer requires it.
func TestServiceAddsAndRemovesSecondFamily(t *testing.T) {
	r := apiservertest.StartReplica(t, func(c *apiserver.Config) {
		c.Network.ServiceCIDR, c.Network.SecondServiceCIDR = netip.MustParsePrefix("10.96.0.0/24"),
			netip.MustParsePrefix("fd96::/112")
	})
	services := r.Admin().CoreV1().Services("default")
	s, err := services.Create(t.Context(), &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "a"},
		Spec: corev1.ServiceSpec{
			Ports: []corev1.ServicePort{{Port: 80}}, Selector: map[string]string{"a": "b"}}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	first := s.Spec.ClusterIP
	set := func(change func(*corev1.ServiceSpec), want string) {
		t.Helper()
		change(&s.Spec)
		next, err := services.Update(t.Context(), s, metav1.UpdateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if s = next; formatFamilies(s) != want || s.Spec.ClusterIP != first {
			t.Errorf("%s at %s, want %s at %s", formatFamilies(s), s.Spec.ClusterIP, want, first)
		}
	}
	policy := func(p corev1.IPFamilyPolicy) func(*corev1.ServiceSpec) {
		return func(s *corev1.ServiceSpec) { s.IPFamilyPolicy = &p }
	}
	set(policy(corev1.IPFamilyPolicyPreferDualStack), "IPv4,IPv6 PreferDualStack 4,6")
	second := s.Spec.ClusterIPs[1]
	if a, err := r.Admin().NetworkingV1().IPAddresses().Get(t.Context(), second, metav1.GetOptions{}); err != nil ||
		a.Spec.ParentRef.Name != "a" {
		t.Errorf("IPAddress %s: %+v, %v", second, a, err)
	}
	set(func(s *corev1.ServiceSpec) {
		s.ClusterIPs, s.IPFamilies, s.IPFamilyPolicy = nil, nil, nil
	}, "IPv4,IPv6 PreferDualStack 4,6")
	if s.Spec.ClusterIPs[1] != second {
		t.Errorf("an update that leaves the address out took %s for %s", s.Spec.ClusterIPs[1], second)
	}
	set(policy(corev1.IPFamilyPolicySingleStack), "IPv4 SingleStack 4")
	if _, err := r.Admin().NetworkingV1().IPAddresses().Get(t.Context(), second, metav1.GetOptions{}); err == nil {
		t.Errorf("address %s is still held", second)
	}
}
