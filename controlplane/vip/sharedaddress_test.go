package vip

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"keelson.dev/keelson/internal/await"
	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/test/testenv/space"
)

var shared = netip.MustParseAddr("192.0.2.100")

// host is a machine on the test's link, a bridge in a network namespace.
type host struct {
	ns  netns.NsHandle
	ip  netip.Addr
	mac string
}

func hosts(t *testing.T, n int) []host {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("namespaces need root")
	}
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
	var out []host
	for i := range n {
		h := host{ns: space.New(t), ip: netip.AddrFrom4([4]byte{192, 0, 2, byte(i + 1)})}
		must(space.In(hub, func() error {
			b, err := netlink.LinkByName("hub")
			if err != nil {
				return err
			}
			name := fmt.Sprintf("h%d", i)
			pair := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name, MasterIndex: b.Attrs().Index},
				PeerName: "eth0", PeerNamespace: netlink.NsFd(h.ns)}
			if err := netlink.LinkAdd(pair); err != nil {
				return err
			}
			l, err := netlink.LinkByName(name)
			return errors.Join(err, netlink.LinkSetUp(l))
		}))
		must(h.add(h.ip.String() + "/24"))
		must(space.In(h.ns, func() error {
			l, err := netlink.LinkByName("eth0")
			if err == nil {
				h.mac = l.Attrs().HardwareAddr.String()
			}
			return err
		}))
		out = append(out, h)
	}
	return out
}

func (h host) add(cidr string) error {
	return space.In(h.ns, func() error {
		l, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		a, err := netlink.ParseAddr(cidr)
		return errors.Join(err, netlink.AddrAdd(l, a), netlink.LinkSetUp(l))
	})
}

// has reports whether the host's kernel has the shared address.
func (h host) has() (has bool) {
	_ = space.In(h.ns, func() error {
		l, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		all, err := netlink.AddrList(l, netlink.FAMILY_V4)
		for _, a := range all {
			has = has || a.IP.String() == shared.String()
		}
		return err
	})
	return has
}

// finds returns the hardware address of the shared address in the host's neighbor table, after the
// host has sent to it.
func (h host) finds() (mac string) {
	_ = space.In(h.ns, func() error {
		if c, err := net.Dial("udp", netip.AddrPortFrom(shared, 9).String()); err == nil {
			_, _ = c.Write([]byte("?"))
			c.Close()
		}
		all, err := netlink.NeighList(0, unix.AF_INET)
		for _, n := range all {
			if n.IP.String() == shared.String() && n.State&(unix.NUD_FAILED|unix.NUD_INCOMPLETE) == 0 {
				mac = n.HardwareAddr.String()
			}
		}
		return err
	})
	return mac
}

// holder is a replica that holds the address; while frozen, its confirmations are delayed.
type holder struct {
	frozen sync.Mutex
	ended  func() error // waits for the end of Hold and returns its result
	stop   func() error
}

func (h host) holds(t *testing.T, peers ...netip.Addr) *holder {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	o, done := &holder{}, make(chan error, 1)
	a := Address{IP: shared, Own: h.ip, Peers: func() []netip.Addr {
		return peers
	}, Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
		Confirm: func(context.Context) error {
			for !o.frozen.TryLock() {
				if err := wait.Delay(ctx, time.Millisecond); err != nil { // ends the loop of a failed test
					return err
				}
			}
			defer o.frozen.Unlock()
			return nil
		}}
	go func() { done <- space.In(h.ns, func() error { return a.Hold(ctx) }) }()
	o.ended = sync.OnceValue(func() error {
		select {
		case err := <-done:
			return err
		case <-time.After(time.Minute):
			return errors.New("it goes on")
		}
	})
	o.stop = func() error { cancel(); return o.ended() }
	t.Cleanup(func() { _ = o.stop() })
	return o
}

func eventually(t *testing.T, what string, cond func() bool) time.Duration {
	t.Helper()
	began := time.Now()
	await.Until(t.Context(), t, await.Patience, 5*time.Millisecond, what, func() error {
		if !cond() {
			return errors.New("it is not so")
		}
		return nil
	})
	return time.Since(began)
}

