package proxy

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/fake"
	"keelson.dev/keelson/agent/proxy/proxytest"
	"keelson.dev/keelson/agent/proxy/servicemodel"
	"keelson.dev/keelson/internal/agentport"
	"keelson.dev/keelson/test/testenv/space"
)

// hostileReservation is a cluster with a replica and an agent on one machine (10.89.0.11), a
// replica alone (10.89.0.12), a worker (10.89.0.102) and this node.
func hostileReservation() servicemodel.ReservedInputs {
	addr, prefix := netip.MustParseAddr, netip.MustParsePrefix
	return servicemodel.ReservedInputs{Cluster: agent.Cluster{ClusterCIDR: "10.244.0.0/16",
		ServiceCIDR: "10.96.0.0/16"},
		Node: &v1.Node{Status: v1.NodeStatus{Addresses: []v1.NodeAddress{{Type: v1.NodeExternalIP,
			Address: "198.51.100.1"}}}},
		Peers: []*agent.Peer{{Name: "cp1", PodCIDRs: []netip.Prefix{prefix("10.250.1.0/24")},
			Addresses: []netip.Addr{addr("10.89.0.11"), addr("fd00:89::11")}},
			{Name: "w2", PodCIDRs: []netip.Prefix{prefix("10.244.2.0/24")},
				Addresses: []netip.Addr{addr("10.89.0.102")}}},
		Own: []netip.Addr{addr("10.89.0.101")},
		Replicas: []netip.AddrPort{netip.MustParseAddrPort("10.89.0.11:6443"),
			netip.MustParseAddrPort("10.89.0.11:6444"),
			netip.MustParseAddrPort("10.89.0.12:6443"), netip.MustParseAddrPort("10.89.0.12:6445")},
		Listens: []agentport.Port{{Proto: "tcp", Number: 10350}}}
}

// F117: no external address or node port is served where a replica or an agent listens, or in the
// cluster's ranges. Other ports of machines are served.
func TestReservedFrontends(t *testing.T) {
	for _, c := range []struct {
		at       string
		proto    string
		serves   bool
		detached bool // without a session for a minute
		ipvs     bool
	}{
		{"192.0.2.1:6443", "tcp", true, true, true},
		{"10.89.0.11:6443", "tcp", false, false, false},
		{"10.89.0.11:6444", "tcp", false, false, false},
		{"10.89.0.11:6443", "udp", true, false, false},
		{"[fd00:89::11]:6444", "tcp", false, false, false}, // the same machine
		{"10.89.0.12:6443", "tcp", false, false, false},
		{"10.89.0.12:6445", "tcp", false, false, false},
		{"10.89.0.12:80", "tcp", true, false, false},
		{"10.89.0.102:443", "tcp", true, true, false},
		{"10.89.0.102:6443", "tcp", true, true, false},
		{"10.89.0.102:10250", "tcp", false, false, false},
		{"10.89.0.102:10256", "tcp", false, false, false},
		{"10.89.0.102:4789", "udp", false, false, false},
		{"10.89.0.102:51871", "udp", false, false, false},
		{"10.89.0.101:80", "tcp", true, true, true},
		{"10.89.0.101:10350", "tcp", false, false, false},
		{"198.51.100.1:10250", "tcp", false, false, false},
		{"10.244.7.7:8080", "tcp", false, false, false},
		{"10.250.1.7:8080", "tcp", false, false, false},
		{"10.96.0.10:53", "udp", false, false, false},
		{"0.0.0.0:30080", "tcp", true, true, true},
		{"0.0.0.0:10250", "tcp", false, false, false},
		{"0.0.0.0:6443", "tcp", true, true, true}, // no replica on this machine
	} {
		at := netip.MustParseAddrPort(c.at)
		f := servicemodel.Frontend{IP: at.Addr(), Proto: c.proto, Port: int32(at.Port())}
		x := hostileReservation()
		if got := x.ComputeReserved().AllowsFrontend(f); got != c.serves {
			t.Errorf("%s/%s is served: %v, want %v", c.at, c.proto, got, c.serves)
		}
		x.Detached = true
		if got := x.ComputeReserved().AllowsFrontend(f); got != c.detached {
			t.Errorf("without a session: %s/%s is served: %v, want %v", c.at, c.proto, got, c.detached)
		}
		x.Detached, x.Whole = false, true
		if got := x.ComputeReserved().AllowsFrontend(f); got != c.ipvs {
			t.Errorf("in mode ipvs: %s/%s is served: %v, want %v", c.at, c.proto, got, c.ipvs)
		}
	}
	x := hostileReservation()
	x.Own = append(x.Own, netip.MustParseAddr("10.89.0.12"))
	if x.ComputeReserved().AllowsFrontend(servicemodel.Frontend{IP: netip.IPv4Unspecified(),
		Proto: "tcp", Port: 6443}) {
		t.Error("a node port is served where a replica of the same machine listens")
	}
}

