package network

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/wgctrl"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"
)

// needsWireGuard skips on a kernel without it: test/qemuguest runs these tests on one that has it, and says there that it has to.
func needsWireGuard(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root for network namespaces")
	}
	if err := CheckWireGuard(); err != nil {
		if os.Getenv("KEELSON_NEEDS_WIREGUARD") != "" {
			t.Fatal(err)
		}
		t.Skipf("needs: a kernel with WireGuard, as test/qemuguest boots: %v", err)
	}
}

// F108: a kernel without WireGuard is refused by a sentence that says what to do, and nothing is left of the trial on one
// that has it.
func TestKernelWithoutWireGuard(t *testing.T) {
	m := newMachine(t, "w1")
	m.in(func() error {
		err := CheckWireGuard()
		if err != nil &&
			(!strings.Contains(err.Error(), "--pod-network=wireguard: this machine's kernel has no WireGuard: load it "+
				"with 'modprobe wireguard'") ||
				strings.Contains(err.Error(), "\n")) {
			t.Errorf("refused by %v", err)
		}
		return nil
	})
	links, err := m.nl.LinkList()
	if err != nil || len(links) != 1 {
		t.Errorf("interfaces besides lo: %v, %v", links, err)
	}
}

// secured has a node encrypt, with a key of a name.
func (w *world) secured(name, key string) *Routes {
	w.t.Helper()
	return w.run(name, &Routes{ForeignNetwork: never, Mode: ModeWireGuard,
		Encryption: Encryption{Key: keyOf(key), Port: DefaultWireGuardPort}})
}

// device is a node's end of the encrypted tunnel.
func (m *machine) device() (d *wgtypes.Device) {
	m.t.Helper()
	m.in(func() error {
		c, err := wgctrl.New()
		if err != nil {
			return err
		}
		defer c.Close()
		if d, err = c.Device(wireguardName); errors.Is(err, os.ErrNotExist) {
			return nil
		}
		return err
	})
	return d
}

const securedRoutesOfW1 = "10.96.0.0/16 nowhere\n10.244.0.0/16 nowhere\n10.244.2.0/24 tunnel " +
	"10.244.2.0\n10.244.3.0/24 tunnel 10.244.3.0\n" +
	"fd44:0:0:2::/64 tunnel fd44::2:ffff:ffff:ffff:ffff\nfd44:0:0:3::/64 tunnel " +
	"fd44::3:ffff:ffff:ffff:ffff\nfd44::/48 nowhere\nfd96::/112 nowhere"

// newSecuredWorld is a world in which all nodes have told their keys.
func newSecuredWorld(t *testing.T) *world {
	needsWireGuard(t)
	w := newWorld(t)
	for name := range places {
		w.objects.Put(keyed(nodeOf(name)))
	}
	return w
}

// F107 F108: pods of nodes on one link and on two reach each other in both families, with packets as large as their interfaces
// take, and so does a node; and whatever the links carry is WireGuard's.
func TestEncryptedBetweenNodes(t *testing.T) {
	w := newSecuredWorld(t)
	r := map[string]*Routes{}
	for name := range places {
		r[name] = w.secured(name, name)
	}
	w.has("w1", securedRoutesOfW1)
	seen := w.router.capture("p-w1", "p-w2", "p-w3")
	a, sa := w.pod("w1", r["w1"], "a")
	if got := a.link(ifName).Attrs().MTU; got != 1440 {
		t.Errorf("the pod's interface takes %d bytes", got)
	}
	for _, name := range []string{"w2", "w3"} {
		b, sb := w.pod(name, r[name], "on-"+name)
		for i, header := range []int{28, 48} {
			to := netip.MustParseAddr(sb.IPs[i])
			w.talk(a, b, netip.MustParseAddr(sa.IPs[i]), to)
			listener := b.listen(to)
			var sender net.Conn
			a.in(func() (err error) { sender, err = dialWhole(to); return err })
			full := make([]byte, 1440-header)
			w.eventually("the largest packet to "+to.String(), func() error {
				if _, err := sender.Write(full); err != nil {
					return err
				}
				return receive(listener, len(full), netip.MustParseAddr(sa.IPs[i]))
			})
			if _, err := sender.Write(make([]byte, len(full)+1)); !errors.Is(err, unix.EMSGSIZE) {
				t.Errorf("one byte more to %s: %v", to, err)
			}
			sender.Close()
			// As itself the node reaches the pod too, whichever of its addresses it speaks as.
			w.eventually("from the node to "+to.String(), func() error {
				w.nodes["w1"].in(func() error { return say(nodeOf("w1").Addresses[i], to) })
				return receive(listener, 1, InnerAddr(podPrefixes(nodeOf("w1"))[i]))
			})
			listener.Close()
		}
	}
	encrypted := 0
	for _, p := range seen() {
		if p.port == DefaultWireGuardPort {
			encrypted++
			if p.fragment || p.length > 1500 {
				t.Errorf("between the nodes: %+v", p)
			}
		} else if !p.chatter || ofPods(p.from) || ofPods(p.to) {
			t.Errorf("between the nodes in the clear: %+v", p)
		}
	}
	if encrypted < 40 {
		t.Errorf("between the nodes there were %d encrypted packets only", encrypted)
	}
}

