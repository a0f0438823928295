package proxy

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"keelson.dev/keelson/agent/proxy/proxytest"
	"keelson.dev/keelson/agent/proxy/servicemodel"
	"keelson.dev/keelson/test/testenv/space"
)

// manyPairs returns a Service with many pairs of an external address and a port, and its
// EndpointSlice.
func manyPairs(name string, i, addresses, ports int, change ...func(*v1.Service)) (
	*v1.Service, *discoveryv1.EndpointSlice,
) {
	part := proxytest.Slice(name, proxytest.Endpoint("10.244.0.2", "w1", true, true, false),
		proxytest.Endpoint("10.244.1.2", "w2", true, true, false))
	part.Ports = nil
	svc := proxytest.Service(name, fmt.Sprint("10.96.0.", 10+i), 0, func(s *v1.Service) {
		s.Spec.Ports = nil
		for n := range ports {
			port, target := fmt.Sprint("p", n), int32(8080)
			s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: port, Port: int32(20000 + n),
				Protocol: v1.ProtocolTCP})
			part.Ports = append(part.Ports, discoveryv1.EndpointPort{Name: &port, Port: &target})
		}
		for n := range addresses {
			s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, fmt.Sprintf("203.0.%d.%d", 100+i, 1+n))
		}
		for _, f := range change {
			f(s)
		}
	})
	return svc, part
}

// balancedPairs turns the external addresses of a Service into those of a load balancer with source
// ranges.
func balancedPairs(ranges int) func(*v1.Service) {
	return func(s *v1.Service) {
		s.Spec.Type = v1.ServiceTypeLoadBalancer
		for _, ip := range s.Spec.ExternalIPs {
			s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, v1.LoadBalancerIngress{IP: ip})
		}
		s.Spec.ExternalIPs = nil
		for n := range ranges {
			s.Spec.LoadBalancerSourceRanges = append(s.Spec.LoadBalancerSourceRanges,
				fmt.Sprintf("198.51.%d.%d/32", n/128, 2*(n%128)))
		}
	}
}

// localPairs sets externalTrafficPolicy Local.
func localPairs(s *v1.Service) { s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal }

// size is the size of all rules of a writer.
type size struct{ rules, chains, bytes int }

// sizeOf returns the size of the rules of a model in a mode, written in memory.
func sizeOf(t testing.TB, m *servicemodel.Model, mode Mode) (out size) {
	t.Helper()
	ipt, text := inMemory()
	w := Writer(ipt)
	if mode == ModeNFTables {
		w, text = onFakes(nftDialect)
	}
	if err := w.Sync(context.Background(), testBase, maps.Values(m.Ports())); err != nil {
		t.Fatal(err)
	}
	saved := text()
	out.bytes = len(saved)
	for line := range strings.SplitSeq(saved, "\n") {
		switch {
		case mode == ModeNFTables && strings.HasPrefix(line, "add rule"):
			out.rules += 1 + strings.Count(line, ", ") // members of an anonymous set or map count too
		case mode == ModeNFTables && strings.HasPrefix(line, "add chain"):
			out.chains++
		case mode == ModeNFTables:
		case strings.HasPrefix(line, "  "):
			out.rules++
		default:
			out.chains++
		}
	}
	return out
}

