package network

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/fake"
	"keelson.dev/keelson/internal/await"
)

// machine is a network namespace that stands for a node, a router or a pod.
type machine struct {
	t    testing.TB
	name string
	ns   netns.NsHandle
	nl   *netlink.Handle
}

// in runs f on a new thread inside the namespace. The thread ends afterwards.
func (m *machine) in(f func() error) {
	m.t.Helper()
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked
		err := netns.Set(m.ns)
		if err == nil {
			err = f()
		}
		done <- err
	}()
	if err := <-done; err != nil {
		m.t.Fatalf("%s: %v", m.name, err)
	}
}

func newMachine(t testing.TB, name string) *machine {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root for network namespaces")
	}
	m := &machine{t: t, name: name}
	made := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		ns, err := netns.New()
		m.ns = ns
		if err == nil {
			err = os.WriteFile("/proc/sys/net/ipv6/conf/default/accept_dad", []byte("0"), 0)
		}
		made <- err
	}()
	if err := <-made; err != nil {
		t.Fatal(err)
	}
	nl, err := netlink.NewHandleAt(m.ns, unix.NETLINK_ROUTE)
	if err != nil {
		t.Fatal(err)
	}
	m.nl = nl
	t.Cleanup(func() { nl.Close(); m.ns.Close() })
	m.up("lo")
	return m
}

func (m *machine) check(err error) {
	m.t.Helper()
	if err != nil {
		m.t.Fatalf("%s: %v", m.name, err)
	}
}

func (m *machine) link(name string) netlink.Link {
	m.t.Helper()
	l, err := m.nl.LinkByName(name)
	if err != nil {
		m.t.Fatalf("%s: link %s: %v", m.name, name, err)
	}
	return l
}

func (m *machine) up(name string, addrs ...string) {
	m.t.Helper()
	l := m.link(name)
	for _, a := range addrs {
		addr, err := netlink.ParseAddr(a)
		m.check(err)
		if addr.IP.To4() == nil {
			addr.Flags = unix.IFA_F_NODAD
		}
		m.check(m.nl.AddrAdd(l, addr))
	}
	m.check(m.nl.LinkSetUp(l))
}

func (m *machine) route(dst, via string) {
	m.t.Helper()
	_, to, err := net.ParseCIDR(dst)
	m.check(err)
	m.check(m.nl.RouteAdd(&netlink.Route{Dst: to, Gw: net.ParseIP(via)}))
}

// cord connects two machines with a veth pair.
func cord(a *machine, nameA string, b *machine, nameB string) {
	a.t.Helper()
	a.check(a.nl.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: nameA, MTU: 1500}, PeerName: nameB,
		PeerNamespace: netlink.NsFd(int(b.ns))}))
}

// ours returns the routes with routeProtocol in the kernel, one per line.
func (m *machine) ours() string {
	m.t.Helper()
	var out []string
	for _, f := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		list, err := m.nl.RouteListFiltered(f, &netlink.Route{Protocol: routeProtocol}, netlink.RT_FILTER_PROTOCOL)
		if err != nil {
			return err.Error()
		}
		for _, r := range list {
			to := "nowhere"
			if r.Type == unix.RTN_UNICAST {
				l, _ := m.nl.LinkByIndex(r.LinkIndex)
				if to = r.Gw.String(); l != nil && (l.Attrs().Name == tunnelName || l.Attrs().Name == wireguardName) {
					to = "tunnel " + to
				}
			}
			out = append(out, r.Dst.String()+" "+to)
		}
	}
	return strings.Join(out, "\n")
}

// world is two links with a router between them: w1 and w2 are on the first, w3 is on the second.
type world struct {
	t       *testing.T
	router  *machine
	nodes   map[string]*machine
	objects *fake.Cluster
	stop    map[string]func()
	detach  map[string]func() // of pods
}

const (
	podRanges     = "10.244.0.0/16,fd44::/48"
	serviceRanges = "10.96.0.0/16,fd96::/112"
)

var places = map[string][2]string{ // name → link and number
	"w1": {"0", "101"}, "w2": {"0", "102"}, "w3": {"1", "103"},
}

func nodeOf(name string) *agent.Peer {
	at := places[name]
	i := name[1:]
	return node(name, fmt.Sprintf("10.244.%s.0/24,fd44:0:0:%s::/64", i, i),
		fmt.Sprintf("10.89.%s.%s,fd89:0:0:%s::%s", at[0], at[1], at[0], at[1]))
}