// receive waits a second for a datagram of a length from an address.
func receive(l *net.UDPConn, length int, from netip.Addr) error {
	if err := l.SetReadDeadline(time.Now().Add(time.Second)); err != nil {
		return err
	}
	n, peer, err := l.ReadFromUDPAddrPort(make([]byte, 4096))
	if err == nil && (n != length || peer.Addr().Unmap() != from) {
		err = fmt.Errorf("%d bytes from %s, want %d from %s", n, peer, length, from)
	}
	return err
}

func ofPods(a netip.Addr) bool {
	return slices.ContainsFunc(prefixesOf(podRanges), func(p netip.Prefix) bool { return p.Contains(a) })
}

// say sends a byte as an address of the node.
func say(as, to netip.Addr) error {
	c, err := net.DialUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(as, 0)),
		net.UDPAddrFromAddrPort(netip.AddrPortFrom(to, 7000)))
	if err != nil {
		return err
	}
	defer c.Close()
	_, err = c.Write([]byte("x"))
	return err
}

// F108: what somebody takes from the encrypted tunnel or changes there is mended; a peer's new key is taken; to a node without
// a key and to one that left nothing leads, and nothing is sent in the clear; and a node that leaves has nothing of it.
func TestEncryptedTunnelIsKept(t *testing.T) {
	w := newSecuredWorld(t)
	m := w.nodes["w1"]
	r1 := w.secured("w1", "w1")
	r2 := w.secured("w2", "w2")
	w.has("w1", securedRoutesOfW1)
	right := func(peers ...string) func() error {
		return func() error {
			d := m.device()
			if d == nil || d.PublicKey != keyOf("w1").PublicKey() || d.ListenPort != DefaultWireGuardPort ||
				len(d.Peers) != len(peers) {
				return fmt.Errorf("the tunnel is %+v", d)
			}
			for _, p := range d.Peers {
				i := slices.IndexFunc(peers, func(s string) bool { return keyOf(s).PublicKey() == p.PublicKey })
				if i < 0 {
					return fmt.Errorf("a peer has the key %s", p.PublicKey)
				}
				if name := peers[i]; !sameAllowed(p.AllowedIPs, podPrefixes(nodeOf(name[:2]))) || p.Endpoint == nil ||
					p.PersistentKeepaliveInterval != 0 {
					return fmt.Errorf("peer %s is %+v", name, p)
				}
			}
			l, err := m.nl.LinkByName(wireguardName)
			if err != nil || l.Attrs().MTU != 1440 || l.Attrs().Flags&net.FlagUp == 0 {
				return fmt.Errorf("%+v, %v", l, err)
			}
			return nil
		}
	}
	w.eventually("tunnel", right("w2", "w3"))
	reconfigure := func(c wgtypes.Config) error {
		m.in(func() error {
			nl, err := wgctrl.New()
			if err != nil {
				return err
			}
			defer nl.Close()
			return nl.ConfigureDevice(wireguardName, c)
		})
		return m.nl.LinkSetMTU(m.link(wireguardName), 1400) // which the kernel tells of
	}
	stranger, port := keyOf("stranger").PublicKey(), 7
	for name, damage := range map[string]func() error{
		"a route is removed": func() error {
			_, dst, _ := net.ParseCIDR("10.244.2.0/24")
			return m.nl.RouteDel(&netlink.Route{Dst: dst})
		},
		"a route leads past it": func() error {
			_, dst, _ := net.ParseCIDR("10.244.2.0/24")
			return m.nl.RouteReplace(&netlink.Route{Dst: dst, Gw: net.ParseIP("10.89.0.102"),
				Protocol: unix.RTPROT_STATIC})
		},
		"it is removed": func() error { return m.nl.LinkDel(m.link(wireguardName)) },
		"it is down":    func() error { return m.nl.LinkSetDown(m.link(wireguardName)) },
		"a peer is removed": func() error {
			return reconfigure(wgtypes.Config{Peers: []wgtypes.PeerConfig{{PublicKey: keyOf("w3").PublicKey(),
				Remove: true}}})
		},
		"a stranger has a node's range": func() error {
			return reconfigure(wgtypes.Config{Peers: []wgtypes.PeerConfig{{PublicKey: stranger,
				AllowedIPs: ipNets(prefixesOf("10.244.3.0/24"))}}})
		},
		"its key is another": func() error {
			k := keyOf("other")
			return reconfigure(wgtypes.Config{PrivateKey: &k})
		},
		"its port is another": func() error { return reconfigure(wgtypes.Config{ListenPort: &port}) },
	} {
		if err := damage(); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		w.has("w1", securedRoutesOfW1)
		w.eventually(name, right("w2", "w3"))
		t.Logf("%s: mended", name)
	}
	a, sa := w.pod("w1", r1, "a")
	b, sb := w.pod("w2", r2, "b")
	from, to := netip.MustParseAddr(sa.IPs[0]), netip.MustParseAddr(sb.IPs[0])
	w.talk(a, b, from, to)
	t.Log("pods speak to each other")
	w.guarded(a, from)
	t.Log("nobody passes for a pod")
	// Another key: its agent starts with it, and others are told.
	w.leave("w2")
	w.secured("w2", "w2, again")
	again := nodeOf("w2")
	again.WireGuardKey = keyOf("w2, again").PublicKey()
	w.objects.Put(again)
	w.eventually("another key", right("w2, again", "w3"))
	w.talk(a, b, from, to)
	t.Log("they speak again after a change of key")
	w.withoutKeys(a, r1, right)
}

