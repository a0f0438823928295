package servicemodel

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent/proxy/proxytest"
)

func only(t *testing.T, m *Model) *Port {
	t.Helper()
	if len(m.Ports()) != 1 {
		t.Fatalf("want one port, got %v", m.Ports())
	}
	for _, p := range m.Ports() {
		return p
	}
	panic("unreachable")
}

func addresses(b []Backend) string {
	var out []string
	for _, x := range b {
		out = append(out, fmt.Sprintf("%s:%d", x.IP, x.Port))
	}
	return strings.Join(out, " ")
}

// F113 F116 F117: the pods that receive traffic.
func TestComputeBackends(t *testing.T) {
	ready := proxytest.Endpoint("10.244.0.2", "w1", true, true, false)
	unready := proxytest.Endpoint("10.244.0.3", "w1", false, false, false)
	ending := proxytest.Endpoint("10.244.0.4", "w2", false, true, true)
	away := proxytest.Endpoint("10.244.1.2", "w2", true, true, false)
	local := v1.ServiceInternalTrafficPolicyLocal
	for name, c := range map[string]struct {
		svc               *v1.Service
		parts             []*discoveryv1.EndpointSlice
		internal, outside string
	}{
		"ready only": {proxytest.Service("a", "10.96.0.10", 0),
			[]*discoveryv1.EndpointSlice{proxytest.Slice("a", ready, unready, ending, away)},
			"10.244.0.2:8080 10.244.1.2:8080", "10.244.0.2:8080 10.244.1.2:8080"},
		"ending as a last": {proxytest.Service("a", "10.96.0.10", 0),
			[]*discoveryv1.EndpointSlice{proxytest.Slice("a", unready, ending)}, "10.244.0.4:8080", "10.244.0.4:8080"},
		"two slices, once": {proxytest.Service("a", "10.96.0.10", 0),
			[]*discoveryv1.EndpointSlice{proxytest.Slice("a", ready), proxytest.Slice("a", ready, away)},
			"10.244.0.2:8080 10.244.1.2:8080", "10.244.0.2:8080 10.244.1.2:8080"},
		"another's slice": {proxytest.Service("a", "10.96.0.10", 0),
			[]*discoveryv1.EndpointSlice{proxytest.Slice("b", ready)}, "", ""},
		"internal local": {proxytest.Service("a", "10.96.0.10", 0, func(s *v1.Service) {
			s.Spec.InternalTrafficPolicy = &local
		}), []*discoveryv1.EndpointSlice{proxytest.Slice("a", ready, away)}, "10.244.0.2:8080",
			"10.244.0.2:8080 10.244.1.2:8080"},
		"external local": {proxytest.Service("a", "10.96.0.10", 30080, func(s *v1.Service) {
			s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal
		}),
			[]*discoveryv1.EndpointSlice{proxytest.Slice("a", ready, away)}, "10.244.0.2:8080 10.244.1.2:8080",
			"10.244.0.2:8080"},
	} {
		t.Run(name, func(t *testing.T) {
			p := only(t, Compute([]*v1.Service{c.svc}, c.parts, Location{Node: "w1"}))
			if got := addresses(p.Backends.Cluster); got != c.internal {
				t.Errorf("cluster traffic goes to %q, want %q", got, c.internal)
			}
			if got := addresses(p.taking()); got != c.outside {
				t.Errorf("outside traffic goes to %q, want %q", got, c.outside)
			}
		})
	}
	for _, none := range []*v1.Service{proxytest.Service("headless", v1.ClusterIPNone, 0),
		proxytest.Service("ext", "", 0, func(s *v1.Service) { s.Spec.Type = v1.ServiceTypeExternalName })} {
		if m := Compute([]*v1.Service{none}, nil, Location{Node: "w1"}); len(m.Ports()) != 0 {
			t.Errorf("service %s got rules: %v", none.Name, m.Ports())
		}
	}
}

// taking returns the backends for clients outside of the cluster.
func (p *Port) taking() []Backend {
	if p.KeepSource {
		return p.Backends.Here
	}
	return p.Backends.Outside
}

// F112 F117: endpoints with special or invalid addresses are ignored.
func TestHostileEndpoints(t *testing.T) {
	good := proxytest.Endpoint("10.244.0.2", "w1", true, true, false)
	for _, bad := range []string{"127.0.0.1", "169.254.169.254", "224.0.0.1", "0.0.0.0", "fd00::1", "::ffff:10.244.0.9",
		"10.244.0.300", "", "fe80::1%eth0"} {
		p := only(t, Compute([]*v1.Service{proxytest.Service("a", "10.96.0.10", 0)},
			[]*discoveryv1.EndpointSlice{proxytest.Slice("a", good, proxytest.Endpoint(bad, "w1", true, true, false))},
			Location{Node: "w1"}))
		if got := addresses(p.Backends.Cluster); got != "10.244.0.2:8080" {
			t.Errorf("%q: %s", bad, got)
		}
	}
	for _, port := range []int32{0, -1, 65536, 1 << 30} {
		part := proxytest.Slice("a", good)
		part.Ports[0].Port = &port
		p := only(t, Compute([]*v1.Service{proxytest.Service("a", "10.96.0.10", 0)}, []*discoveryv1.EndpointSlice{part},
			Location{Node: "w1"}))
		if len(p.Backends.Cluster) != 0 {
			t.Errorf("port %d: %s", port, addresses(p.Backends.Cluster))
		}
	}
	for _, bad := range []v1.ServicePort{{Port: 0}, {Port: 65536}, {Port: 80, NodePort: 1 << 20}, {Port: -1},
		{Port: 80, Protocol: "TCP } ; flush ruleset"}} {
		m := Compute([]*v1.Service{proxytest.Service("a", "10.96.0.10", 0, func(s *v1.Service) {
			s.Spec.Ports =
				append(s.Spec.Ports, bad)
		})}, nil, Location{Node: "w1"})
		if len(m.Ports()) != 1 {
			t.Errorf("%+v: %v", bad, m.Ports())
		}
	}
}

