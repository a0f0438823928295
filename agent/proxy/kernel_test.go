package proxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/fake"
	"keelson.dev/keelson/agent/proxy/proxytest"
	"keelson.dev/keelson/test/testenv/space"
)

func addr(t *testing.T, ns netns.NsHandle, link, cidr, gateway string) {
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
		if err := netlink.AddrAdd(l, a); err != nil {
			return err
		}
		if err := netlink.LinkSetUp(l); err != nil || gateway == "" {
			return err
		}
		return netlink.RouteAdd(&netlink.Route{Gw: net.ParseIP(gateway)})
	}); err != nil {
		t.Fatalf("%s %s: %v", link, cidr, err)
	}
}

// pod creates a network namespace that is connected to node by a veth pair, with a server that
// returns its own name.
func pod(t *testing.T, node netns.NsHandle, name, ip, gateway string) netns.NsHandle {
	t.Helper()
	ns := space.New(t)
	if err := space.In(node, func() error {
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: "eth0",
			PeerNamespace: netlink.NsFd(int(ns))})
	}); err != nil {
		t.Fatal(err)
	}
	addr(t, node, name, gateway+"/30", "")
	addr(t, ns, "eth0", ip+"/30", gateway)
	serve(t, ns, "tcp4", "0.0.0.0:8080", name)
	return ns
}

func ask(ns netns.NsHandle, address string) (answer string, err error) {
	err = space.In(ns, func() error {
		c, err := (&net.Dialer{Timeout: 20 * time.Second}).Dial("tcp4", address)
		if err != nil {
			return err
		}
		defer c.Close()
		raw, err := io.ReadAll(c)
		answer = string(raw)
		return err
	})
	return answer, err
}

