package network

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"keelson.dev/keelson/agent"
)

// node returns a node with pods in prefixes and addresses, both separated by commas.
func node(name, cidrs, ips string) *agent.Peer {
	n := &agent.Peer{Name: name, PodCIDRs: prefixesOf(cidrs)}
	for s := range strings.SplitSeq(ips, ",") {
		if ip, err := netip.ParseAddr(s); err == nil {
			n.Addresses = append(n.Addresses, ip)
		}
	}
	return n
}

func prefixesOf(text string) (out []netip.Prefix) {
	for s := range strings.SplitSeq(text, ",") {
		if s != "" {
			out = append(out, netip.MustParsePrefix(s))
		}
	}
	return out
}

// situation returns node w1 with addresses (and their prefix lengths) on a link of 1500 bytes.
func situation(mode Mode, addrs string, nodes ...*agent.Peer) Situation {
	s := Situation{Mode: mode, Self: "w1", Pods: prefixesOf("10.244.0.0/16"), Services: prefixesOf("10.96.0.0/16")}
	link := Link{Name: "eth0", MTU: 1500, Addrs: prefixesOf(addrs)}
	for _, a := range link.Addrs {
		s.NodeIPs = append(s.NodeIPs, a.Addr())
		if a.Addr().Is6() {
			s.Pods, s.Services = prefixesOf("10.244.0.0/16,fd44::/48"), prefixesOf("10.96.0.0/16,fd96::/112")
		}
	}
	s.Links = []Link{link}
	for _, n := range nodes {
		if n.Name == s.Self {
			s.OwnPods = n.PodCIDRs
		} else {
			s.Nodes = append(s.Nodes, n)
		}
	}
	return s
}