// A cluster IP remains with its Service even if another Service lists it as an external IP, and
// even without endpoints. A Service that lost an external address gets it back when the other
// Service is deleted.
func TestClusterAddressesAreNotTaken(t *testing.T) {
	m := NewModel(Location{Node: "w1"})
	key := func(name string) types.NamespacedName { return types.NamespacedName{Namespace: "default", Name: name} }
	at := Frontend{netip.MustParseAddr("10.96.0.1"), "tcp", 80}
	owner := func() (out string) {
		m.UpdatePorts()
		for _, p := range m.Ports() {
			if slices.Contains(p.Internal, at) || slices.Contains(p.External, at) {
				out += p.Name
			}
		}
		return out
	}
	for i := range 10 { // the order of names differs from the order of rules
		name := fmt.Sprint("thief", i)
		m.SetService(key(name), proxytest.Service(name, fmt.Sprint("10.96.1.", i), 0, func(s *v1.Service) {
			s.Spec.ExternalIPs = []string{"10.96.0.1"}
		}))
	}
	first := owner()
	if !strings.HasPrefix(first, "default/thief") || strings.Count(first, "thief") != 1 {
		t.Errorf("before there is a victim %q has the address, want one", first)
	}
	m.SetService(key("victim"), proxytest.Service("victim", "10.96.0.1", 0))
	if got := owner(); got != "default/victim:http" {
		t.Errorf("%s has the address of the victim", got)
	}
	m.SetService(key("victim"), nil)
	if got := owner(); got != first {
		t.Errorf("after the victim is gone %s has the address, want %s", got, first)
	}
}

// F117: the frontends and settings of a Service.
func TestFrontends(t *testing.T) {
	proxyMode, vip := v1.LoadBalancerIPModeProxy, v1.LoadBalancerIPModeVIP
	six := proxytest.Slice("a", proxytest.Endpoint("fd00:10::2", "w1", true, true, false))
	six.AddressType, six.Name = discoveryv1.AddressTypeIPv6, "a-6"
	m := Compute([]*v1.Service{proxytest.Service("a", "10.96.0.10", 30080, func(s *v1.Service) {
		s.Spec.Type = v1.ServiceTypeLoadBalancer
		s.Spec.ClusterIPs = []string{"10.96.0.10", "fd00:96::10"}
		s.Spec.ExternalIPs = []string{"192.0.2.1", "2001:db8::1", "nonsense", "0.0.0.0"}
		s.Spec.LoadBalancerSourceRanges = []string{"198.51.100.0/24", " 198.51.100.128/25", "2001:db8:1::/48"}
		s.Spec.SessionAffinity = v1.ServiceAffinityClientIP
		s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: "192.0.2.80", IPMode: &vip},
			{IP: "192.0.2.81", IPMode: &proxyMode}, {Hostname: "lb"}, {IP: "2001:db8::80"}}
	})}, []*discoveryv1.EndpointSlice{proxytest.Slice("a", proxytest.Endpoint("10.244.0.2", "w1", true, true, false)),
		six}, Location{Node: "w1"})
	var got []string
	for _, p := range m.Ports() {
		got = append(got, strings.TrimSpace(fmt.Sprintln(p.V6, p.Internal, p.External, p.Guarded, p.Sources.Prefixes,
			addresses(p.Backends.Cluster), p.Affinity)))
	}
	slices.Sort(got)
	want := []string{
		"false [{10.96.0.10 tcp 80}] [{192.0.2.1 tcp 80} {192.0.2.80 tcp 80} {0.0.0.0 tcp 30080}] [{192.0.2.80 tcp " +
			"80}] [198.51.100.0/24] 10.244.0.2:8080 10800",
		"true [{fd00:96::10 tcp 80}] [{2001:db8::1 tcp 80} {2001:db8::80 tcp 80} {:: tcp 30080}] [{2001:db8::80 tcp " +
			"80}] [2001:db8:1::/48] fd00:10::2:8080 10800",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// A Service with the label of another proxy, or labeled headless, has no rules; the same applies to
// an EndpointSlice. F38
func TestServicesOfOtherProxies(t *testing.T) {
	ready := proxytest.Endpoint("10.244.0.2", "w1", true, true, false)
	for _, label := range []string{labelServiceProxyName, v1.IsHeadlessService} {
		other := proxytest.Service("web", "10.96.0.1", 0, func(s *v1.Service) {
			s.Labels = map[string]string{label: "x"}
		})
		if m := Compute([]*v1.Service{other}, []*discoveryv1.EndpointSlice{proxytest.Slice("web", ready)},
			Location{Node: "w1"}); len(m.Ports()) > 0 {
			t.Errorf("%s: a Service with it has the ports %v", label, m.Ports())
		}
		part := proxytest.Slice("web", ready)
		part.Labels[label] = ""
		m := Compute([]*v1.Service{proxytest.Service("web", "10.96.0.1", 0)}, []*discoveryv1.EndpointSlice{part},
			Location{Node: "w1"})
		if backends := only(t, m).taking(); len(backends) > 0 {
			t.Errorf("%s: an EndpointSlice with it gives %s", label, addresses(backends))
		}
	}
}