func newWorld(t *testing.T) *world {
	w := &world{t: t, router: newMachine(t, "router"), nodes: map[string]*machine{}, objects: fake.NewCluster(),
		stop: map[string]func(){}, detach: map[string]func(){}}
	pods, services := strings.Split(podRanges, ","), strings.Split(serviceRanges, ",")
	w.objects.About = agent.Cluster{Name: "t", ClusterCIDR: pods[0], ServiceCIDR: services[0], ClusterCIDRs: pods,
		ServiceCIDRs: services}
	for _, b := range []string{"0", "1"} {
		w.router.check(w.router.nl.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "link" + b}}))
		w.router.up("link"+b, "10.89."+b+".1/24", "fd89:0:0:"+b+"::1/64")
	}
	w.router.in(func() error {
		return errors.Join(os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0),
			os.WriteFile("/proc/sys/net/ipv6/conf/all/forwarding", []byte("1"), 0))
	})
	for name, at := range places {
		m := newMachine(t, name)
		w.nodes[name] = m
		cord(m, "eth0", w.router, "p-"+name)
		w.router.check(w.router.nl.LinkSetMaster(w.router.link("p-"+name), w.router.link("link"+at[0])))
		w.router.up("p-" + name)
		m.up("eth0", fmt.Sprintf("10.89.%s.%s/24", at[0], at[1]), fmt.Sprintf("fd89:0:0:%s::%s/64", at[0], at[1]))
		m.route("0.0.0.0/0", "10.89."+at[0]+".1")
		m.route("::/0", "fd89:0:0:"+at[0]+"::1")
		w.objects.Put(nodeOf(name))
	}
	return w
}

// seenFrom is the cluster as seen by one of its nodes.
type seenFrom struct {
	agent.Objects
	node string
}

func (s seenFrom) Peers() []*agent.Peer {
	return slices.DeleteFunc(s.Objects.Peers(), func(p *agent.Peer) bool { return p.Name == s.node })
}

func (s seenFrom) Cluster() agent.Cluster {
	c := s.Objects.Cluster()
	for _, p := range nodeOf(s.node).PodCIDRs {
		c.PodCIDRs = append(c.PodCIDRs, p.String())
	}
	return c
}

// keep runs Routes on a node until the test ends.
func (w *world) keep(name string, foreign func() bool) *Routes {
	w.t.Helper()
	return w.run(name, &Routes{ForeignNetwork: foreign})
}

func (w *world) run(name string, r *Routes) *Routes {
	w.t.Helper()
	r.Node, r.Objects, r.Log = name, seenFrom{w.objects, name}, slog.New(slog.DiscardHandler)
	r.NodeIPs = nodeOf(name).Addresses
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked
		err := netns.Set(w.nodes[name].ns)
		if err == nil {
			err = r.Run(ctx)
		}
		done <- err
	}()
	stop := sync.OnceFunc(func() {
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			w.t.Errorf("%s: %v", name, err)
		}
	})
	w.stop[name] = stop
	w.t.Cleanup(stop)
	return r
}

func (w *world) leave(name string) {
	w.stop[name]()
	w.stop[name] = func() {}
}

func (w *world) eventually(name string, cond func() error) {
	w.t.Helper()
	await.Until(context.Background(), w.t, await.Patience, time.Millisecond, name, cond)
}

func (w *world) has(name, routes string) {
	w.t.Helper()
	w.eventually(name, func() error {
		if got := w.nodes[name].ours(); got != routes {
			return fmt.Errorf("routes:\n%s\nwant:\n%s", got, routes)
		}
		return nil
	})
}

func never() bool { return false }

const (
	routesOfW1 = "10.96.0.0/16 nowhere\n10.244.0.0/16 nowhere\n10.244.2.0/24 10.89.0.102\n10.244.3.0/24 " +
		"tunnel 10.244.3.0\nfd44:0:0:2::/64 fd89::102\nfd44:0:0:3::/64 tunnel fd44::3:ffff:ffff:ffff:ffff\nfd44::/48 " +
		"nowhere\nfd96::/112 nowhere"
	refusals = "10.96.0.0/16 nowhere\n10.244.0.0/16 nowhere\nfd44::/48 nowhere\nfd96::/112 nowhere"
)