// F108: the layout for other nodes' pods, by where the nodes are.
func TestPlan(t *testing.T) {
	mac := func(name string) string { return HardwareAddr(name).String() }
	const refused4 = "refuse 10.96.0.0/16\nrefuse 10.244.0.0/16\n"
	for _, c := range []struct {
		name string
		s    Situation
		want string
	}{
		{"alone", situation("", "10.89.0.101/24", node("w1", "10.244.0.0/24", "10.89.0.101")),
			refused4 + "pods 1500 bytes\n"},
		{"one link", situation("", "10.89.0.101/24", node("w1", "10.244.0.0/24", "10.89.0.101"),
			node("w2", "10.244.1.0/24", "10.89.0.102"), node("w3", "", "10.89.0.103")),
			"refuse 10.96.0.0/16\nrefuse 10.244.0.0/16\nroute 10.244.1.0/24 by node 10.89.0.102\npods 1500 bytes\n"},
		{"two links", situation("", "10.89.0.101/24", node("w3", "10.244.2.0/24", "10.89.1.103"),
			node("w1", "10.244.0.0/24", "10.89.0.101"), node("w2", "10.244.1.0/24", "10.89.0.102")),
			refused4 + "route 10.244.1.0/24 by node 10.89.0.102\nroute 10.244.2.0/24 by the tunnel to 10.244.2.0\n" +
				"tunnel from 10.89.0.101 as " + mac("w1") + " [10.244.0.0], 1450 bytes\npeer w3 " + mac("w3") +
				" at 10.89.1.103: [10.244.2.0]\npods 1450 bytes\n"},
		{"an address that is no network's", situation("", "10.89.0.101/32", node("w1", "10.244.0.0/24", "10.89.0.101"),
			node("w2", "10.244.1.0/24", "10.89.0.102")),
			refused4 + "route 10.244.1.0/24 by the tunnel to 10.244.1.0\ntunnel from 10.89.0.101 as " + mac("w1") +
				" [10.244.0.0], 1450 bytes\npeer w2 " + mac("w2") + " at 10.89.0.102: [10.244.1.0]\npods 1450 bytes\n"},
		{"VXLAN to all", situation(ModeVXLAN, "10.89.0.101/24", node("w1", "10.244.0.0/24", "10.89.0.101"),
			node("w2", "10.244.1.0/24", "10.89.0.102")),
			refused4 + "route 10.244.1.0/24 by the tunnel to 10.244.1.0\ntunnel from 10.89.0.101 as " + mac("w1") +
				" [10.244.0.0], 1450 bytes\npeer w2 " + mac("w2") + " at 10.89.0.102: [10.244.1.0]\npods 1450 bytes\n"},
		{"routes alone", situation(ModeRoutes, "10.89.0.101/24", node("w1", "10.244.0.0/24", "10.89.0.101"),
			node("w2", "10.244.1.0/24", "10.89.1.102")),
			refused4 + "pods 1500 bytes\nmissing: node w2 has no IPv4 address on a link of this node: its pods in " +
				"10.244.1.0/24 are reachable only with --pod-network=auto or vxlan\n"},
		{"both families", situation("", "10.89.0.101/24,fd89::101/64",
			node("w1", "10.244.0.0/24,fd44::/64", "10.89.0.101,fd89::101"),
			node("w2", "10.244.1.0/24,fd44:0:0:1::/64", "10.89.0.102,fd89::102"),
			node("w3", "10.244.2.0/24,fd44:0:0:2::/64", "10.89.1.103,fd89:0:0:1::103")),
			refused4 + "route 10.244.1.0/24 by node 10.89.0.102\nroute 10.244.2.0/24 by the tunnel to " +
				"10.244.2.0\nrefuse fd44::/48\n" +
				"route fd44:0:0:1::/64 by node fd89::102\nroute fd44:0:0:2::/64 by the tunnel to " +
				"fd44::2:ffff:ffff:ffff:ffff\nrefuse fd96::/112\n" +
				"tunnel from 10.89.0.101 as " + mac("w1") + " [10.244.0.0 fd44::ffff:ffff:ffff:ffff], 1450 bytes\n" +
				"peer w3 " + mac("w3") + " at 10.89.1.103: [10.244.2.0 " +
				"fd44::2:ffff:ffff:ffff:ffff]\npods 1450 bytes\n"},
		{"IPv6 between nodes", situation(ModeVXLAN, "fd89::101/64", node("w1", "fd44::/64", "fd89::101"),
			node("w2", "fd44:0:0:1::/64", "fd89::102")),
			refused4 + "refuse fd44::/48\nroute fd44:0:0:1::/64 by the tunnel to " +
				"fd44::1:ffff:ffff:ffff:ffff\nrefuse fd96::/112\n" +
				"tunnel from fd89::101 as " + mac("w1") + " [fd44::ffff:ffff:ffff:ffff], 1430 bytes\n" +
				"peer w2 " + mac("w2") + " at fd89::102: [fd44::1:ffff:ffff:ffff:ffff]\npods 1430 bytes\n"},
		{"pods of two families over links of one",
			situation("", "10.89.0.101/24", node("w1", "10.244.0.0/24,fd44::/64", "10.89.0.101"),
				node("w2", "10.244.1.0/24,fd44:0:0:1::/64", "10.89.0.102")),
			refused4 + "route 10.244.1.0/24 by node 10.89.0.102\nroute fd44:0:0:1::/64 by the tunnel to " +
				"fd44::1:ffff:ffff:ffff:ffff\n" +
				"tunnel from 10.89.0.101 as " + mac("w1") + " [10.244.0.0 fd44::ffff:ffff:ffff:ffff], 1450 bytes\n" +
				"peer w2 " + mac("w2") + " at 10.89.0.102: [10.244.1.0 " +
				"fd44::1:ffff:ffff:ffff:ffff]\npods 1450 bytes\n"},
		{"no address", situation("", "10.89.0.101/24", node("w1", "10.244.0.0/24", "10.89.0.101"),
			node("w2", "10.244.1.0/24", "not an address")),
			refused4 + "tunnel from 10.89.0.101 as " + mac("w1") + " [10.244.0.0], 1450 bytes\npods 1450 bytes\n" +
				"missing: node w2 has no IPv4 address, the family of this node's tunnel: its pods are not reachable\n"},
		{"one range twice", situation("", "10.89.0.101/24", node("w1", "10.244.0.0/24", "10.89.0.101"),
			node("w2", "10.244.1.0/24", "10.89.0.102"),
			node("w3", "10.244.1.0/24", "10.89.0.103"), node("w4", "10.244.0.0/24", "10.89.0.104")),
			refused4 + "route 10.244.1.0/24 by node 10.89.0.102\npods 1500 bytes\nmissing: node w3 has pods in " +
				"10.244.1.0/24, which is another node's\n" +
				"missing: node w4 has pods in 10.244.0.0/24, which is another node's\n"},
		{"another node among the pods", situation("", "10.89.0.101/24", node("w1", "10.244.0.0/24", "10.89.0.101"),
			node("w2", "10.244.1.0/24", "10.244.200.7"),
			node("w3", "10.244.2.0/24", "10.96.0.9")),
			refused4 + "pods 1500 bytes\nmissing: node w2 has address 10.244.200.7, which is in the cluster's " +
				"--cluster-cidr 10.244.0.0/16: give it one outside\n" +
				"missing: node w3 has address 10.96.0.9, which is in the cluster's --service-cidr 10.96.0.0/16: give " +
				"it one outside\n"},
		{"no link", Situation{Self: "w1", NodeIPs: []netip.Addr{netip.MustParseAddr("10.89.0.101")},
			Pods: prefixesOf("10.244.0.0/16"), Nodes: []*agent.Peer{node("w2", "10.244.1.0/24", "10.89.0.102")}},
			"refuse 10.244.0.0/16\npods 0 bytes\nmissing: no interface of this node holds its address: " +
				"check --node-ip\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := Plan(c.s).String(); got != c.want {
				t.Errorf("got\n%swant\n%s", got, c.want)
			}
		})
	}
	small := situation(ModeVXLAN, "fd89::101/64", node("w1", "fd44::/64", "fd89::101"),
		node("w2", "fd44:0:0:1::/64", "fd89::102"))
	small.Links[0].MTU = 1300
	if got := Plan(small).Missing; len(got) != 1 || !strings.Contains(got[0], "IPv6 requires 1280") {
		t.Errorf("a link of 1300 bytes: %q", got)
	}
}

