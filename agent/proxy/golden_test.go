package proxy

import (
	"flag"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"keelson.dev/keelson/agent/proxy/proxytest"
	"keelson.dev/keelson/agent/proxy/servicemodel"
)

var rewrite = flag.Bool("rewrite", false, "write the golden files")

// F115 F117 F118: the output of each writer for Services of every kind, as text: nftables, the
// input of iptables-restore, and the commands of IPVS. The first text is the complete rules, the
// second a change of one Service.
func TestGolden(t *testing.T) {
	local := v1.ServiceInternalTrafficPolicyLocal
	udp, sctp := v1.ProtocolUDP, v1.ProtocolSCTP
	proto := func(p v1.Protocol) func(*v1.Service) {
		return func(s *v1.Service) { s.Spec.Ports[0].Protocol = p }
	}
	here, there := proxytest.Endpoint("10.244.0.2", "w1", true, true, false),
		proxytest.Endpoint("10.244.1.2", "w2", true, true, false)
	ending := proxytest.Endpoint("10.244.0.3", "w1", false, true, true)
	of := func(svc string, p v1.Protocol, e ...discoveryv1.Endpoint) *discoveryv1.EndpointSlice {
		s := proxytest.Slice(svc, e...)
		s.Ports[0].Protocol = &p
		return s
	}
	six := proxytest.Slice("dual", proxytest.Endpoint("fd00:10::2", "w1", true, true, false))
	six.AddressType, six.Name = discoveryv1.AddressTypeIPv6, "dual-6"
	cases := map[string]struct {
		services []*v1.Service
		before   []*discoveryv1.EndpointSlice
		after    []*discoveryv1.EndpointSlice
	}{
		"clusterip": {[]*v1.Service{proxytest.Service("web", "10.96.0.10", 0)},
			[]*discoveryv1.EndpointSlice{proxytest.Slice("web", here)},
			[]*discoveryv1.EndpointSlice{proxytest.Slice("web", here, there)}},
		"nothing behind it": {[]*v1.Service{proxytest.Service("web", "10.96.0.10", 30080),
			proxytest.Service("stays", "10.96.0.11", 0, func(s *v1.Service) { s.Spec.InternalTrafficPolicy = &local })},
			[]*discoveryv1.EndpointSlice{proxytest.Slice("stays", there)},
			[]*discoveryv1.EndpointSlice{proxytest.Slice("stays", there), proxytest.Slice("web", ending)}},
		"nodeport sticky": {[]*v1.Service{proxytest.Service("web", "10.96.0.10", 30080, func(s *v1.Service) {
			s.Spec.SessionAffinity = v1.ServiceAffinityClientIP
		})},
			[]*discoveryv1.EndpointSlice{proxytest.Slice("web", here, there)},
			[]*discoveryv1.EndpointSlice{proxytest.Slice("web", there)}},
		"loadbalancer local": {[]*v1.Service{proxytest.Service("web", "10.96.0.10", 30080, func(s *v1.Service) {
			s.Spec.Type, s.Spec.ExternalTrafficPolicy = v1.ServiceTypeLoadBalancer, v1.ServiceExternalTrafficPolicyLocal
			s.Spec.LoadBalancerSourceRanges = []string{"198.51.100.0/24", "203.0.113.7/32"}
			s.Spec.ExternalIPs = []string{"192.0.2.1"}
			s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: "192.0.2.80"}}
		})}, []*discoveryv1.EndpointSlice{proxytest.Slice("web", here, there)},
			[]*discoveryv1.EndpointSlice{proxytest.Slice("web", ending, there)}},
		"udp and sctp": {[]*v1.Service{proxytest.Service("dns", "10.96.0.53", 30053, proto(udp)),
			proxytest.Service("sig", "10.96.0.54", 30054, proto(sctp))},
			[]*discoveryv1.EndpointSlice{of("dns", udp, here), of("sig", sctp, there)},
			[]*discoveryv1.EndpointSlice{of("dns", udp, there), of("sig", sctp, here, there)}},
		"dual stack": {[]*v1.Service{proxytest.Service("dual", "10.96.0.10", 30080, func(s *v1.Service) {
			s.Spec.ClusterIPs = []string{"10.96.0.10", "fd00:96::10"}
		})},
			[]*discoveryv1.EndpointSlice{proxytest.Slice("dual", here)},
			[]*discoveryv1.EndpointSlice{proxytest.Slice("dual", here), six}},
		"without rules": {[]*v1.Service{proxytest.Service("headless", v1.ClusterIPNone, 0),
			proxytest.Service("alias", "", 0, func(s *v1.Service) {
				s.Spec.Type, s.Spec.ExternalName =
					v1.ServiceTypeExternalName, "example.com"
			})},
			[]*discoveryv1.EndpointSlice{proxytest.Slice("headless", here)}, nil},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			m := servicemodel.NewModel(testPlace)
			n, dump := onFakes(nftDialect)
			ipt, text := inMemory()
			vs := newFakeIPVS()
			base := testBase
			base.ServiceCIDRs, base.PodCIDRs = base.ServiceCIDRs[:1], base.PodCIDRs[:1]
			for _, step := range []struct {
				name  string
				parts []*discoveryv1.EndpointSlice
			}{{"before", c.before}, {"after", c.after}} {
				m.Replace(c.services, step.parts)
				changes := m.UpdatePorts()
				for _, w := range []Writer{n, ipt, vs} {
					var err error
					if step.name == "before" {
						err = w.Sync(t.Context(), base, maps.Values(m.Ports()))
					} else {
						err = w.Apply(t.Context(), changes)
					}
					if err != nil {
						t.Fatal(err)
					}
				}
				prefix := strings.ReplaceAll(name, " ", "-") + "." + step.name
				golden(t, prefix+".nft", dump())
				golden(t, prefix+".iptables", text())
				golden(t, prefix+".ipvs", strings.Join(vs.kernel.said, "\n")+"\n")
				vs.kernel.said = nil
			}
		})
	}
}

// golden compares a text with a golden file.
func golden(t *testing.T, name, got string) {
	t.Helper()
	var lines []string
	for line := range strings.SplitSeq(got, "\n") {
		lines = append(lines, strings.TrimRight(line, " "))
	}
	got = strings.Join(lines, "\n")
	goldenPath := filepath.Join("testdata", name)
	if *rewrite {
		if err := os.MkdirAll("testdata", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(goldenPath, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(goldenPath)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s differs (-rewrite updates the file):\n%s", goldenPath, diff(string(want), got))
	}
}

// diff returns the lines that differ between two texts.
func diff(want, got string) string {
	w, g := strings.Split(want, "\n"), strings.Split(got, "\n")
	var out []string
	for _, l := range w {
		if !slices.Contains(g, l) {
			out = append(out, "- "+l)
		}
	}
	for _, l := range g {
		if !slices.Contains(w, l) {
			out = append(out, "+ "+l)
		}
	}
	return strings.Join(out, "\n")
}
