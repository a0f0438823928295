package l2announce

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/arp"
	"keelson.dev/keelson/internal/await"
	"keelson.dev/keelson/test/testenv/space"
)

// cluster holds the objects that the agents of a test see.
type cluster struct {
	mu        sync.Mutex
	services  []*v1.Service
	followers []chan agent.ObjectChanges
}

func (c *cluster) set(services ...*v1.Service) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.services = services
	for _, f := range c.followers {
		f <- agent.ObjectChanges{All: true}
	}
}

// view is the view of one agent.
type view struct {
	agent.Objects
	*cluster
	confirmed chan struct{}
}

func (v view) Services() []*v1.Service {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.services
}
func (v view) Confirmed() <-chan struct{} { return v.confirmed }
func (v view) Follow(context.Context, ...string) <-chan agent.ObjectChanges {
	v.mu.Lock()
	defer v.mu.Unlock()
	f := make(chan agent.ObjectChanges, 64)
	f <- agent.ObjectChanges{All: true}
	v.followers = append(v.followers, f)
	return f
}

// host is a machine on the link of a test.
type host struct {
	ns  netns.NsHandle
	mac net.HardwareAddr
}

// hosts creates machines on one link, a bridge in a separate namespace.
func hosts(t *testing.T, names ...string) map[string]host {
	t.Helper()
	hub := space.New(t)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(space.In(hub, func() error {
		b := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "hub"}}
		return errors.Join(netlink.LinkAdd(b), netlink.LinkSetUp(b))
	}))
	out := map[string]host{}
	for i, name := range names {
		h := host{ns: space.New(t)}
		must(space.In(hub, func() error {
			b, err := netlink.LinkByName("hub")
			if err != nil {
				return err
			}
			pair := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name, MasterIndex: b.Attrs().Index},
				PeerName: "eth0", PeerNamespace: netlink.NsFd(h.ns)}
			if err := netlink.LinkAdd(pair); err != nil {
				return err
			}
			l, err := netlink.LinkByName(name)
			return errors.Join(err, netlink.LinkSetUp(l))
		}))
		must(space.In(h.ns, func() error {
			l, err := netlink.LinkByName("eth0")
			if err != nil {
				return err
			}
			for _, a := range []string{fmt.Sprintf("192.0.2.%d/24", i+1), fmt.Sprintf("2001:db8::%d/64", i+1)} {
				ip, err := netlink.ParseAddr(a)
				if err != nil {
					return err
				}
				ip.Flags = unix.IFA_F_NODAD
				if err := netlink.AddrAdd(l, ip); err != nil {
					return err
				}
			}
			return netlink.LinkSetUp(l)
		}))
		must(space.In(h.ns, func() error {
			l, err := netlink.LinkByName("eth0")
			if err == nil {
				h.mac = l.Attrs().HardwareAddr
			}
			return err
		}))
		out[name] = h
	}
	return out
}

// knows returns the MAC address that the kernel of a host has for an address.
func (h host) knows(a netip.Addr) (mac string) {
	_ = space.In(h.ns, func() error {
		family := unix.AF_INET
		if a.Is6() {
			family = unix.AF_INET6
		}
		all, err := netlink.NeighList(0, family)
		for _, n := range all {
			if ip, _ := netip.AddrFromSlice(n.IP); ip.Unmap() == a &&
				n.State&(unix.NUD_FAILED|unix.NUD_INCOMPLETE) == 0 {
				mac = n.HardwareAddr.String()
			}
		}
		return err
	})
	return mac
}

// knock makes the kernel of a host resolve an address.
func (h host) knock(a netip.Addr) error {
	return space.In(h.ns, func() error {
		c, err := net.Dial("udp", netip.AddrPortFrom(a, 9).String())
		if err != nil {
			return err
		}
		defer c.Close()
		_, err = c.Write([]byte("?"))
		return err
	})
}

func announced(by string, addresses ...netip.Addr) *v1.Service {
	s := &v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "web",
		Annotations: map[string]string{announcedByAnnotation: by}},
		Spec: v1.ServiceSpec{Type: v1.ServiceTypeLoadBalancer}}
	for _, a := range addresses {
		s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, v1.LoadBalancerIngress{IP: a.String()})
	}
	return s
}

// runs starts the agent of a host. It runs until the returned function is called.
func (h host) runs(t *testing.T, name, ip string, v view) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	n := &Announcer{Node: name, NodeIPs: []netip.Addr{netip.MustParseAddr(ip)},
		Log: slog.New(slog.NewTextHandler(t.Output(), nil))}
	go func() { done <- space.In(h.ns, func() error { return n.Run(ctx, v, nil) }) }()
	var once sync.Once
	stop = func() {
		once.Do(func() {
			cancel()
			if err := <-done; !errors.Is(err, context.Canceled) {
				t.Errorf("%s: %v", name, err)
			}
		})
	}
	t.Cleanup(stop)
	return stop
}

func eventually(t *testing.T, what string, cond func() error) {
	t.Helper()
	await.Until(t.Context(), t, await.Patience, 10*time.Millisecond, what, cond)
}

func confirmed() chan struct{} { c := make(chan struct{}); close(c); return c }

var (
	vip4 = netip.MustParseAddr("192.0.2.100")
	vip6 = netip.MustParseAddr("2001:db8::100")
	far  = netip.MustParseAddr("198.51.100.1") // on no link
)