// F108: wherever nodes are, packets for every address of the cluster have one route or are
// rejected, and two nodes agree on each other's end of the tunnel. The order of the nodes does not
// matter.
func TestPlanHoldsTogether(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		count := rapid.IntRange(2, 6).Draw(t, "nodes")
		two := rapid.Bool().Draw(t, "two families")
		mode := rapid.SampledFrom([]Mode{ModeAuto, ModeVXLAN, ModeRoutes}).Draw(t, "mode")
		var nodes []*agent.Peer
		places := map[string][]netip.Prefix{}
		for i := range count {
			link := rapid.IntRange(0, 2).Draw(t, "link")
			bits := rapid.SampledFrom([]int{24, 32}).Draw(t, "bits")
			name := fmt.Sprintf("n%d", i)
			cidrs, ips := fmt.Sprintf("10.244.%d.0/24", i), fmt.Sprintf("10.89.%d.%d", link, 10+i)
			places[name] = prefixesOf(fmt.Sprintf("%s/%d", ips, bits))
			if two {
				cidrs += fmt.Sprintf(",fd44:0:0:%x::/64", i)
			}
			if two && rapid.Bool().Draw(t, "IPv6 on the link") {
				six := fmt.Sprintf("fd89:0:0:%d::%x", link, 16+i)
				ips += "," + six
				places[name] = append(places[name], netip.MustParsePrefix(six+"/64"))
			}
			nodes = append(nodes, node(name, cidrs, ips))
		}
		plan := func(self string, nodes []*agent.Peer) Layout {
			s := Situation{Mode: mode, Self: self, Nodes: nodes, Links: []Link{{"eth0", 1500, places[self]}},
				Pods: prefixesOf("10.244.0.0/16"), Services: prefixesOf("10.96.0.0/16")}
			if two {
				s.Pods, s.Services = append(s.Pods, netip.MustParsePrefix("fd44::/48")),
					append(s.Services, netip.MustParsePrefix("fd96::/112"))
			}
			s.OwnPods = nodes[slices.IndexFunc(nodes, func(n *agent.Peer) bool { return n.Name == self })].PodCIDRs
			for _, p := range places[self] {
				s.NodeIPs = append(s.NodeIPs, p.Addr())
			}
			return Plan(s)
		}
		layouts := map[string]Layout{}
		for _, n := range nodes {
			l := plan(n.Name, nodes)
			layouts[n.Name] = l
			mixed := slices.Clone(nodes)
			slices.Reverse(mixed)
			if again := plan(n.Name, mixed).String(); again != l.String() {
				t.Fatalf("%s:\n%s\nin another order:\n%s", n.Name, l, again)
			}
			for _, p := range slices.Concat(prefixesOf("10.244.0.0/16"), prefixesOf("10.96.0.0/16")) {
				if r, ok := l.Routes[p]; !ok || r.Via.IsValid() {
					t.Fatalf("%s does not refuse %s", n.Name, p)
				}
			}
			for _, other := range nodes {
				for _, p := range podPrefixes(other) {
					r, ok := l.Routes[p]
					if other == n && ok || other != n && !ok && mode != ModeRoutes {
						t.Fatalf("%s has for %s of %s: %v, %v", n.Name, p, other.Name, r, ok)
					}
					if r.Tunnel && (l.Tunnel == nil || l.MTU != l.Tunnel.MTU || mode == ModeRoutes) ||
						ok && !r.Tunnel && mode == ModeVXLAN {
						t.Fatalf("%s reaches %s by %v with tunnel %v", n.Name, p, r, l.Tunnel)
					}
				}
			}
		}
		for name, l := range layouts {
			for _, p := range l.Peers {
				other := layouts[p.Node].Tunnel
				if other != nil && (other.MAC != p.MAC || other.Local != p.Outer ||
					!slices.Equal(other.Addrs, p.Inner)) {
					t.Fatalf("%s takes the end of %s for %v, and it is %v", name, p.Node, p, other)
				}
				for _, a := range p.Inner {
					if !slices.ContainsFunc(podPrefixes(nodes[p.Node[1]-'0']), func(c netip.Prefix) bool {
						return c.Contains(a)
					}) {
						t.Fatalf("%s is no address of %s", a, p.Node)
					}
				}
			}
		}
	})
}

// F108: modes are parsed, and an unknown mode is rejected.
func TestParseMode(t *testing.T) {
	for text, want := range map[string]string{"": "auto", "auto": "auto", "routes": "routes", "vxlan": "vxlan",
		"wireguard": "wireguard"} {
		if got, err := ParseMode(text); string(got) != want || err != nil {
			t.Errorf("%q is %q, %v", text, got, err)
		}
	}
	for text, want := range map[string]string{"ipip": "want auto, routes, vxlan or wireguard",
		"WireGuard": "want auto"} {
		if _, err := ParseMode(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", text, err)
		}
	}
}
