package proxy

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"
	"sigs.k8s.io/knftables"

	"keelson.dev/keelson/agent/fake"
)

func service(name, ip string, nodePort int32, change ...func(*v1.Service)) *v1.Service {
	s := &v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}}
	s.Spec.ClusterIP = ip
	s.Spec.Ports = []v1.ServicePort{{Name: "http", Port: 80, NodePort: nodePort, Protocol: v1.ProtocolTCP}}
	for _, c := range change {
		c(s)
	}
	return s
}

func endpoint(ip, node string, ready, serving, terminating bool) discoveryv1.Endpoint {
	return discoveryv1.Endpoint{Addresses: []string{ip}, NodeName: &node,
		Conditions: discoveryv1.EndpointConditions{Ready: &ready, Serving: &serving, Terminating: &terminating}}
}

func slice(svc string, endpoints ...discoveryv1.Endpoint) *discoveryv1.EndpointSlice {
	name, port, proto := "http", int32(8080), v1.ProtocolTCP
	return &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "default", Name: svc + "-x", Labels: map[string]string{discoveryv1.LabelServiceName: svc}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints:   endpoints,
		Ports:       []discoveryv1.EndpointPort{{Name: &name, Port: &port, Protocol: &proto}},
	}
}

func only(t *testing.T, m Model) Port {
	t.Helper()
	if len(m) != 1 {
		t.Fatalf("want one port, got %v", m)
	}
	for _, p := range m {
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

// F113 F116 F117: which pods take traffic.
func TestComputeBackends(t *testing.T) {
	ready := endpoint("10.244.0.2", "w1", true, true, false)
	unready := endpoint("10.244.0.3", "w1", false, false, false)
	ending := endpoint("10.244.0.4", "w2", false, true, true)
	away := endpoint("10.244.1.2", "w2", true, true, false)
	local := v1.ServiceInternalTrafficPolicyLocal
	for name, c := range map[string]struct {
		svc               *v1.Service
		parts             []*discoveryv1.EndpointSlice
		internal, outside string
	}{
		"ready only":       {service("a", "10.96.0.10", 0), []*discoveryv1.EndpointSlice{slice("a", ready, unready, ending, away)}, "10.244.0.2:8080 10.244.1.2:8080", "10.244.0.2:8080 10.244.1.2:8080"},
		"ending as a last": {service("a", "10.96.0.10", 0), []*discoveryv1.EndpointSlice{slice("a", unready, ending)}, "10.244.0.4:8080", "10.244.0.4:8080"},
		"two slices, once": {service("a", "10.96.0.10", 0), []*discoveryv1.EndpointSlice{slice("a", ready), slice("a", ready, away)}, "10.244.0.2:8080 10.244.1.2:8080", "10.244.0.2:8080 10.244.1.2:8080"},
		"another's slice":  {service("a", "10.96.0.10", 0), []*discoveryv1.EndpointSlice{slice("b", ready)}, "", ""},
		"internal local":   {service("a", "10.96.0.10", 0, func(s *v1.Service) { s.Spec.InternalTrafficPolicy = &local }), []*discoveryv1.EndpointSlice{slice("a", ready, away)}, "10.244.0.2:8080", "10.244.0.2:8080 10.244.1.2:8080"},
		"external local": {service("a", "10.96.0.10", 30080, func(s *v1.Service) { s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal }),
			[]*discoveryv1.EndpointSlice{slice("a", ready, away)}, "10.244.0.2:8080 10.244.1.2:8080", "10.244.0.2:8080"},
	} {
		t.Run(name, func(t *testing.T) {
			p := only(t, Compute([]*v1.Service{c.svc}, c.parts, Place{Node: "w1"}))
			if got := addresses(p.Cluster); got != c.internal {
				t.Errorf("cluster traffic goes to %q, want %q", got, c.internal)
			}
			if got := addresses(p.Outside); got != c.outside {
				t.Errorf("outside traffic goes to %q, want %q", got, c.outside)
			}
		})
	}
	for _, none := range []*v1.Service{service("headless", v1.ClusterIPNone, 0), service("ext", "", 0, func(s *v1.Service) { s.Spec.Type = v1.ServiceTypeExternalName })} {
		if m := Compute([]*v1.Service{none}, nil, Place{Node: "w1"}); len(m) != 0 {
			t.Errorf("service %s got rules: %v", none.Name, m)
		}
	}
}

// Whatever the order of changes, the kernel ends with what the last model says:
// the incremental path is checked against building from nothing, on knftables' fake.
func TestChangesConverge(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ctx := t.Context()
		cidr, pods := netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("10.244.0.0/16")
		fake := knftables.NewFake(knftables.IPv4Family, Table)
		tx := fake.NewTransaction()
		base(tx, cidr, pods)
		if err := fake.Run(ctx, tx); err != nil {
			t.Fatal(err)
		}
		var have ruleset
		for range rapid.IntRange(1, 6).Draw(t, "steps") {
			want := render(drawModel(t))
			tx := fake.NewTransaction()
			change(tx, have, want)
			if tx.NumOperations() > 0 {
				if err := fake.Run(ctx, tx); err != nil {
					t.Fatalf("%v\n%s", err, tx.String())
				}
			}
			have = want
			fresh := knftables.NewFake(knftables.IPv4Family, Table)
			ftx := fresh.NewTransaction()
			base(ftx, cidr, pods)
			change(ftx, ruleset{}, want)
			if err := fresh.Run(ctx, ftx); err != nil {
				t.Fatal(err)
			}
			if got, wanted := sortedElements(fake.Dump()), sortedElements(fresh.Dump()); got != wanted {
				t.Fatalf("after the change:\n%s\nfrom nothing:\n%s", got, wanted)
			}
		}
	})
}