// withoutKeys sees nodes go that w1 spoke to, and w1 itself.
func (w *world) withoutKeys(a *machine, r1 *Routes, right func(...string) func() error) {
	t, m := w.t, w.nodes["w1"]
	t.Helper()
	w.objects.Put(nodeOf("w3")) // an agent of the release before tells none
	w.has("w1",
		strings.NewReplacer("10.244.3.0/24 tunnel 10.244.3.0\n", "",
			"fd44:0:0:3::/64 tunnel fd44::3:ffff:ffff:ffff:ffff\n", "").Replace(securedRoutesOfW1))
	w.eventually("a peer without a key", right("w2, again"))
	w.eventually("what is said of it", func() error {
		if why := r1.Unreached(); !strings.Contains(why,
			"node w3 has published no WireGuard key, and traffic to its pods is never sent unencrypted") {
			return errors.New(why)
		}
		return nil
	})
	w.objects.Delete(nodeOf("w2"))
	w.has("w1", refusals)
	w.eventually("a peer that left", right())
	m.in(func() error { // it limits how often it says that nobody is there, and senders would wait
		return errors.Join(os.WriteFile("/proc/sys/net/ipv4/icmp_ratelimit", []byte("0"), 0),
			os.WriteFile("/proc/sys/net/ipv6/icmp/ratelimit", []byte("0"), 0))
	})
	seen := w.router.capture("p-w1")
	for _, s := range []string{"10.244.2.9", "10.244.3.9", "fd44:0:0:3::9"} {
		for _, from := range []*machine{m, a} {
			from.in(func() error {
				if c, err := net.DialTimeout("tcp", net.JoinHostPort(s, "80"), time.Minute); err == nil {
					c.Close()
					return fmt.Errorf("somebody answers at %s", s)
				}
				return nil
			})
		}
	}
	// proof that the capture sees what leaves
	m.in(func() error { return say(nodeOf("w1").Addresses[0], netip.MustParseAddr("192.0.2.1")) })
	left := 0
	for _, p := range seen("192.0.2.1") {
		if ofPods(p.from) || ofPods(p.to) || p.port == DefaultWireGuardPort {
			t.Errorf("left: %+v", p)
		}
		if p.to == netip.MustParseAddr("192.0.2.1") {
			left++
		}
	}
	if left == 0 {
		t.Error("the capture saw nothing at all")
	}
	w.leave("w1")
	m.in(func() error { return Remove(context.Background()) })
	if d := m.device(); m.ours() != "" || d != nil {
		t.Errorf("a node that has left has routes %q and tunnel %+v", m.ours(), d)
	}
}

