package proxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent/proxy/proxytest"
	"keelson.dev/keelson/agent/proxy/servicemodel"
	"keelson.dev/keelson/test/testenv/space"
)

// town is a node with its own pods, pods of another node, and a client outside, in both address
// families.
type town struct {
	node    netns.NsHandle
	clients map[string]netns.NsHandle // "node", "a" (a pod of the node), "outside"
}

// dwellers are the pods with their node and addresses.
var dwellers = map[string]struct{ node, v4, v6 string }{
	"a": {"w1", "10.244.0.2", "fd00:10::2"}, "b": {"w1", "10.244.0.6", "fd00:10::6"},
	"c": {"w2", "10.244.1.2", "fd00:10::a"},
}

const (
	nodeV4, nodeV6       = "10.89.0.101", "fd00:89::101"
	outsideV4, outsideV6 = "10.89.0.7", "fd00:89::7"
)

func newTown(t *testing.T) town {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root for network namespaces")
	}
	out := town{node: space.New(t), clients: map[string]netns.NsHandle{}}
	if err := space.In(out.node, func() error {
		return errors.Join(os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0),
			os.WriteFile("/proc/sys/net/ipv6/conf/all/forwarding", []byte("1"), 0))
	}); err != nil {
		t.Fatal(err)
	}
	for _, name := range slices.Sorted(maps.Keys(dwellers)) {
		d := dwellers[name]
		ns := pod(t, out.node, name, d.v4, netip.MustParseAddr(d.v4).Prev().String())
		gateway := netip.MustParseAddr(d.v6).Prev()
		addr6(t, out.node, name, gateway.String()+"/126", "")
		addr6(t, ns, "eth0", d.v6+"/126", gateway.String())
		serve(t, ns, "tcp6", "[::]:8080", name)
		out.clients[name] = ns
	}
	outside := space.New(t)
	if err := space.In(out.node, func() error {
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "up"}, PeerName: "eth0",
			PeerNamespace: netlink.NsFd(int(outside))})
	}); err != nil {
		t.Fatal(err)
	}
	addr(t, out.node, "up", nodeV4+"/24", "")
	addr(t, outside, "eth0", outsideV4+"/24", nodeV4)
	addr6(t, out.node, "up", nodeV6+"/64", "")
	addr6(t, outside, "eth0", outsideV6+"/64", nodeV6)
	// The node has a default route, like a real node: a packet without a route never reaches the
	// rules.
	addr(t, out.node, "up", "10.90.0.101/24", outsideV4)
	addr6(t, out.node, "up", "fd00:90::101/64", outsideV6)
	out.clients["node"], out.clients["outside"] = out.node, outside
	delete(out.clients, "b")
	delete(out.clients, "c")
	return out
}

func addr6(t *testing.T, ns netns.NsHandle, link, cidr, gateway string) {
	t.Helper()
	if err := space.In(ns, func() error {
		l, err := netlink.LinkByName(link)
		if err != nil {
			return err
		}
		a, err := netlink.ParseAddr(cidr)
		if err != nil {
			return err
		}
		a.Flags = unix.IFA_F_NODAD
		if err := netlink.AddrAdd(l, a); err != nil || gateway == "" {
			return err
		}
		return netlink.RouteAdd(&netlink.Route{Gw: net.ParseIP(gateway), LinkIndex: l.Attrs().Index})
	}); err != nil {
		t.Fatalf("%s %s: %v", link, cidr, err)
	}
}

// serve responds with its name and the address at which it was reached.
func serve(t *testing.T, ns netns.NsHandle, network, address, name string) {
	t.Helper()
	eachConn(t, ns, network, address, func(c net.Conn) {
		fmt.Fprintf(c, "%s %s", name, c.RemoteAddr().(*net.TCPAddr).IP)
		c.Close()
	})
}

