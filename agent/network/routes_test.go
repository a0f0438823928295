package network

import (
	"net/netip"
	"os"
	"runtime"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"keelson.dev/keelson/agent"
)

func peer(name, cidr, ip string) *agent.Peer {
	return &agent.Peer{Name: name, PodCIDRs: []netip.Prefix{netip.MustParsePrefix(cidr)}, Addresses: []netip.Addr{netip.MustParseAddr(ip)}}
}

// F108: a route to every other node that has pods and an address of their family.
func TestWanted(t *testing.T) {
	got := Wanted([]*agent.Peer{
		peer("w2", "10.244.1.0/24", "10.89.0.102"),
		peer("w3", "fd00::/64", "10.89.0.103"),
		{Name: "w4", PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.3.0/24")}},
		{Name: "w5", Addresses: []netip.Addr{netip.MustParseAddr("10.89.0.105")}},
	})
	want := netip.MustParsePrefix("10.244.1.0/24")
	if len(got) != 1 || got[want].Via != netip.MustParseAddr("10.89.0.102") {
		t.Errorf("got %v", got)
	}
}

// The kernel's table follows the nodes: added, moved, removed; routes of others stay.
func TestSyncRoutes(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root for a network namespace")
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked: the thread ends with its namespace
		ns, err := netns.New()
		if err != nil {
			t.Errorf("namespace: %v", err)
			return
		}
		defer ns.Close()
		syncInNamespace(t)
	}()
	<-done
}

func syncInNamespace(t *testing.T) {
	check := func(err error) {
		if err != nil {
			t.Errorf("%v", err)
			runtime.Goexit()
		}
	}
	check(netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}, PeerName: "peer"}))
	for _, name := range []string{"eth0", "peer"} {
		l, err := netlink.LinkByName(name)
		check(err)
		if name == "eth0" {
			a, err := netlink.ParseAddr("10.89.0.101/24")
			check(err)
			check(netlink.AddrAdd(l, a))
		}
		check(netlink.LinkSetUp(l))
	}
	steps := []map[string]string{
		{"10.244.1.0/24": "10.89.0.102", "10.244.2.0/24": "10.89.0.103"},
		{"10.244.1.0/24": "10.89.0.104"}, // moved to another node; the other one left
		{},
	}
	for i, step := range steps {
		want := map[netip.Prefix]Route{}
		for p, via := range step {
			prefix := netip.MustParsePrefix(p)
			want[prefix] = Route{prefix, netip.MustParseAddr(via)}
		}
		check(syncRoutes(want))
		routes, err := netlink.RouteList(nil, netlink.FAMILY_V4)
		check(err)
		have, foreign := map[string]string{}, 0
		for _, r := range routes {
			if r.Protocol == routeProtocol {
				have[r.Dst.String()] = r.Gw.String()
			} else {
				foreign++
			}
		}
		if len(have) != len(step) || foreign == 0 {
			t.Errorf("step %d: have %v and %d others, want %v and the link's own", i, have, foreign, step)
		}
		for p, via := range step {
			if have[p] != via {
				t.Errorf("step %d: route to %s goes via %s, want %s", i, p, have[p], via)
			}
		}
	}
}