// F108: whatever another program removes from the kernel or changes there is repaired, and
// everything is removed when the node leaves.
func TestKernelIsKept(t *testing.T) {
	w := newWorld(t)
	m := w.nodes["w1"]
	w.keep("w1", never)
	w.has("w1", routesOfW1)
	tunnel := func() error {
		l, err := m.nl.LinkByName(tunnelName)
		if err != nil {
			return err
		}
		v, ok := l.(*netlink.Vxlan)
		if !ok || v.Attrs().MTU != 1450 || v.Attrs().Flags&net.FlagUp == 0 ||
			v.Attrs().HardwareAddr.String() != HardwareAddr("w1").String() {
			return fmt.Errorf("the tunnel is %+v", l.Attrs())
		}
		want := 0
		for _, f := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6, unix.AF_BRIDGE} {
			list, err := m.nl.NeighList(l.Attrs().Index, f)
			if err != nil {
				return err
			}
			for _, n := range list {
				if n.State&netlink.NUD_PERMANENT != 0 && n.HardwareAddr.String() == HardwareAddr("w3").String() {
					want++
				}
			}
		}
		addrs, err := m.nl.AddrList(l, netlink.FAMILY_V4)
		if err != nil || want != 3 || len(addrs) != 1 || addrs[0].String() != "10.244.1.0/32 "+tunnelName {
			return fmt.Errorf("%d entries for w3, addresses %v, %v", want, addrs, err)
		}
		return nil
	}
	w.eventually("tunnel", tunnel)
	for name, damage := range map[string]func() error{
		"a route is removed": func() error {
			_, dst, _ := net.ParseCIDR("10.244.2.0/24")
			return m.nl.RouteDel(&netlink.Route{Dst: dst})
		},
		"a refusal is removed": func() error {
			_, dst, _ := net.ParseCIDR("10.96.0.0/16")
			return m.nl.RouteDel(&netlink.Route{Dst: dst, Type: unix.RTN_UNREACHABLE, Priority: refusedMetric})
		},
		"a route is led astray": func() error {
			_, dst, _ := net.ParseCIDR("10.244.3.0/24")
			return m.nl.RouteReplace(&netlink.Route{Dst: dst, Gw: net.ParseIP("10.89.0.1"),
				Protocol: unix.RTPROT_STATIC})
		},
		"the tunnel is removed":     func() error { return m.nl.LinkDel(m.link(tunnelName)) },
		"the tunnel is down":        func() error { return m.nl.LinkSetDown(m.link(tunnelName)) },
		"the tunnel's MTU is wrong": func() error { return m.nl.LinkSetMTU(m.link(tunnelName), 1400) },
		"the tunnel has other addresses": func() error {
			a, _ := netlink.ParseAddr("10.244.1.0/32")
			b, _ := netlink.ParseAddr("192.0.2.7/24")
			return errors.Join(m.nl.AddrDel(m.link(tunnelName), a), m.nl.AddrAdd(m.link(tunnelName), b))
		},
		"a neighbour is removed": func() error {
			return m.nl.NeighDel(&netlink.Neigh{LinkIndex: m.link(tunnelName).Attrs().Index,
				IP: net.ParseIP("10.244.3.0")})
		},
		"a forwarding entry is removed": func() error {
			return m.nl.NeighDel(&netlink.Neigh{LinkIndex: m.link(tunnelName).Attrs().Index, Family: unix.AF_BRIDGE,
				Flags:        netlink.NTF_SELF,
				HardwareAddr: HardwareAddr("w3"), IP: net.ParseIP("10.89.1.103")})
		},
		"the link goes down and up": func() error {
			if err := m.nl.LinkSetDown(m.link("eth0")); err != nil {
				return err
			}
			a, _ := netlink.ParseAddr("fd89::101/64") // the kernel removes it with the link
			a.Flags = unix.IFA_F_NODAD
			return errors.Join(m.nl.LinkSetUp(m.link("eth0")), m.nl.AddrReplace(m.link("eth0"), a))
		},
	} {
		if err := damage(); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		w.has("w1", routesOfW1)
		w.eventually(name, tunnel)
	}
	nodesComeAndGo(t, w)
}

// nodesComeAndGo checks that the kernel follows added and removed nodes, and that its state
// outlives the agent.
func nodesComeAndGo(t *testing.T, w *world) {
	t.Helper()
	m := w.nodes["w1"]
	moved := nodeOf("w3")
	moved.Addresses = node("w3", "", "10.89.0.103,fd89::103").Addresses
	w.objects.Put(moved)
	w.has("w1",
		strings.NewReplacer("tunnel 10.244.3.0", "10.89.0.103", "tunnel fd44::3:ffff:ffff:ffff:ffff",
			"fd89::103").Replace(routesOfW1))
	w.eventually("tunnel that nobody needs", func() error {
		if _, err := m.nl.LinkByName(tunnelName); err == nil {
			return errors.New("it is there")
		}
		return nil
	})
	w.objects.Delete(nodeOf("w3"))
	w.objects.Delete(nodeOf("w2"))
	w.has("w1", refusals)
	w.objects.Put(nodeOf("w2"), nodeOf("w3"))
	w.has("w1", routesOfW1)

	// The state outlives the agent, a new agent takes it over, and a node that leaves removes it.
	w.leave("w1")
	if got := m.ours(); got != routesOfW1 {
		t.Errorf("without an agent: %s", got)
	}
	m.in(func() error { return Remove(context.Background()) })
	if _, err := m.nl.LinkByName(tunnelName); m.ours() != "" || err == nil {
		t.Errorf("a node that has left has routes %q and tunnel %v", m.ours(), err)
	}
}