// F117: the rules implement the model in the kernel: the cluster address from the host and from a
// pod, a pod that reaches itself, a node port with source NAT, and rejects without backends.
func TestKernel(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root for network namespaces")
	}
	if _, err := exec.LookPath("nft"); err != nil {
		t.Skip("needs nft")
	}
	node := space.New(t)
	a := pod(t, node, "a", "10.244.0.2", "10.244.0.1")
	pod(t, node, "b", "10.244.0.6", "10.244.0.5")
	outside := space.New(t)
	if err := space.In(node, func() error {
		if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0); err != nil {
			return err
		}
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "up"}, PeerName: "eth0",
			PeerNamespace: netlink.NsFd(int(outside))})
	}); err != nil {
		t.Fatal(err)
	}
	addr(t, node, "up", "10.89.0.101/24", "")
	addr(t, outside, "eth0", "10.89.0.7/24", "")

	p := &Proxy{Node: "w1", NodeIP: netip.MustParseAddr("10.89.0.101"), Log: slog.New(slog.DiscardHandler)}
	objects := fake.NewCluster()
	objects.About.ServiceCIDR, objects.About.ClusterCIDR = "10.96.0.0/16", "10.244.0.0/16"
	services := []*v1.Service{proxytest.Service("web", "10.96.0.10", 30080), proxytest.Service("self", "10.96.0.11", 0),
		proxytest.Service("far", "10.97.0.5", 0), proxytest.Service("none", "10.96.0.12", 30081, func(s *v1.Service) {
			// One address of each kind: an address of another machine with a listener, and one of the
			// node itself with a listener.
			s.Spec.ExternalIPs = []string{"10.89.0.7", "10.89.0.101"}
			s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: "192.0.2.80"}}
		})}
	parts := []*discoveryv1.EndpointSlice{
		proxytest.Slice("web", proxytest.Endpoint("10.244.0.2", "w1", true, true, false),
			proxytest.Endpoint("10.244.0.6", "w1", true, true, false)),
		proxytest.Slice("self", proxytest.Endpoint("10.244.0.2", "w1", true, true, false)),
		proxytest.Slice("far", proxytest.Endpoint("10.244.0.2", "w1", true, true, false)),
	}
	for _, svc := range services {
		objects.Put(svc)
	}
	for _, part := range parts {
		objects.Put(part)
	}
	rules := newState(newNFT(), "w1")
	if err := space.In(node, func() error {
		return p.applyChanges(t.Context(), rules, objects, objects, agent.ObjectChanges{All: true})
	}); err != nil {
		t.Fatal(err)
	}

	seen := map[string]bool{}
	for range 40 {
		got, err := ask(node, "10.96.0.10:80")
		if err != nil {
			t.Fatalf("host to Service: %v", err)
		}
		seen[strings.Fields(got)[0]] = true
	}
	if !seen["a"] || !seen["b"] {
		t.Errorf("40 connections reached %v, want both pods", seen)
	}
	if got, err := ask(a, "10.96.0.11:80"); err != nil || !strings.HasPrefix(got, "a ") {
		t.Errorf("pod to itself through a Service: %q, %v", got, err)
	}
	if got, err := ask(outside, "10.89.0.101:30080"); err != nil {
		t.Errorf("outside to node port: %v", err)
	} else if strings.Contains(got, "10.89.0.7") {
		t.Errorf("the pod saw the client's address %q: replies could take another way", got)
	}
	// A server outside the cluster has no route to pods, so it must see the node's address.
	var ln net.Listener
	if err := space.In(outside, func() (err error) {
		ln, err = net.Listen("tcp4", "10.89.0.7:8080")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	go func() {
		if c, err := ln.Accept(); err == nil {
			fmt.Fprint(c, c.RemoteAddr().(*net.TCPAddr).IP)
			c.Close()
		}
	}()
	if got, err := ask(a, "10.89.0.7:8080"); err != nil || got != "10.89.0.101" {
		t.Errorf("pod to a server beyond the cluster: seen as %q, %v", got, err)
	}
	reachesAddedRanges(t, p, rules, node, a, objects, services)
	refusesWithoutBackends(t, node, a, outside)
}

// reachesAddedRanges connects to an address outside the original Service range, whose route is
// removed with its Service.
func reachesAddedRanges(
	t *testing.T, p *Proxy, rules *proxyState, node, pod netns.NsHandle, objects *fake.Cluster, services []*v1.Service,
) {
	for who, ns := range map[string]netns.NsHandle{"host": node, "pod": pod} {
		if got, err := ask(ns, "10.97.0.5:80"); err != nil || !strings.HasPrefix(got, "a ") {
			t.Errorf("%s to a Service of an added range: %q, %v", who, got, err)
		}
	}
	objects.Delete(services[slices.IndexFunc(services, func(s *v1.Service) bool { return s.Name == "far" })])
	if err := space.In(node, func() error {
		return p.applyChanges(t.Context(), rules, objects, objects, agent.ObjectChanges{All: true})
	}); err != nil {
		t.Fatal(err)
	}
	if _, err := ask(node, "10.97.0.5:80"); err == nil || !strings.Contains(err.Error(), "unreachable") {
		t.Errorf("the route of a Service that is gone stayed: %v", err)
	}
}

// refusesWithoutBackends connects to a Service without backends at each of its addresses, including
// those with listeners.
func refusesWithoutBackends(t *testing.T, node, pod, outside netns.NsHandle) {
	if err := space.In(outside, func() error {
		return netlink.RouteAdd(&netlink.Route{Gw: net.ParseIP("10.89.0.101")})
	}); err != nil {
		t.Fatal(err)
	}
	if err := space.In(node, func() error {
		return netlink.RouteAdd(&netlink.Route{Gw: net.ParseIP("10.89.0.7")})
	}); err != nil {
		t.Fatal(err)
	}
	for ns, address := range map[netns.NsHandle]string{node: "0.0.0.0:80", outside: "10.89.0.7:80"} {
		listen(t, ns, address)
	}
	listen(t, node, "0.0.0.0:30081")
	for from, c := range map[string]struct {
		ns        netns.NsHandle
		addresses []string
	}{
		"node": {node, []string{"10.96.0.12:80", "10.89.0.7:80", "10.89.0.101:80", "192.0.2.80:80",
			"10.89.0.101:30081"}},
		"pod": {pod, []string{"10.96.0.12:80", "10.89.0.7:80", "10.89.0.101:80", "192.0.2.80:80",
			"10.89.0.101:30081"}},
		"outside": {outside, []string{"10.96.0.12:80", "10.89.0.101:80", "192.0.2.80:80", "10.89.0.101:30081"}},
	} {
		for _, a := range c.addresses {
			if _, err := ask(c.ns, a); err == nil || !strings.Contains(err.Error(), "refused") {
				t.Errorf("%s: a Service without backends answered at %s: %v, want connection refused", from, a, err)
			}
		}
	}
}

// listen accepts connections and sends nothing.
func listen(t *testing.T, ns netns.NsHandle, address string) {
	t.Helper()
	eachConn(t, ns, "tcp4", address, func(c net.Conn) { c.Close() })
}

// A client that keeps sending UDP from one port reaches another endpoint after its own was removed,
// and is rejected if there is none. Flows to endpoints that still serve are not deleted.
func TestUDPFlows(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root for network namespaces")
	}
	node := space.New(t)
	for name, ip := range map[string]string{"a": "10.244.0.2", "b": "10.244.0.6"} {
		answers(t, pod(t, node, name, ip, netip.MustParseAddr(ip).Prev().String()), name)
	}
	addr(t, node, "lo", "10.89.0.101/32", "")
	p := &Proxy{Node: "w1", NodeIP: netip.MustParseAddr("10.89.0.101"), Flows: NewStaleFlowCleaner(),
		Log: slog.New(slog.DiscardHandler)}
	objects := fake.NewCluster()
	objects.About.ServiceCIDR, objects.About.ClusterCIDR = "10.96.0.0/16", "10.244.0.0/16"
	udp := proxytest.Service("dns", "10.96.0.10", 30053, func(s *v1.Service) {
		s.Spec.Ports[0].Protocol = v1.ProtocolUDP
	})
	objects.Put(udp)
	st := newState(newNFT(), "w1")
	route := func(endpoints ...discoveryv1.Endpoint) {
		t.Helper()
		part, proto := proxytest.Slice("dns", endpoints...), v1.ProtocolUDP
		part.Ports[0].Protocol = &proto
		objects.Put(part)
		if err := space.In(node, func() (err error) {
			if err := p.applyChanges(context.Background(), st, objects, objects, agent.ObjectChanges{All: true}); err !=
				nil {
				return err
			}
			if ok, err := st.writer.Intact(context.Background()); !ok || err != nil {
				t.Error("the kernel's rules are not as they were made", err)
			}
			return p.Flows.deleteStale()
		}); err != nil {
			t.Fatal(err)
		}
	}
	a, b := proxytest.Endpoint("10.244.0.2", "w1", true, true, false),
		proxytest.Endpoint("10.244.0.6", "w1", true, true, false)
	route(a)
	asks := map[string]*asker{"cluster address": newAsker(t, node, "10.96.0.10:80"),
		"node port": newAsker(t, node, "10.89.0.101:30053")}
	expect := func(when, want string) {
		t.Helper()
		for where, ask := range asks {
			// A packet that the output hook rejects causes an immediate error of the socket.
			if got := strings.ReplaceAll(ask.ask(), "operation not permitted",
				"refused"); !strings.Contains(got, want) {
				t.Errorf("%s, by %s: %q, want %q", when, where, got, want)
			}
		}
	}
	expect("one endpoint", "a")
	overflow(t, node, "10.96.0.10:80", flowsPerRound+300) // some ports may be used twice
	if n := flowsTo(t, node, "10.244.0.2"); n <= flowsPerRound {
		t.Errorf("%d flows, want more than %d", n, flowsPerRound)
	}
	route(proxytest.Endpoint("10.244.0.2", "w1", false, true, true), b)
	expect("its endpoint ends and still serves", "a")
	route(b)
	if n := flowsTo(t, node, "10.244.0.2"); n > 0 {
		t.Errorf("%d flows still lead to an endpoint that is gone", n)
	}
	expect("its endpoint is gone", "b")
	route()
	expect("no endpoint is left", "refused")
	route(a)
	expect("one is there again", "a")
}