// hostile returns a Service that lists the addresses in every possible field, and a regular
// Service.
func hostile(addresses ...string) []*v1.Service {
	bad := proxytest.Service("bad", "10.96.0.66", 30066, func(s *v1.Service) {
		s.Spec.Type = v1.ServiceTypeLoadBalancer
		s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: "api", Port: 6443, NodePort: 30067,
			Protocol: v1.ProtocolTCP})
		s.Spec.ExternalIPs = addresses[:len(addresses)/2]
		for _, a := range addresses[len(addresses)/2:] {
			s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, v1.LoadBalancerIngress{IP: a})
		}
		s.Spec.LoadBalancerSourceRanges = []string{"198.51.100.0/24"}
	})
	return []*v1.Service{bad, proxytest.Service("good", "10.96.0.10", 0, func(s *v1.Service) {
		s.Spec.ExternalIPs = []string{"10.89.0.12", "192.0.2.1"}
	})}
}

// F117 F118: no writer writes rules for a reserved address, whichever field lists it. Rules for a
// frontend that becomes reserved are removed, and no others. After a minute without a session, the
// rules for addresses of replicas are removed.
func TestNoWriterServesReservedAddresses(t *testing.T) {
	services := hostile("10.244.7.7", "10.96.0.99", "169.254.20.10", "10.250.1.9", "10.96.0.98", "10.89.0.11")
	bad := proxytest.Service("wide", "10.96.0.67", 0, func(s *v1.Service) {
		s.Spec.ExternalIPs = []string{"10.89.0.11"}
		s.Spec.Ports[0].Port = 6443
	})
	m := servicemodel.NewModel(testPlace)
	m.SetReserved(hostileReservation().ComputeReserved())
	m.Replace(append(services, bad), nil)
	for _, name := range []string{"bad", "good", "wide"} {
		part := proxytest.Slice(name, proxytest.Endpoint("10.244.0.2", "w1", true, true, false))
		m.SetSlice(types.NamespacedName{Namespace: "default", Name: part.Name}, part)
	}
	changes := m.UpdatePorts()
	n, dump := onFakes(nftDialect)
	ipt, text := inMemory()
	vs := newFakeIPVS()
	beside, besideDump := onFakes(tableDialect{ipvsTable, ipvsSkeleton, renderForIPVS})
	writers := []Writer{n, ipt, vs, beside}
	shows := func() map[string]string {
		return map[string]string{"nft": dump(), "iptables": text(), "ipvs": vs.kernel.text(),
			"beside ipvs": besideDump()}
	}
	base := testBase
	base.ServiceCIDRs, base.PodCIDRs = base.ServiceCIDRs[:1], base.PodCIDRs[:1]
	for _, w := range writers {
		if err := w.Sync(t.Context(), base, maps.Values(map[string]*servicemodel.Port{})); err != nil {
			t.Fatal(err)
		}
		if err := w.Apply(t.Context(), changes); err != nil {
			t.Fatal(err)
		}
	}
	expect := func(when string, served, unserved []string) {
		t.Helper()
		for writer, all := range shows() {
			for _, ip := range unserved {
				if strings.Contains(all, ip) {
					t.Errorf("%s: %s serves %s:\n%s", when, writer, ip, all)
				}
			}
			for _, ip := range served {
				if writer != "beside ipvs" && !strings.Contains(all, ip) {
					t.Errorf("%s: %s does not serve %s", when, writer, ip)
				}
			}
		}
	}
	// 10.89.0.11:80 is a port of a machine that nothing of the cluster uses.
	never := []string{"10.244.7.7", "10.96.0.99", "169.254.20.10", "10.250.1.9", "10.96.0.98",
		"10.89.0.11 . tcp . 6443", "10.89.0.11/32 -p tcp -m tcp --dport 6443", "10.89.0.11 tcp 6443"}
	expect("with a session", []string{"10.89.0.11", "10.89.0.12", "192.0.2.1", "10.96.0.66", "10.96.0.10"}, never)
	reserve := func(change func(*servicemodel.ReservedInputs)) {
		x := hostileReservation()
		change(&x)
		m.SetReserved(x.ComputeReserved())
		changes := m.UpdatePorts()
		for _, w := range writers {
			if err := w.Apply(t.Context(), changes); err != nil {
				t.Fatal(err)
			}
		}
	}
	reserve(func(x *servicemodel.ReservedInputs) { x.Detached = true })
	expect("without a session", []string{"192.0.2.1", "10.96.0.66", "10.96.0.10"},
		append([]string{"10.89.0.11", "10.89.0.12"}, never...))
	reserve(func(*servicemodel.ReservedInputs) {})
	expect("with a session again", []string{"10.89.0.11", "10.89.0.12", "192.0.2.1"}, never)
	reserve(func(x *servicemodel.ReservedInputs) {
		x.Replicas = append(x.Replicas, netip.MustParseAddrPort("192.0.2.1:80"))
	})
	for writer, all := range shows() {
		if strings.Contains(all, "192.0.2.1") {
			t.Errorf("%s serves the address of a replica that is new:\n%s", writer, all)
		}
	}
}