// pod creates a sandbox on a node with the standard plugins and Keelson's own configuration.
func (w *world) pod(name string, r *Routes, id string, ports ...*cri.PortMapping) (*machine, agent.NetworkStatus) {
	w.t.Helper()
	bin, err := plugins()
	if err != nil {
		w.t.Fatal(err)
	}
	dir := w.t.TempDir()
	p := newMachine(w.t, "pod "+id)
	path := filepath.Join(dir, id)
	w.nodes[name].check(os.WriteFile(path, nil, 0o444))
	p.in(func() error {
		return unix.Mount(fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid()), path, "", unix.MS_BIND, "")
	})
	w.t.Cleanup(func() { _ = unix.Unmount(path, unix.MNT_DETACH) })
	own := nodeOf(name)
	n := New(Config{ConfDir: filepath.Join(dir, "none"), BinDirs: []string{bin}, RunDir: filepath.Join(dir, "run"),
		PodCIDRs: func() []netip.Prefix { return podPrefixes(own) }, MTU: r.MTU, Log: slog.New(slog.DiscardHandler)})
	var st agent.NetworkStatus
	q := agent.NetworkRequest{SandboxID: id, NetNS: path, Namespace: "default", Name: id, UID: "u", Ports: ports}
	w.nodes[name].in(func() (err error) {
		st, err = n.Add(context.Background(), q)
		return err
	})
	w.detach[id] = func() { w.nodes[name].in(func() error { return n.Del(context.Background(), q) }) }
	return p, st
}

// F107 F108: pods of nodes on different links reach each other in both families with packets of the
// MTU of their interfaces. No packet is fragmented, and a packet that is one byte larger is
// rejected at the sender. No packet between nodes has a pod's address if the link between them does
// not carry these addresses.
func TestPodsAcrossLinks(t *testing.T) {
	w := newWorld(t)
	r1, r3 := w.keep("w1", never), w.keep("w3", never)
	w.has("w1", routesOfW1)
	w.eventually("w3", func() error {
		if got := w.nodes["w3"].ours(); !strings.Contains(got, "10.244.1.0/24 tunnel 10.244.1.0") ||
			!strings.Contains(got, "fd44:0:0:1::/64 tunnel") {
			return errors.New(got)
		}
		return nil
	})
	a, sa := w.pod("w1", r1, "a")
	b, sb := w.pod("w3", r3, "b")
	if len(sa.IPs) != 2 || len(sb.IPs) != 2 {
		t.Fatalf("addresses %v and %v, want one of each family", sa.IPs, sb.IPs)
	}
	if got := a.link(ifName).Attrs().MTU; got != 1450 {
		t.Errorf("the pod's interface takes %d bytes", got)
	}
	seen := w.router.capture("link0", "link1")
	for i, header := range []int{28, 48} {
		to, from := netip.MustParseAddr(sb.IPs[i]), netip.MustParseAddr(sa.IPs[i])
		listener := b.listen(to)
		var sender net.Conn
		a.in(func() (err error) { sender, err = dialWhole(to); return err })
		full := make([]byte, 1450-header)
		w.eventually("the largest packet to "+to.String(), func() error {
			if _, err := sender.Write(full); err != nil {
				return err
			}
			_ = listener.SetReadDeadline(time.Now().Add(time.Second))
			buf := make([]byte, 4096)
			n, peer, err := listener.ReadFromUDPAddrPort(buf)
			if err == nil && (n != len(full) || peer.Addr().Unmap() != from) {
				err = fmt.Errorf("%d bytes from %s", n, peer)
			}
			return err
		})
		if _, err := sender.Write(make([]byte, len(full)+1)); !errors.Is(err, syscall.EMSGSIZE) {
			t.Errorf("one byte more to %s: %v", to, err)
		}
		sender.Close()
		listener.Close()
	}
	// The node itself reaches the pod from each of its addresses.
	for i, as := range []string{"10.89.0.101", "fd89::101"} {
		listener := b.listen(netip.MustParseAddr(sb.IPs[i]))
		w.eventually("from the node as "+as, func() error {
			w.nodes["w1"].in(func() error {
				c, err := net.DialUDP("udp", &net.UDPAddr{IP: net.ParseIP(as)},
					net.UDPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(sb.IPs[i]), 7000)))
				if err != nil {
					return err
				}
				defer c.Close()
				_, err = c.Write([]byte("x"))
				return err
			})
			_ = listener.SetReadDeadline(time.Now().Add(time.Second))
			_, peer, err := listener.ReadFromUDPAddrPort(make([]byte, 16))
			if want := InnerAddr(podPrefixes(nodeOf("w1"))[i]); err == nil && peer.Addr().Unmap() != want {
				err = fmt.Errorf("from %s, want %s", peer, want)
			}
			return err
		})
		listener.Close()
	}
	for _, p := range seen() {
		if p.fragment || p.length > 1500 || p.tunnelled == 0 && !p.chatter {
			t.Errorf("between the links: %+v", p)
		}
	}
}