// guarded sees that a pod is not reached in the clear by who says that it is a pod: the router sends as one, with and
// without the guard.
func (w *world) guarded(a *machine, pod netip.Addr) {
	w.t.Helper()
	r := w.router
	r.up("link0", "10.244.9.9/32")
	r.route("10.244.1.0/24", "10.89.0.101")
	listener := a.listen(pod)
	defer listener.Close()
	lie := func() { r.in(func() error { return say(netip.MustParseAddr("10.244.9.9"), pod) }) }
	lie()
	if err := receive(listener, 1, netip.MustParseAddr("10.244.9.9")); err == nil {
		w.t.Error("a pod heard somebody who speaks in the clear as another pod")
	}
	w.nodes["w1"].in(func() error { // proof that it was the guard
		out, err := exec.Command("nft", "flush chain inet "+tunnelTable+" "+chainGuard).CombinedOutput()
		if err != nil {
			err = fmt.Errorf("%w: %s", err, out)
		}
		return err
	})
	w.eventually("without the guard", func() error {
		lie()
		return receive(listener, 1, netip.MustParseAddr("10.244.9.9"))
	})
	r.in(func() error {
		_, dst, _ := net.ParseCIDR("10.244.1.0/24")
		return netlink.RouteDel(&netlink.Route{Dst: dst})
	})
}

// talk has two pods speak by TCP; the listener hears the other's own address.
func (w *world) talk(a, b *machine, from, to netip.Addr) {
	w.t.Helper()
	var l net.Listener
	b.in(func() (err error) {
		l, err = net.Listen("tcp", netip.AddrPortFrom(to, 7001).String())
		return err
	})
	defer l.Close()
	heard := make(chan string, 16)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			raw, _ := io.ReadAll(io.LimitReader(c, 1<<20))
			host, _, _ := net.SplitHostPort(c.RemoteAddr().String())
			select {
			case heard <- fmt.Sprintf("%s: %d bytes", host, len(raw)):
			default:
			}
			c.Close()
		}
	}()
	w.eventually(fmt.Sprintf("from %s to %s", from, to), func() error {
		var said error
		a.in(func() error {
			c, err := net.DialTimeout("tcp", netip.AddrPortFrom(to, 7001).String(), 5*time.Second)
			if said = err; err != nil {
				return nil
			}
			defer c.Close()
			_, said = c.Write(make([]byte, 64<<10))
			return nil
		})
		if said != nil {
			return said
		}
		select {
		case got := <-heard:
			if want := fmt.Sprintf("%s: %d bytes", from, 64<<10); got != want {
				return fmt.Errorf("heard %s, want %s", got, want)
			}
			return nil
		case <-time.After(time.Minute):
			return errors.New("nothing was heard")
		}
	})
}