// plane is the control plane as the proxy sees it.
type plane struct {
	replicas []netip.AddrPort
	silent   time.Duration
}

func (p *plane) ReplicaAddresses() []netip.AddrPort { return p.replicas }
func (p *plane) Disconnected() time.Duration        { return p.silent }

// F117: the proxy reserves the machines of the view and of the session.
func TestProxyReservesMachines(t *testing.T) {
	objects := fake.NewCluster()
	objects.About.ServiceCIDR, objects.About.ClusterCIDR = "10.96.0.0/16", "10.244.0.0/16"
	objects.Put(proxytest.Service("web", "10.96.0.10", 0, func(s *v1.Service) {
		s.Spec.ExternalIPs = []string{"10.89.0.12", "10.89.0.102", "192.0.2.1"}
		s.Spec.Ports[0].Port = 10250
	}), proxytest.Slice("web", proxytest.Endpoint("10.244.0.2", "w1", true, true, false)))
	control := &plane{replicas: []netip.AddrPort{netip.MustParseAddrPort("10.89.0.12:6443")}}
	p := &Proxy{Node: "w1", ControlPlane: control, Log: slog.New(slog.DiscardHandler)}
	r := &recorder{}
	s := newState(r, "w1")
	external := func(c agent.ObjectChanges) string {
		t.Helper()
		if err := p.applyChanges(t.Context(), s, objects, objects, c); err != nil {
			t.Fatal(err)
		}
		var out []string
		for _, port := range r.ports {
			for _, f := range port.External {
				out = append(out, f.IP.String())
			}
		}
		return strings.Join(out, " ")
	}
	if got := external(agent.ObjectChanges{All: true}); got != "10.89.0.12 10.89.0.102 192.0.2.1" {
		t.Errorf("at first %q", got)
	}
	objects.Put(&agent.Peer{Name: "w2", Addresses: []netip.Addr{netip.MustParseAddr("10.89.0.102")}})
	if got := external(agent.ObjectChanges{Revision: 2,
		Keys: map[agent.ObjectKey]struct{}{{Kind: "Peer", Name: "w2"}: {}}}); got != "10.89.0.12 192.0.2.1" {
		t.Errorf("with the node %q", got)
	}
	control.replicas = append(control.replicas, netip.MustParseAddrPort("192.0.2.1:10250"))
	if got := external(agent.ObjectChanges{Revision: 3}); got != "10.89.0.12" { // any object may have changed
		t.Errorf("with a new replica %q", got)
	}
	control.replicas = control.replicas[:1]
	control.silent = disconnectedAfter - time.Second
	if got := external(agent.ObjectChanges{}); got != "10.89.0.12 192.0.2.1" {
		t.Errorf("shortly without a session %q", got)
	}
	control.silent = disconnectedAfter
	if got := external(agent.ObjectChanges{}); got != "192.0.2.1" {
		t.Errorf("without a session %q", got)
	}
	control.silent = 0
	if got := external(agent.ObjectChanges{}); got != "10.89.0.12 192.0.2.1" {
		t.Errorf("with a session again %q", got)
	}
}