// sortedElements orders map elements, which have no order; rules keep theirs.
func sortedElements(dump string) string {
	var lines, elements []string
	for line := range strings.SplitSeq(dump, "\n") {
		if strings.HasPrefix(line, "add element") {
			elements = append(elements, line)
		} else {
			lines = append(lines, line)
		}
	}
	slices.Sort(elements)
	lines = append(lines, elements...)
	return strings.Join(lines, "\n")
}

func drawModel(t *rapid.T) Model {
	var services []*v1.Service
	var parts []*discoveryv1.EndpointSlice
	for i := range 4 {
		name := fmt.Sprintf("s%d", i)
		if !rapid.Bool().Draw(t, name) {
			continue
		}
		var nodePort int32
		if rapid.Bool().Draw(t, name+" node port") {
			nodePort = 30000 + int32(i)
		}
		services = append(services, service(name, fmt.Sprintf("10.96.0.%d", 10+i), nodePort, func(s *v1.Service) {
			if rapid.Bool().Draw(t, name+" sticky") {
				s.Spec.SessionAffinity = v1.ServiceAffinityClientIP
			}
			if rapid.Bool().Draw(t, name+" local") {
				s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal
			}
		}))
		var endpoints []discoveryv1.Endpoint
		for e := range rapid.IntRange(0, 3).Draw(t, name+" endpoints") {
			endpoints = append(endpoints, endpoint(fmt.Sprintf("10.244.%d.%d", i, e+2), rapid.SampledFrom([]string{"w1", "w2"}).Draw(t, "node"), true, true, false))
		}
		parts = append(parts, slice(name, endpoints...))
	}
	return Compute(services, parts, Place{Node: "w1"})
}

// With a foreign network the rules give pods' traffic to the world no address of ours; they do again when it leaves.
func TestForeignNetworkMasquerades(t *testing.T) {
	const rule = "ip saddr 10.244.0.0/16 ip daddr != 10.244.0.0/16 masquerade"
	objects := fake.NewCluster()
	objects.About.ServiceCIDR, objects.About.ClusterCIDR = "10.96.0.0/16", "10.244.0.0/16"
	objects.Put(service("web", "10.96.0.10", 30080), slice("web", endpoint("10.244.0.2", "w1", true, true, false)))
	foreign := false
	p := &Proxy{Node: "w1", Foreign: func() bool { return foreign }}
	nft := knftables.NewFake(knftables.IPv4Family, Table)
	s := &state{nft: nft, seen: map[string]string{}}
	for _, foreign = range []bool{false, true, false} {
		if err := p.apply(t.Context(), s, objects, objects); err != nil {
			t.Fatal(err)
		}
		if dump := nft.Dump(); strings.Contains(dump, rule) == foreign || !strings.Contains(dump, "10.244.0.2") {
			t.Errorf("foreign %v:\n%s", foreign, dump)
		}
	}
}