// eachConn listens in a namespace until the test ends, for one address family, and calls do for
// each connection.
func eachConn(t *testing.T, ns netns.NsHandle, network, address string, do func(net.Conn)) {
	t.Helper()
	var ln net.Listener
	lc := net.ListenConfig{Control: func(network, _ string, c syscall.RawConn) error {
		var err error
		if network == "tcp6" {
			_ = c.Control(func(fd uintptr) {
				err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1)
			})
		}
		return err
	}}
	if err := space.In(ns, func() (err error) {
		ln, err = lc.Listen(context.Background(), network, address)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			do(c)
		}
	}()
}

// expected is the expected result of a connection.
type expected struct {
	to     map[string]bool // pods, one of which responds
	drop   bool            // if to is empty: true = dropped, false = rejected
	source string          // the client's address as the pod sees it; "" = not checked
}

func (e expected) String() string {
	switch {
	case len(e.to) > 0:
		return fmt.Sprint("one of ", slices.Sorted(maps.Keys(e.to)), " seeing ", e.source)
	case e.drop:
		return "silence"
	}
	return "refusal"
}

// oracle returns the expected result for a client that connects to an address of a Service. It
// follows Kubernetes' documentation and does not use the model.
func oracle(svc *v1.Service, parts map[string]*discoveryv1.EndpointSlice, client, kind string, v6 bool) expected {
	family := discoveryv1.AddressTypeIPv4
	if v6 {
		family = discoveryv1.AddressTypeIPv6
	}
	all := map[string]map[string]bool{} // "ready", "ending", "ready here", "ending here" → pods
	for _, k := range []string{"ready", "ending", "ready here", "ending here"} {
		all[k] = map[string]bool{}
	}
	for _, part := range parts {
		if part.Labels[discoveryv1.LabelServiceName] != svc.Name || part.AddressType != family {
			continue
		}
		for _, e := range part.Endpoints {
			state := "ready"
			if !*e.Conditions.Ready {
				if state = "ending"; !*e.Conditions.Serving || !*e.Conditions.Terminating {
					continue
				}
			}
			for name, d := range dwellers {
				if e.Addresses[0] == d.v4 || e.Addresses[0] == d.v6 {
					all[state][name] = true
					if *e.NodeName == "w1" {
						all[state+" here"][name] = true
					}
				}
			}
		}
	}
	prefer := func(a, b map[string]bool) map[string]bool {
		if len(a) > 0 {
			return a
		}
		return b
	}
	anywhere, here := prefer(all["ready"], all["ending"]), prefer(all["ready here"], all["ending here"])
	anyEndpoint := len(all["ready"])+len(all["ending"]) > 0
	if kind == "cluster" {
		if p := svc.Spec.InternalTrafficPolicy; p != nil && *p == v1.ServiceInternalTrafficPolicyLocal {
			return expected{to: here, drop: anyEndpoint}
		}
		return expected{to: anywhere}
	}
	if kind == "balanced" && len(svc.Spec.LoadBalancerSourceRanges) > 0 && client != "outside" {
		return expected{drop: true} // the tests allow only the client outside
	}
	own := map[bool]string{false: outsideV4, true: outsideV6}[v6]
	if svc.Spec.ExternalTrafficPolicy != v1.ServiceExternalTrafficPolicyLocal {
		out := expected{to: anywhere}
		if client == "outside" {
			out.source = "node"
		}
		return out
	}
	if client != "outside" {
		return expected{to: anywhere, drop: anyEndpoint}
	}
	return expected{to: here, drop: anyEndpoint, source: own}
}

// try connects and returns an error if the result differs from the expected one.
func try(from netns.NsHandle, address string, want expected) error {
	limit := 10 * time.Second
	if len(want.to) == 0 && want.drop {
		limit = 100 * time.Millisecond // slower rejects are not noticed, so that a slow machine fails no test
	}
	var answer string
	err := space.In(from, func() error {
		c, err := (&net.Dialer{Timeout: limit}).Dial("tcp", address)
		if err != nil {
			return err
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(limit))
		raw, err := io.ReadAll(c)
		answer = string(raw)
		return err
	})
	var late net.Error
	switch {
	case len(want.to) > 0:
		f := strings.Fields(answer)
		if err != nil || len(f) != 2 || !want.to[f[0]] {
			return fmt.Errorf("%q, %v", answer, err)
		}
		seen := f[1]
		if want.source == "node" && (seen == outsideV4 || seen == outsideV6) ||
			want.source != "" && want.source != "node" && seen != want.source {
			return fmt.Errorf("the pod sees %s", seen)
		}
		return nil
	case err == nil:
		return fmt.Errorf("%q", answer)
	case want.drop && errors.As(err, &late) && late.Timeout(), want.drop && errors.Is(err, unix.EPERM):
		return nil // the output hook reports the error to a socket of the node itself
	case !want.drop && errors.Is(err, unix.ECONNREFUSED):
		return nil
	}
	return err
}