// F117: in the kernel, a hostile Service captures no traffic of a pod, of its Service, or of a
// replica; other ports of the replica's machine work. The agent's own connections reach a replica
// through any rule; those of other programs do not.
func TestKernelKeepsReservedAddresses(t *testing.T) {
	for mode, program := range map[Mode]string{ModeNFTables: "nft", ModeIPTables: "iptables"} {
		t.Run(string(mode), func(t *testing.T) {
			if _, err := exec.LookPath(program); err != nil {
				t.Skip("needs " + program)
			}
			town := newTown(t)
			serve(t, town.clients["outside"], "tcp4", "0.0.0.0:6443", "replica")
			w, err := NewWriter(mode)
			if err != nil {
				t.Fatal(err)
			}
			m := servicemodel.NewModel(servicemodel.Location{Node: "w1"})
			services := hostile("10.244.0.6", "10.96.0.99", outsideV4, "10.244.0.6", "10.96.0.99", outsideV4)
			services[0].Spec.LoadBalancerSourceRanges = nil
			services[0].Spec.Ports = append(services[0].Spec.Ports,
				v1.ServicePort{Name: "pods", Port: 8080, Protocol: v1.ProtocolTCP})
			evil := proxytest.Slice("bad", proxytest.Endpoint("10.244.0.2", "w1", true, true, false))
			for _, name := range []string{"api", "pods"} {
				evil.Ports = append(evil.Ports, evil.Ports[0])
				evil.Ports[len(evil.Ports)-1].Name = &name
			}
			m.Replace(append(services, proxytest.Service("victim", "10.96.0.11", 0)),
				sliceList(evil, proxytest.Slice("victim", proxytest.Endpoint("10.244.0.6", "w1", true, true, false))))
			base := testBase
			do := func(f func() error) {
				t.Helper()
				if err := space.In(town.node, f); err != nil {
					t.Fatal(err)
				}
			}
			do(func() error { return routeServices(base) })
			write := func(r *servicemodel.Reserved) {
				m.SetReserved(r)
				m.UpdatePorts()
				do(func() error { return w.Sync(t.Context(), base, maps.Values(m.Ports())) })
			}
			ask := func(client, address string, mark bool) (answer string) {
				_ = space.In(town.clients[client], func() error {
					d := net.Dialer{Timeout: 10 * time.Second}
					if mark {
						d.Control = agent.MarkReplicaConn
					}
					answer = askWith(t.Context(), d, address)
					return nil
				})
				return answer
			}
			x := hostileReservation()
			x.Replicas = []netip.AddrPort{netip.MustParseAddrPort(outsideV4 + ":6443")}
			write(x.ComputeReserved())
			for _, client := range []string{"node", "a"} {
				for address, want := range map[string]string{"10.244.0.6:8080": "b", "10.96.0.11:80": "b",
					outsideV4 + ":6443": "replica", outsideV4 + ":80": "a"} {
					if got := ask(client, address, false); got != want {
						t.Errorf("from %s: %s answers at %s, want %s", client, got, address, want)
					}
				}
			}
			write(nil) // as if the replica were unknown
			if got := ask("node", outsideV4+":6443", false); got != "a" {
				t.Errorf("nothing is reserved: %s answers, want the endpoint", got)
			}
			if got := ask("node", outsideV4+":6443", true); got != "replica" {
				t.Errorf("the agent's own connection: %s answers, want the replica", got)
			}
			m.Replace(services, nil) // rules that reject are Service rules as well
			write(nil)
			if got := ask("node", outsideV4+":6443", true); got != "replica" {
				t.Errorf("the agent's own connection where the Service has no endpoint: %s answers, want the replica",
					got)
			}
			do(func() error { return w.Clean(t.Context()) })
		})
	}
}

