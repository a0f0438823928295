package proxy

import (
	"bytes"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"keelson.dev/keelson/test/testenv/space"
)

// F116: while the rules are flushed, nothing that the node or its pods send to addresses of
// Services leaves through the uplink, and no address resolution requests for them are sent there.
func TestNothingForServicesLeaves(t *testing.T) {
	node, outside := space.New(t), space.New(t)
	client := pod(t, node, "a", "10.244.0.2", "10.244.0.1")
	if err := space.In(node, func() error {
		return errors.Join(os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0),
			netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "up", MTU: 1400}, PeerName: "eth0",
				PeerNamespace: netlink.NsFd(int(outside))}))
	}); err != nil {
		t.Fatal(err)
	}
	addr(t, node, "up", "10.89.0.101/24", "")
	addr(t, outside, "eth0", "10.89.0.7/24", "")
	for _, one := range []struct {
		ns         netns.NsHandle
		link, cidr string
	}{{node, "up", "2001:db8::1/64"}, {outside, "eth0", "2001:db8::7/64"}} {
		if err := space.In(one.ns, func() error {
			l, err := netlink.LinkByName(one.link)
			if err != nil {
				return err
			}
			a, err := netlink.ParseAddr(one.cidr)
			if err != nil {
				return err
			}
			a.Flags = unix.IFA_F_NODAD
			return netlink.AddrAdd(l, a)
		}); err != nil {
			t.Fatal(err)
		}
	}
	p := &Proxy{Node: "w1", NodeIP: netip.MustParseAddr("10.89.0.101"), Log: slog.New(slog.DiscardHandler)}
	s := newState(nil, "w1")
	s.base = Base{ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"),
		netip.MustParsePrefix("fd00:96::/112")}}
	for range 2 { // the second run simulates the next agent
		s.routes = nil
		if err := space.In(node, func() error { return p.syncRoutes(s, s.wantedRoutes()) }); err != nil {
			t.Fatal(err)
		}
	}
	if err := space.In(node, func() error {
		l, err := netlink.LinkByName(sinkName)
		if err == nil && l.Attrs().MTU != 1400 {
			err = errors.New("it has another MTU than the uplink")
		}
		return err
	}); err != nil {
		t.Errorf("%s: %v", sinkName, err)
	}
	seen := capture(t, outside, "eth0")
	for at, marker := range map[string]string{"10.96.0.10": "10.89.0.7", "fd00:96::10": "2001:db8::7"} {
		for _, from := range []netns.NsHandle{node, client} {
			if from == client && at != "10.96.0.10" {
				continue // the kernel has no IPv6
			}
			knock(t, from, at, "?")
			knock(t, from, marker, "that is all")
			if frame := seen("that is all", at); frame != nil {
				t.Errorf("to %s, from the node: %v: on the uplink is seen %x", at, from == node, frame)
			}
		}
	}
	if err := space.In(node, func() error {
		l, err := netlink.LinkByName(sinkName)
		if err != nil {
			return err
		}
		return netlink.LinkDel(l)
	}); err != nil {
		t.Fatal(err)
	}
	if err := space.In(node, func() error {
		if isSinkUp() {
			return errors.New("it is not seen that the interface is gone")
		}
		s.routes = nil
		if err := p.syncRoutes(s, s.wantedRoutes()); err != nil || !isSinkUp() {
			return errors.Join(errors.New("the interface is not back"), err)
		}
		return removeSink()
	}); err != nil {
		t.Error(err)
	}
}

// knock sends a packet and ignores the result.
func knock(t *testing.T, from netns.NsHandle, to, what string) {
	t.Helper()
	if err := space.In(from, func() error {
		c, err := net.Dial("udp", net.JoinHostPort(to, "9"))
		if err != nil {
			return err
		}
		defer c.Close()
		_, err = c.Write([]byte(what))
		return err
	}); err != nil {
		t.Errorf("to %s: %v", to, err)
	}
}

// capture listens on a link. The returned function reads until a packet with the marker and returns
// the first frame that contains the address.
func capture(t *testing.T, ns netns.NsHandle, name string) func(marker, address string) []byte {
	t.Helper()
	var fd int
	if err := space.In(ns, func() error {
		l, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(htons(unix.ETH_P_ALL))); err !=
			nil {
			return err
		}
		limit := unix.NsecToTimeval(int64(20 * time.Second))
		return errors.Join(unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: htons(unix.ETH_P_ALL),
			Ifindex: l.Attrs().Index}),
			unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit))
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return func(marker, address string) (found []byte) {
		ip := netip.MustParseAddr(address)
		buf := make([]byte, 2048)
		for {
			n, _, err := unix.Recvfrom(fd, buf, 0)
			if err != nil {
				t.Fatalf("waiting for %q: %v", marker, err)
			}
			if found == nil && bytes.Contains(buf[:n], ip.AsSlice()) {
				found = bytes.Clone(buf[:n])
			}
			if bytes.Contains(buf[:n], []byte(marker)) {
				return found
			}
		}
	}
}

func htons(n uint16) uint16 { return n<<8 | n>>8 }