// F117: a host on the link reaches the node that announces the address. When another node takes
// over, hosts that know the first node are updated, with IPv4 and IPv6. This holds for an address
// without a network on the link too, although the kernel answers only for its own addresses.
func TestAnswersOnTheLink(t *testing.T) {
	at := hosts(t, "client", "w1", "w2")
	w1, w2, client := at["w1"], at["w2"], at["client"]
	both := &cluster{}
	w1.runs(t, "w1", "192.0.2.2", view{cluster: both, confirmed: confirmed()})
	w2.runs(t, "w2", "192.0.2.3", view{cluster: both, confirmed: confirmed()})
	if err := space.In(client.ns, func() error { // it is on the same link as the uplinks
		l, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		return netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index,
			Dst: &net.IPNet{IP: far.AsSlice(), Mask: net.CIDRMask(32, 32)}, Scope: netlink.SCOPE_LINK})
	}); err != nil {
		t.Fatal(err)
	}
	all := []netip.Addr{vip4, vip6, far}
	both.set(announced("w1", all...))
	is := func(h host) func() error {
		return func() error {
			for _, a := range all {
				if got := client.knows(a); got != h.mac.String() {
					return fmt.Errorf("%s is at %q, want %s", a, got, h.mac)
				}
			}
			return nil
		}
	}
	eventually(t, "w1 answers", func() error {
		for _, a := range all {
			if err := client.knock(a); err != nil {
				return err
			}
		}
		return is(w1)()
	})
	both.set(announced("w2", all...))
	began := time.Now()
	// only the announcement of w2 changes the ARP entry
	eventually(t, "the client has the address of w2 without a query", is(w2))
	t.Logf("moved after %v", time.Since(began))
	both.set()
	forget(t, client, all)
	eventually(t, "nobody answers any more", func() error {
		for _, a := range all {
			if err := client.knock(a); err != nil {
				return err
			}
			if got := client.knows(a); got != "" {
				forget(t, client, all)
				return fmt.Errorf("%s is at %s", a, got)
			}
		}
		return nil
	})
}

func forget(t *testing.T, h host, all []netip.Addr) {
	t.Helper()
	err := space.In(h.ns, func() error {
		l, err := netlink.LinkByName("eth0")
		for _, a := range all {
			_ = netlink.NeighDel(&netlink.Neigh{LinkIndex: l.Attrs().Index, IP: a.AsSlice()})
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// F117: before a control plane has confirmed a node's view, the node answers requests, and takes no
// address over from another node.
func TestTellsNothingUnconfirmed(t *testing.T) {
	at := hosts(t, "client", "w1", "w2")
	now, old := &cluster{}, &cluster{}
	at["w1"].runs(t, "w1", "192.0.2.2", view{cluster: now, confirmed: confirmed()})
	now.set(announced("w1", vip4))
	eventually(t, "w1 answers", func() error {
		if err := at["client"].knock(vip4); err != nil || at["client"].knows(vip4) == at["w1"].mac.String() {
			return err
		}
		return errors.New("it does not")
	})
	// w2 restarts after a power failure with its old view.
	back := view{cluster: old, confirmed: make(chan struct{})}
	old.set(announced("w2", vip4, vip6))
	at["w2"].runs(t, "w2", "192.0.2.3", back)
	eventually(t, "w2 answers for what nobody else has", func() error {
		if err := at["client"].knock(vip6); err != nil || at["client"].knows(vip6) == at["w2"].mac.String() {
			return err
		}
		return errors.New("it does not")
	})
	if got := at["client"].knows(vip4); got != at["w1"].mac.String() {
		t.Errorf("%s is at %s: w2 took it on its own", vip4, got)
	}
	close(back.confirmed)
	eventually(t, "w2 tells the link once it is confirmed", func() error {
		if got := at["client"].knows(vip4); got != at["w2"].mac.String() {
			return fmt.Errorf("it is at %s", got)
		}
		return nil
	})
}

// F117: requests are answered while another host floods the link with requests.
func TestAnswersInAFlood(t *testing.T) {
	at := hosts(t, "client", "w1", "flood")
	c := &cluster{}
	at["w1"].runs(t, "w1", "192.0.2.2", view{cluster: c, confirmed: confirmed()})
	c.set(announced("w1", vip4))
	stop, done := make(chan struct{}), make(chan int)
	go func() {
		sent := 0
		defer func() { done <- sent }()
		err := space.In(at["flood"].ns, func() error {
			l, err := netlink.LinkByName("eth0")
			if err != nil {
				return err
			}
			out := newLink("eth0", l.Attrs().Index, l.Attrs().HardwareAddr, slog.New(slog.DiscardHandler))
			if out.arp, err = openRawSocket(out.index, unix.ETH_P_ARP, arpFilter); err != nil {
				return err
			}
			defer out.shutDown()
			everybody := net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
			question := buildARP(arp.Request, out.mac, netip.MustParseAddr("192.0.2.3"), make(net.HardwareAddr, 6),
				netip.MustParseAddr("192.0.2.200"))
			for {
				select {
				case <-stop:
					return nil
				default:
					out.sendPacket(out.arp, unix.ETH_P_ARP, question, everybody)
					sent++
				}
			}
		})
		if err != nil {
			t.Error(err)
		}
	}()
	eventually(t, "w1 answers in a flood", func() error {
		if err := at["client"].knock(vip4); err != nil || at["client"].knows(vip4) == at["w1"].mac.String() {
			return err
		}
		return errors.New("it does not")
	})
	close(stop)
	t.Logf("%d questions of the flood", <-done)
}