// F117 F118: the number of rules for external addresses, ports and source ranges of a Service is
// their sum rather than their product, for every kind of Service.
func TestRulesAreNoProduct(t *testing.T) {
	const addresses, ports, ranges = 64, 16, 100
	elsewhere := func(part *discoveryv1.EndpointSlice) *discoveryv1.EndpointSlice {
		part.Endpoints = part.Endpoints[1:]
		return part
	}
	for name, test := range map[string]struct {
		change []func(*v1.Service)
		parts  func(*discoveryv1.EndpointSlice) []*discoveryv1.EndpointSlice
	}{
		"served": {nil, func(p *discoveryv1.EndpointSlice) []*discoveryv1.EndpointSlice {
			return sliceList(p)
		}},
		"no endpoints": {nil, func(*discoveryv1.EndpointSlice) []*discoveryv1.EndpointSlice {
			return nil
		}},
		"local policy": {[]func(*v1.Service){localPairs},
			func(p *discoveryv1.EndpointSlice) []*discoveryv1.EndpointSlice { return sliceList(p) }},
		"local, endpoint elsewhere": {[]func(*v1.Service){localPairs},
			func(p *discoveryv1.EndpointSlice) []*discoveryv1.EndpointSlice { return sliceList(elsewhere(p)) }},
		"load balancer with ranges": {[]func(*v1.Service){balancedPairs(ranges)},
			func(p *discoveryv1.EndpointSlice) []*discoveryv1.EndpointSlice { return sliceList(p) }},
	} {
		t.Run(name, func(t *testing.T) {
			svc, part := manyPairs("bomb", 0, addresses, ports, test.change...)
			m := servicemodel.Compute([]*v1.Service{svc}, test.parts(part), testPlace)
			if n := pairsOf(m.Ports()); n != addresses*ports {
				t.Fatalf("%d pairs, want %d", n, addresses*ports)
			}
			// An address has one rule in each of at most two tables; a port has few rules and chains.
			const most = 100 + 2*addresses + 10*ports + ranges
			for _, mode := range []Mode{ModeIPTables, ModeNFTables} {
				if in := sizeOf(t, m, mode); in.rules > most || in.chains > 100+5*ports {
					t.Errorf("%s: %d rules and %d chains for %d addresses and %d ports, want at most %d and %d", mode,
						in.rules, in.chains, addresses, ports, most, 100+5*ports)
				}
			}
		})
	}
}

// F117 F118: the number of rules is not a product either if other Services hold a few pairs, so
// that no address has all ports.
func TestContestedPairsAreNoProduct(t *testing.T) {
	svc, part := manyPairs("bomb", 0, 64, 64)
	services := []*v1.Service{svc}
	for bit := range 6 {
		other, _ := manyPairs(fmt.Sprint("other", bit), 0, 64, 64)
		other.Spec.ClusterIP, other.Spec.ClusterIPs = fmt.Sprint("10.96.0.", 100+bit), nil
		other.Spec.Ports = other.Spec.Ports[2*bit : 2*bit+2]
		other.Spec.ExternalIPs = nil
		for i, ip := range svc.Spec.ExternalIPs {
			if i>>bit&1 == 1 {
				other.Spec.ExternalIPs = append(other.Spec.ExternalIPs, ip)
			}
		}
		services = append(services, other)
	}
	m := servicemodel.Compute(services, sliceList(part), testPlace)
	lost := 64*64 + 6*32*2 - pairsOf(m.Ports())
	w, _ := inMemory()
	if err := w.Sync(t.Context(), testBase, maps.Values(m.Ports())); err != nil {
		t.Fatal(err)
	}
	if err := resolvesAll(w, m.Ports()); err != nil {
		t.Error(err)
	}
	if in, most := sizeOf(t, m, ModeIPTables), 100+7*64+10*(64+12)+lost; in.rules > most {
		t.Errorf("%d rules where Services contest %d pairs, want at most %d", in.rules, lost, most)
	}
}

// pairsOf returns the number of pairs of an external address and a port.
func pairsOf(ports map[string]*servicemodel.Port) (n int) {
	for _, p := range ports {
		n += len(p.External)
	}
	return n
}

// resolvesAll follows the iptables rules for each pair of an address and a port number of all
// Ports. It returns an error for a pair that does not end at the target of its Port, or that ends
// at a target although no Port has it.
func resolvesAll(w *iptables, ports map[string]*servicemodel.Port) error {
	for _, t := range w.tables {
		rules, err := t.readRules(context.Background())
		if err != nil {
			return err
		}
		want := map[string]map[servicemodel.Frontend]string{"nat": {}, "filter": {}, "mangle": {}}
		addresses, numbers := map[servicemodel.Frontend]bool{}, map[servicemodel.Frontend]bool{}
		for _, p := range ports {
			if p.V6 != t.v6 {
				continue
			}
			to, refusal := iptExternalTargets(p)
			for _, at := range p.External {
				if at.IsNodePort() {
					continue
				}
				addresses[servicemodel.Frontend{IP: at.IP}], numbers[servicemodel.Frontend{Proto: at.Proto,
					Port: at.Port}] = true, true
				want["nat"][at], want["filter"][at] = to, refusal
			}
			for _, at := range p.Guarded {
				want["mangle"][at] = "KEELSON-FW-" + servicemodel.ShortHash(p.ServiceName())
			}
			for _, at := range p.Internal { // may be an external address too
				addresses[servicemodel.Frontend{IP: at.IP}], numbers[servicemodel.Frontend{Proto: at.Proto,
					Port: at.Port}] = true, true
				if want["nat"][at] = "KEELSON-SVC-" + p.ID; len(p.Backends.Cluster) == 0 {
					want["nat"][at], want["filter"][at] = "", iptRefusal(noBackendVerdict(p.StayInside, p))
				}
			}
		}
		for table, shared := range map[string]string{"nat": chainServices, "filter": chainRefusals,
			"mangle": chainGuard} {
			for a := range addresses {
				for n := range numbers {
					at := servicemodel.Frontend{IP: a.IP, Proto: n.Proto, Port: n.Port}
					if got := resolve(rules, table, shared, at); got != want[table][at] {
						return fmt.Errorf("%s: %v leads to %q, want %q", table, at, got, want[table][at])
					}
				}
			}
		}
	}
	return nil
}