// F113 F116 F117 F118: random Services and endpoints, changed step by step. Each client tries each
// address and port in the kernel, and the result is that of Kubernetes' documentation.
func TestKernelAgainstOracle(t *testing.T) {
	for mode, program := range map[Mode]string{ModeNFTables: "nft", ModeIPTables: "iptables"} {
		t.Run(string(mode), func(t *testing.T) {
			if _, err := exec.LookPath(program); err != nil {
				t.Skip("needs " + program)
			}
			town := newTown(t)
			w, err := NewWriter(mode)
			if err != nil {
				t.Fatal(err)
			}
			m := servicemodel.NewModel(servicemodel.Location{Node: "w1"})
			base := testBase
			base.NodePorts = []netip.Prefix{netip.MustParsePrefix(nodeV4 + "/32"),
				netip.MustParsePrefix(nodeV6 + "/128")}
			do := func(f func() error) {
				t.Helper()
				if err := space.In(town.node, f); err != nil {
					t.Fatal(err)
				}
			}
			do(func() error { return routeServices(base) })
			do(func() error { return w.Sync(t.Context(), base, maps.Values(m.Ports())) })
			r := rand.New(rand.NewPCG(7, uint64(len(mode))))
			services, parts := map[string]*v1.Service{}, map[string]*discoveryv1.EndpointSlice{}
			for step := range 12 {
				for range 3 {
					disturb(r, m, services, parts)
				}
				changes := m.UpdatePorts()
				do(func() error { return w.Apply(t.Context(), changes) })
				do(func() error {
					ok, err := w.Intact(t.Context())
					if err == nil && !ok {
						err = errors.New("the kernel does not show what was written")
					}
					return err
				})
				for _, name := range slices.Sorted(maps.Keys(services)) {
					tryAll(t, town, services[name], parts, fmt.Sprint("step ", step))
				}
			}
			do(func() error {
				counts, err := w.Counts(t.Context())
				if err == nil && (len(countsByPort(m.Ports(), counts.Connections)) == 0 ||
					len(countsByPort(m.Ports(), counts.Unserved)) == 0) {
					err = fmt.Errorf("connections, or those that met nobody, are not counted: %v", counts)
				}
				return err
			})
			// The next agent starts without state and finds the existing rules.
			next, _ := NewWriter(mode)
			do(func() error { return next.Sync(t.Context(), base, maps.Values(m.Ports())) })
			for _, name := range slices.Sorted(maps.Keys(services)) {
				tryAll(t, town, services[name], parts, "after a restart")
			}
			do(func() error { return next.Clean(t.Context()) })
			do(func() error { return w.Clean(t.Context()) })
			for _, left := range [][]string{{"nft", "list", "ruleset"}, {"iptables-save"}, {"ip6tables-save"}} {
				do(func() error {
					out, err := exec.CommandContext(t.Context(), left[0], left[1:]...).CombinedOutput()
					if errors.Is(err, exec.ErrNotFound) {
						return nil
					}
					if strings.Contains(strings.ToLower(string(out)), "keelson") {
						t.Errorf("%v shows after all is cleaned:\n%s", left, out)
					}
					return err
				})
			}
		})
	}
}

func routeServices(b Base) error {
	p := &Proxy{Node: "w1", NodeIP: netip.MustParseAddr(nodeV4)}
	s := newState(nil, "w1")
	s.base = b
	return p.syncRoutes(s, s.wantedRoutes())
}

