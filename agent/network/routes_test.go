package network

import (
	"net/netip"
	"os"
	"runtime"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func node(name, cidr, ip string) *v1.Node {
	n := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v1.NodeSpec{PodCIDR: cidr}}
	n.Status.Addresses = []v1.NodeAddress{{Type: v1.NodeHostName, Address: name}, {Type: v1.NodeInternalIP, Address: ip}}
	return n
}

// F108: a route to every other node that has pods and an address, none to ourselves.
func TestWanted(t *testing.T) {
	got := Wanted([]*v1.Node{
		node("w1", "10.244.0.0/24", "10.89.0.101"),
		node("w2", "10.244.1.0/24", "10.89.0.102"),
		node("w3", "", "10.89.0.103"),
		node("w4", "10.244.3.0/24", "not an address"),
	}, "w1")
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