// Hosts reach the shared address at its holder. When another replica takes it, hosts that knew the
// previous holder are updated, although the kernel of the suspended previous holder still responds
// for a while. Afterwards that kernel has no address, and gets it back only after a confirmation. A
// stopped holder removes the address.
func TestAddressFollowsTheHolder(t *testing.T) {
	h := hosts(t, 3)
	client, a, b := h[0], h[1], h[2]
	first := a.holds(t, b.ip)
	eventually(t, "the address is not found at the first holder", func() bool { return client.finds() == a.mac })
	first.frozen.Lock()
	second := b.holds(t, a.ip)
	took := eventually(t, "the address is not found at the second holder", func() bool {
		return client.finds() == b.mac
	})
	gone := eventually(t, "the kernel of the first keeps the address", func() bool { return !a.has() })
	t.Logf("found at the second after %s; gone from the first, whose process hangs, after %s", took, took+gone)
	if client.finds() != b.mac {
		t.Error("the address went away from the second with the first")
	}
	if err := second.stop(); !errors.Is(err, context.Canceled) {
		t.Errorf("the second ended with %v", err)
	}
	if b.has() {
		t.Error("the second left the address behind")
	}
	first.frozen.Unlock()
	eventually(t, "the first does not go on", func() bool { return client.finds() == a.mac })
	if err := first.stop(); !errors.Is(err, context.Canceled) || a.has() {
		t.Errorf("the first ended with %v; has the address: %v", err, a.has())
	}
}

// An address of a machine that is not a replica is not taken; the error names the machine.
func TestAddressOfAnotherIsRefused(t *testing.T) {
	h := hosts(t, 3)
	if err := h[2].add(shared.String() + "/32"); err != nil {
		t.Fatal(err)
	}
	o := h[0].holds(t, h[1].ip)
	if err := o.ended(); !errors.Is(err, ErrTaken) || !strings.Contains(err.Error(), h[2].mac) {
		t.Errorf("%v", err)
	}
	if h[0].has() {
		t.Error("it took the address")
	}
	// If the same machine is a replica, it counts as the previous leader.
	again := h[0].holds(t, h[1].ip, h[2].ip)
	eventually(t, "the address is not taken over from a replica", h[0].has)
	_ = again.stop()
}

// Clear removes an address that a killed replica has left. A missing address is not an error.
func TestClear(t *testing.T) {
	h := hosts(t, 1)[0]
	a := Address{IP: shared, Own: h.ip}
	if err := h.add(shared.String() + "/32"); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := space.In(h.ns, a.RemoveStale); err != nil || h.has() {
			t.Errorf("%v; has it: %v", err, h.has())
		}
	}
}

func TestCheck(t *testing.T) {
	for ip, ok := range map[string]bool{"192.0.2.10": true, "192.0.2.1": false, "": false, "x": false,
		"2001:db8::1": false, "127.0.0.1": false, "0.0.0.0": false, "224.0.0.1": false} {
		if _, err := ParseAddress(ip, "192.0.2.1"); (err == nil) != ok ||
			err != nil && !strings.Contains(err.Error(), "--api-address-shared") {
			t.Errorf("%q: %v", ip, err)
		}
	}
}

// Missing permissions are reported at the start: when the replica becomes the leader it is too
// late.
func TestPermitted(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs: root, which alone has rights to give up")
	}
	for _, c := range []struct {
		gone []int
		want []string
	}{
		{nil, nil},
		{[]int{unix.CAP_NET_RAW}, []string{"CAP_NET_RAW", "run install.sh again"}},
		{[]int{unix.CAP_NET_ADMIN}, []string{"CAP_NET_ADMIN", "run install.sh again"}},
		{[]int{unix.CAP_NET_ADMIN, unix.CAP_NET_RAW}, []string{"to open a packet socket", "to change addresses"}},
	} {
		said := make(chan error)
		go func() {
			runtime.LockOSThread() // not unlocked, so that the thread ends without being reused
			if err := giveUp(c.gone...); err != nil {
				said <- fmt.Errorf("giving up %v: %w", c.gone, err)
				return
			}
			said <- CheckPermissions()
		}()
		err := <-said
		if (err == nil) != (c.want == nil) {
			t.Errorf("without %v: %v", c.gone, err)
		}
		for _, want := range c.want {
			if !strings.Contains(fmt.Sprint(err), want) {
				t.Errorf("without %v it says %v, want %q in it", c.gone, err, want)
			}
		}
	}
}

// giveUp drops capabilities of this thread.
func giveUp(capabilities ...int) error {
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&head, &data[0]); err != nil {
		return err
	}
	for _, c := range capabilities {
		data[c/32].Effective &^= 1 << (c % 32)
	}
	return unix.Capset(&head, &data[0])
}

// Gratuitous ARP is sent from when the address is assigned, however long that took, and again after
// a gap in which the kernel removed it.
func TestTheLinkIsTold(t *testing.T) {
	var had tenure
	now := time.Unix(1_000_000, 0) // earlier rounds without a confirmation do not count
	for round := range 2 {
		for n := range announcements + 3 {
			if begins, announce := had.recordRenewal(now); begins != (n == 0) || announce != (n < announcements) {
				t.Errorf("round %d, renewal %d: begins %v, announced %v", round, n, begins, announce)
			}
			now = now.Add(renewal)
		}
		now = now.Add(lifetime)
	}
	now = now.Add(-lifetime)
	if begins, announce := had.recordRenewal(now); begins || announce {
		t.Errorf("one renewal that was missed is no gap: begins %v, announced %v", begins, announce)
	}
}