// disturb makes a random change.
func disturb(
	r *rand.Rand, m *servicemodel.Model, services map[string]*v1.Service, parts map[string]*discoveryv1.EndpointSlice,
) {
	i := r.IntN(3)
	name := fmt.Sprint("s", i)
	key := types.NamespacedName{Namespace: "default", Name: name}
	if r.IntN(3) == 0 {
		local := v1.ServiceInternalTrafficPolicyLocal
		services[name] = proxytest.Service(name, fmt.Sprintf("10.96.0.%d", 10+i), int32(30080+i), func(s *v1.Service) {
			s.Spec.Type = v1.ServiceTypeLoadBalancer
			s.Spec.ClusterIPs = []string{s.Spec.ClusterIP, fmt.Sprintf("fd00:96::%d", 10+i)}
			s.Spec.ExternalIPs = []string{fmt.Sprintf("192.0.2.%d", 10+i), fmt.Sprintf("2001:db8::%d", 10+i)}
			s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: fmt.Sprintf("192.0.2.%d", 80+i)},
				{IP: fmt.Sprintf("2001:db8::%d", 80+i)}}
			if r.IntN(2) == 0 {
				s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal
			}
			if r.IntN(3) == 0 {
				s.Spec.InternalTrafficPolicy = &local
			}
			if r.IntN(3) == 0 {
				s.Spec.SessionAffinity = v1.ServiceAffinityClientIP
			}
			if r.IntN(3) == 0 {
				s.Spec.LoadBalancerSourceRanges = []string{outsideV4 + "/32", outsideV6 + "/128"}
			}
		})
		m.SetService(key, services[name])
		return
	}
	for _, v6 := range []bool{false, true} {
		var endpoints []discoveryv1.Endpoint
		for _, pod := range slices.Sorted(maps.Keys(dwellers)) {
			d := dwellers[pod]
			ip := d.v4
			if v6 {
				ip = d.v6
			}
			switch r.IntN(4) {
			case 0:
				endpoints = append(endpoints, proxytest.Endpoint(ip, d.node, true, true, false))
			case 1:
				endpoints = append(endpoints, proxytest.Endpoint(ip, d.node, false, true, true))
			case 2:
				endpoints = append(endpoints, proxytest.Endpoint(ip, d.node, false, false, false))
			}
		}
		part := proxytest.Slice(name, endpoints...)
		if v6 {
			part.AddressType = discoveryv1.AddressTypeIPv6
		}
		part.Name = fmt.Sprint(name, "-", v6)
		parts[part.Name] = part
		m.SetSlice(types.NamespacedName{Namespace: "default", Name: part.Name}, part)
	}
}

// tryAll tries each address of a Service from each client.
func tryAll(t *testing.T, town town, svc *v1.Service, parts map[string]*discoveryv1.EndpointSlice, when string) {
	t.Helper()
	for _, client := range slices.Sorted(maps.Keys(town.clients)) {
		for _, v6 := range []bool{false, true} {
			at, node := 0, nodeV4
			if v6 {
				at, node = 1, nodeV6
			}
			ips := map[string]string{"cluster": svc.Spec.ClusterIPs[at], "external": svc.Spec.ExternalIPs[at],
				"balanced": svc.Status.LoadBalancer.Ingress[at].IP, "node port": node}
			for _, kind := range slices.Sorted(maps.Keys(ips)) {
				if kind == "cluster" && client == "outside" {
					continue
				}
				port := svc.Spec.Ports[0].Port
				if kind == "node port" {
					port = svc.Spec.Ports[0].NodePort
				}
				address := net.JoinHostPort(ips[kind], fmt.Sprint(port))
				want := oracle(svc, parts, client, kind, v6)
				for range 2 {
					if err := try(town.clients[client], address, want); err != nil {
						t.Errorf("%s: from %s to %s, the %s address of %s: %v, want %s", when, client, address, kind,
							svc.Name, err, want)
					}
				}
			}
		}
	}
}