// listen waits for datagrams to port 7000.
func (m *machine) listen(at netip.Addr) (c *net.UDPConn) {
	m.t.Helper()
	m.in(func() (err error) {
		c, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(at, 7000)))
		return err
	})
	return c
}

// dialWhole sends datagrams that must not be fragmented.
func dialWhole(to netip.Addr) (net.Conn, error) {
	d := net.Dialer{Control: func(_, _ string, c syscall.RawConn) (err error) {
		cerr := c.Control(func(fd uintptr) {
			if to.Is4() {
				err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DO)
			} else {
				err = errors.Join(unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER,
					unix.IPV6_PMTUDISC_DO),
					unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_DONTFRAG, 1))
			}
		})
		return errors.Join(err, cerr)
	}}
	return d.Dial("udp", netip.AddrPortFrom(to, 7000).String())
}

// F108: with a default route, no packet for an address of the cluster leaves through the uplink,
// and no address resolution request for one: neither from the node nor from a pod, nor while nodes
// are added and removed. The sender receives an error immediately.
func TestClusterAddressesStayInside(t *testing.T) {
	w := newWorld(t)
	r := w.keep("w1", never)
	w.has("w1", routesOfW1)
	a, _ := w.pod("w1", r, "a")
	w.objects.Delete(nodeOf("w2"))
	w.objects.Delete(nodeOf("w3"))
	w.has("w1", refusals)
	w.nodes["w1"].in(func() error { // the kernel limits the rate of "host unreachable" errors, and senders would wait
		return errors.Join(os.WriteFile("/proc/sys/net/ipv4/icmp_ratelimit", []byte("0"), 0),
			os.WriteFile("/proc/sys/net/ipv6/icmp/ratelimit", []byte("0"), 0))
	})
	seen := w.router.capture("p-w1")
	strangers := []string{"10.244.2.9", "10.244.200.9", "10.96.3.3", "fd44:0:0:2::9", "fd44:0:0:aa::9", "fd96::33"}
	for _, s := range strangers {
		for _, m := range []*machine{w.nodes["w1"], a} {
			m.in(func() error {
				c, err := net.DialTimeout("tcp", net.JoinHostPort(s, "80"), time.Minute)
				if err == nil {
					c.Close()
					return fmt.Errorf("somebody answers at %s", s)
				}
				if !errors.Is(err, syscall.EHOSTUNREACH) && !errors.Is(err, syscall.ENETUNREACH) &&
					!errors.Is(err, syscall.ENETDOWN) && !errors.Is(err, syscall.EACCES) {
					return fmt.Errorf("%s: %w", s, err)
				}
				return nil
			})
		}
	}
	// This proves that the capture sees packets that leave.
	w.nodes["w1"].in(func() error {
		c, err := net.Dial("udp", "192.0.2.1:9")
		if err == nil {
			_, err = io.WriteString(c, "x")
			err = errors.Join(err, c.Close())
		}
		return err
	})
	left := 0
	for _, p := range seen("192.0.2.1") {
		for _, c := range prefixesOf(podRanges + "," + serviceRanges) {
			if p.to.IsValid() && c.Contains(p.to) {
				t.Errorf("left by the uplink: %+v", p)
			}
		}
		if p.to == netip.MustParseAddr("192.0.2.1") {
			left++
		}
	}
	if left == 0 {
		t.Error("the capture saw nothing at all")
	}
}
