package network

import (
	"net"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// F108: that an entry for another end of the tunnel is removed is seen, though the kernel no longer calls it permanent then; those of
// others that come and go are spared.
func TestRemovedNeighbourIsSeen(t *testing.T) {
	m := newMachine(t, "w1")
	m.check(m.nl.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: tunnelName}, PeerName: "other"}))
	m.up(tunnelName)
	var r Routes
	r.current.Store(
		&plannedLayout{layout: Layout{Peers: []Peer{{Inner: []netip.Addr{netip.MustParseAddr("10.244.3.0"),
			netip.MustParseAddr("fd44::3")}}}}})
	done := make(chan struct{})
	defer close(done)
	updates := make(chan netlink.NeighUpdate, 64)
	m.check(netlink.NeighSubscribeAt(m.ns, updates, done))
	seen := func(ip string) (yes bool) {
		t.Helper()
		n := &netlink.Neigh{LinkIndex: m.link(tunnelName).Attrs().Index, IP: net.ParseIP(ip),
			HardwareAddr: HardwareAddr("w3"), State: netlink.NUD_PERMANENT}
		m.check(m.nl.NeighSet(n))
		for made := true; made; {
			u := <-updates
			made = !u.IP.Equal(n.IP)
		}
		m.check(m.nl.NeighDel(n))
		for {
			u := <-updates
			if !u.IP.Equal(n.IP) {
				continue
			}
			if yes = yes || r.concernsNeighbour(u); u.Type == unix.RTM_DELNEIGH {
				return yes
			}
		}
	}
	for ip, want := range map[string]bool{"10.244.3.0": true, "fd44::3": true, "192.0.2.9": false} {
		if got := seen(ip); got != want {
			t.Errorf("%s is removed: seen %t, want %t", ip, got, want)
		}
	}
}