// Rules that somebody else took away are noticed and made anew.
func TestFlushedRules(t *testing.T) {
	objects := fake.NewCluster()
	objects.Put(service("web", "10.96.0.10", 0), slice("web", endpoint("10.244.0.2", "w1", true, true, false)))
	p := &Proxy{Node: "w1"}
	nft := knftables.NewFake(knftables.IPv4Family, Table)
	s := &state{nft: nft, seen: map[string]string{}}
	if err := p.apply(t.Context(), s, objects, objects); err != nil {
		t.Fatal(err)
	}
	before := sortedElements(nft.Dump())
	if !s.intact(t.Context()) {
		t.Error("what was made is not found")
	}
	tx := nft.NewTransaction()
	tx.Delete(&knftables.Table{})
	if err := nft.Run(t.Context(), tx); err != nil {
		t.Fatal(err)
	}
	if s.intact(t.Context()) {
		t.Fatal("what was flushed is not missed")
	}
	s.built = false
	if err := p.apply(t.Context(), s, objects, objects); err != nil || sortedElements(nft.Dump()) != before {
		t.Errorf("%v\n%s", err, nft.Dump())
	}
}

// Without nft the proxy says so at once, with the remedy, for the node's conditions.
func TestWithoutNft(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	objects := fake.NewCluster()
	err := (&Proxy{Node: "w1"}).Run(t.Context(), objects, objects)
	if err == nil || !strings.Contains(err.Error(), "nft") || !strings.Contains(err.Error(), "install nft") {
		t.Errorf("%v", err)
	}
}

// The address that the cluster gave to a Service stays its own, whoever writes it as an external one, also while it
// has no endpoint.
func TestClusterAddressesAreNotTaken(t *testing.T) {
	for _, ready := range []bool{true, false} {
		victim := service("victim", "10.96.0.1", 0)
		services := []*v1.Service{victim}
		parts := []*discoveryv1.EndpointSlice{slice("victim", endpoint("10.244.0.2", "w1", ready, ready, false))}
		for i := range 10 { // the order of names is not that of rules
			name := fmt.Sprint("thief", i)
			services = append(services, service(name, fmt.Sprint("10.96.1.", i), 0, func(s *v1.Service) { s.Spec.ExternalIPs = []string{"10.96.0.1"} }))
			parts = append(parts, slice(name, endpoint("10.244.0.9", "w1", true, true, false)))
		}
		const key = "10.96.0.1 . tcp . 80"
		alone, r := render(Compute([]*v1.Service{victim}, parts[:1], Place{Node: "w1"})), render(Compute(services, parts, Place{Node: "w1"}))
		if got, want := pictureOf(asUDP(Compute(services, parts, Place{Node: "w1"}))), pictureOf(asUDP(Compute(services[:1], parts[:1], Place{Node: "w1"}))); !maps.Equal(
			got[netip.MustParseAddrPort("10.96.0.1:80")], want[netip.MustParseAddrPort("10.96.0.1:80")]) {
			t.Errorf("flows of the address would be judged by %v, want %v", got, want)
		}
		if r.services[key] != alone.services[key] || r.refused[key] != alone.refused[key] {
			t.Errorf("with endpoints %v: %q and %q, alone %q and %q", ready, r.services[key], r.refused[key], alone.services[key], alone.refused[key])
		}
	}
}

// asUDP is the same model for the other protocol.
func asUDP(m Model) Model {
	out := Model{}
	for id, p := range m {
		p.Proto = "udp"
		out[id] = p
	}
	return out
}