// askWith returns the name of the server that responds, or the error.
func askWith(ctx context.Context, d net.Dialer, address string) string {
	c, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		return err.Error()
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	buf := make([]byte, 100)
	n, err := c.Read(buf)
	if name, _, ok := strings.Cut(string(buf[:n]), " "); ok {
		return name
	}
	return fmt.Sprint(errors.Join(errors.New("no answer"), err))
}

// F117: the memory for external addresses grows with their number times the number of ports, but
// not with the number of endpoints.
func TestExternalAddressesKeepEndpointsOnce(t *testing.T) {
	elements := func(addresses, ports, endpoints int) int {
		svc, part := manyPairs("web", 0, addresses, ports)
		part.Endpoints = nil
		for i := range endpoints {
			part.Endpoints = append(part.Endpoints,
				proxytest.Endpoint(fmt.Sprintf("10.244.%d.%d", i/200, 1+i%200), "w2", true, true, false))
		}
		m := servicemodel.Compute([]*v1.Service{svc}, sliceList(part), testPlace)
		n, dump := onFakes(nftDialect)
		if err := n.Sync(t.Context(), testBase, maps.Values(m.Ports())); err != nil {
			t.Fatal(err)
		}
		return strings.Count(dump(), "\nadd element ")
	}
	for _, test := range []struct{ addresses, ports int }{{20, 1}, {8, 20}} {
		few, many := elements(test.addresses, test.ports, 1), elements(test.addresses, test.ports, 20)
		// The cluster address of each port has its endpoints in a map.
		if grown, most := many-few, 20*test.ports+20; grown > most {
			t.Errorf("%d addresses, %d ports: %d elements with 1 endpoint, %d with 20; want at most %d more",
				test.addresses, test.ports, few, many, most)
		}
	}
}

// F117 F118: a Service with many external addresses and several ports works at each of them, even
// while their number and the endpoints change.
func TestManyExternalAddressesInTheKernel(t *testing.T) {
	for mode, program := range map[Mode]string{ModeNFTables: "nft", ModeIPTables: "iptables"} {
		t.Run(string(mode), func(t *testing.T) {
			if _, err := exec.LookPath(program); err != nil {
				t.Skip("needs " + program)
			}
			manyExternalAddresses(t, mode)
		})
	}
}