// resolve follows the rules of a chain for a packet to a frontend. It returns the first target that
// is not a chain of addresses, or "" if no rule matches.
func resolve(rules map[string][]string, table, chain string, at servicemodel.Frontend) string {
	for _, rule := range rules[table+" "+chain] {
		words := strings.Fields(rule)[2:]
		matches := true
		for i := 0; i+1 < len(words); i++ {
			switch words[i] {
			case "-d":
				matches = matches && words[i+1] == netip.PrefixFrom(at.IP, at.IP.BitLen()).String()
			case "-p":
				matches = matches && words[i+1] == at.Proto
			case "--dport":
				matches = matches && words[i+1] == fmt.Sprint(at.Port)
			case "--mark":
				matches = false // the agent's own connections
			}
		}
		to := words[len(words)-1]
		switch {
		case !matches:
		case to == "RETURN":
			return ""
		case !strings.HasPrefix(to, chainAddress):
			return to
		default:
			if end := resolve(rules, table, to, at); end != "" {
				return end
			}
		}
	}
	return ""
}

// BenchmarkManyPairs writes the largest Services that the API accepts into the kernel: one with
// 4,080 pairs of an external address and a port, and a namespace with 16,320.
func BenchmarkManyPairs(b *testing.B) {
	if os.Geteuid() != 0 {
		b.Skip("needs root for network namespaces")
	}
	for _, shape := range []struct{ services, addresses, ports int }{{1, 240, 17}, {1, 8, 500}, {4, 240, 17}} {
		var services []*v1.Service
		var parts, fewer []*discoveryv1.EndpointSlice
		for i := range shape.services {
			s, p := manyPairs(fmt.Sprint("s", i), i, shape.addresses, shape.ports)
			services, parts = append(services, s), append(parts, p)
			less := p.DeepCopy()
			less.Endpoints = less.Endpoints[:1]
			fewer = append(fewer, less)
		}
		for _, mode := range []Mode{ModeNFTables, ModeIPTables} {
			b.Run(fmt.Sprintf("%s/%dx%dx%d", mode, shape.services, shape.addresses, shape.ports), func(b *testing.B) {
				m := servicemodel.Compute(services, parts, testPlace)
				in := sizeOf(b, m, mode)
				node := space.New(b)
				var sync, apply, intact time.Duration
				for b.Loop() {
					m := servicemodel.Compute(services, parts, testPlace)
					w, err := NewWriter(mode)
					if err != nil {
						b.Fatal(err)
					}
					if err := space.In(node, func() error {
						begin := time.Now()
						if err := w.Sync(context.Background(), testBase, maps.Values(m.Ports())); err != nil {
							return err
						}
						sync += time.Since(begin)
						begin = time.Now()
						m.Replace(services, fewer)
						if err := w.Apply(context.Background(), m.UpdatePorts()); err != nil {
							return err
						}
						apply += time.Since(begin)
						begin = time.Now()
						if ok, err := w.Intact(context.Background()); !ok || err != nil {
							return fmt.Errorf("the rules are not as they were written: %w", err)
						}
						intact += time.Since(begin)
						return w.Clean(context.Background())
					}); err != nil {
						b.Fatal(err)
					}
				}
				b.ReportMetric(float64(in.rules), "rules")
				b.ReportMetric(float64(in.chains), "chains")
				b.ReportMetric(float64(in.bytes), "bytes")
				b.ReportMetric(sync.Seconds()*1000/float64(b.N), "sync-ms")
				b.ReportMetric(apply.Seconds()*1000/float64(b.N), "apply-ms")
				b.ReportMetric(intact.Seconds()*1000/float64(b.N), "intact-ms")
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}