// answers serves UDP in a namespace and responds with its name.
func answers(t *testing.T, ns netns.NsHandle, name string) {
	t.Helper()
	var pc net.PacketConn
	if err := space.In(ns, func() (err error) {
		pc, err = net.ListenPacket("udp4", "0.0.0.0:8080")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { pc.Close() })
	go func() {
		buf := make([]byte, 100)
		for {
			_, from, err := pc.ReadFrom(buf)
			if err != nil {
				return
			}
			_, _ = pc.WriteTo([]byte(name), from)
		}
	}()
}

// asker is a client that keeps sending from one port.
type asker struct{ c net.Conn }

func newAsker(t *testing.T, ns netns.NsHandle, to string) *asker {
	t.Helper()
	a := &asker{}
	if err := space.In(ns, func() (err error) { a.c, err = net.Dial("udp4", to); return err }); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.c.Close() })
	return a
}

// ask returns the answer, or the reason why there is none.
func (a *asker) ask() string {
	buf := make([]byte, 10)
	_ = a.c.SetDeadline(time.Now().Add(20 * time.Second))
	_, err := a.c.Write([]byte("?"))
	if errors.Is(err, unix.ECONNREFUSED) { // caused by the previous packet and reported now
		_, err = a.c.Write([]byte("?"))
	}
	if err != nil {
		return err.Error()
	}
	n, err := a.c.Read(buf)
	if err != nil {
		return err.Error()
	}
	return string(buf[:n])
}

// overflow creates UDP flows, each from a different port.
func overflow(t *testing.T, ns netns.NsHandle, to string, flows int) {
	t.Helper()
	for range flows {
		if err := space.In(ns, func() error {
			c, err := net.Dial("udp4", to)
			if err == nil {
				_, err = c.Write([]byte("?"))
				c.Close()
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
}

// flowsTo returns the number of flows that an address answers.
func flowsTo(t *testing.T, ns netns.NsHandle, ip string) (n int) {
	t.Helper()
	if err := space.In(ns, func() error {
		all, err := netlink.ConntrackTableList(netlink.ConntrackTable, netlink.FAMILY_V4)
		for _, f := range all {
			if f.Reverse.SrcIP.String() == ip {
				n++
			}
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return n
}

// echo returns the received data.
func echo(t *testing.T, ns netns.NsHandle, address string) {
	t.Helper()
	eachConn(t, ns, "tcp4", address, func(c net.Conn) {
		go func() {
			defer c.Close()
			_, _ = io.Copy(c, c)
		}()
	})
}

func sliceList(all ...*discoveryv1.EndpointSlice) []*discoveryv1.EndpointSlice { return all }