func manyExternalAddresses(t *testing.T, mode Mode) {
	town := newTown(t)
	do := func(f func() error) {
		t.Helper()
		if err := space.In(town.node, f); err != nil {
			t.Fatal(err)
		}
	}
	do(func() error { return routeServices(testBase) })
	w, err := NewWriter(mode)
	if err != nil {
		t.Fatal(err)
	}
	m := servicemodel.NewModel(servicemodel.Location{Node: "w1"})
	do(func() error { return w.Sync(t.Context(), testBase, maps.Values(m.Ports())) })
	key := types.NamespacedName{Namespace: "default", Name: "web"}
	for _, local := range []bool{false, true} {
		for _, n := range []int{servicemodel.MaxMappedFrontends, servicemodel.MaxMappedFrontends + 4, 2} {
			for _, pods := range [][]string{{"a"}, {"a", "b", "c"}, nil} {
				svc := proxytest.Service("web", "10.96.0.10", 30080, func(s *v1.Service) {
					for i := range n {
						s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, fmt.Sprintf("192.0.2.%d", 1+i),
							fmt.Sprintf("2001:db8::%d", 1+i))
					}
					s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: "second", Port: 81},
						v1.ServicePort{Name: "third", Port: 82})
					s.Spec.Type, s.Spec.ClusterIPs = v1.ServiceTypeNodePort, []string{"10.96.0.10", "fd00:96::10"}
					if local {
						s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal
					}
				})
				part, six := proxytest.Slice("web"), proxytest.Slice("web")
				six.Name, six.AddressType = "web-6", discoveryv1.AddressTypeIPv6
				for _, p := range pods {
					part.Endpoints = append(part.Endpoints,
						proxytest.Endpoint(dwellers[p].v4, dwellers[p].node, true, true, false))
					six.Endpoints = append(six.Endpoints,
						proxytest.Endpoint(dwellers[p].v6, dwellers[p].node, true, true, false))
				}
				for _, name := range []string{"second", "third"} {
					part.Ports = append(part.Ports, discoveryv1.EndpointPort{Name: &name, Port: part.Ports[0].Port})
				}
				m.SetService(key, svc)
				six.Ports = part.Ports
				m.SetSlice(types.NamespacedName{Namespace: "default", Name: part.Name}, part)
				m.SetSlice(types.NamespacedName{Namespace: "default", Name: six.Name}, six)
				changes := m.UpdatePorts()
				do(func() error { return w.Apply(t.Context(), changes) })
				do(func() error {
					ok, err := w.Intact(t.Context())
					if err == nil && !ok {
						err = errors.New("the kernel does not show what was written")
					}
					return err
				})
				for _, kind := range []string{"external", "cluster", "node port"} {
					for _, address := range map[string][]string{"external": {"192.0.2.1:80", "192.0.2.2:81",
						fmt.Sprintf("192.0.2.%d:82", n),
						"[2001:db8::1]:80", fmt.Sprintf("[2001:db8::%d]:82", n)}, "cluster": {"10.96.0.10:80"},
						"node port": {nodeV4 + ":30080"}}[kind] {
						for _, client := range []string{"node", "outside"} {
							if kind == "cluster" && client == "outside" {
								continue
							}
							want := oracle(svc, map[string]*discoveryv1.EndpointSlice{"web": part, "web-6": six},
								client, kind, address[0] == '[')
							if err := try(town.clients[client], address, want); err != nil {
								t.Errorf("%d addresses, pods %v, local %v: from %s to %s: %v, want %s", n, pods, local,
									client, address, err, want)
							}
						}
					}
				}
				do(func() error {
					counts, err := w.Counts(t.Context())
					of := map[bool]map[servicemodel.Frontend]uint64{true: counts.Connections,
						false: counts.Unserved}[len(pods) > 0]
					if err == nil && countsByPort(m.Ports(), of)[countLabels{"default/web:second", "tcp", "outside"}] ==
						0 {
						err = fmt.Errorf("%d addresses, pods %v: packets to the second port are not counted: %v", n,
							pods, of)
					}
					return err
				})
			}
		}
	}
	do(func() error { return w.Clean(t.Context()) })
}
