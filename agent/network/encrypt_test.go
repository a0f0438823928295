package network

import (
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"
	"pgregory.net/rapid"
	"sigs.k8s.io/knftables"

	"keelson.dev/keelson/agent"
)

// keyOf returns a private key that is derived from a name.
func keyOf(name string) wgtypes.Key {
	return wgtypes.Key([]byte((name + strings.Repeat(".", 32))[:32]))
}

// keyed returns the node with a published key.
func keyed(n *agent.Peer) *agent.Peer {
	n.WireGuardKey = keyOf(n.Name).PublicKey()
	return n
}

// F108: in mode wireguard, all traffic to other nodes' pods goes through the tunnel, whatever their
// links. Nodes without a published key are not reachable, and the layout names them.
func TestPlanEncrypted(t *testing.T) {
	pub := func(name string) string { return keyOf(name).PublicKey().String() }
	const refused4 = "refuse 10.96.0.0/16\nrefuse 10.244.0.0/16\n"
	w1 := node("w1", "10.244.0.0/24", "10.89.0.101")
	copied := node("w3", "10.244.2.0/24", "10.89.0.103")
	copied.WireGuardKey = keyOf("w2").PublicKey()
	ours := node("w4", "10.244.3.0/24", "10.89.0.104")
	ours.WireGuardKey = keyOf("w1").PublicKey()
	for _, c := range []struct {
		name string
		s    Situation
		want string
	}{
		{"alone", situation(ModeWireGuard, "10.89.0.101/24", w1),
			refused4 + "wireguard on port 51871 [10.244.0.0], 1440 bytes\npods 1440 bytes\n"},
		{"a link or not", situation(ModeWireGuard, "10.89.0.101/24", w1,
			keyed(node("w3", "10.244.2.0/24", "10.89.1.103")), keyed(node("w2", "10.244.1.0/24", "10.89.0.102"))),
			refused4 + "route 10.244.1.0/24 by the tunnel to 10.244.1.0\nroute 10.244.2.0/24 by the tunnel " +
				"to 10.244.2.0\nwireguard on port 51871 [10.244.0.0], 1440 bytes\npeer w2 " + pub("w2") +
				" at 10.89.0.102:51871: [10.244.1.0/24]\n" +
				"peer w3 " + pub("w3") + " at 10.89.1.103:51871: [10.244.2.0/24]\npods 1440 bytes\n"},
		{"both families over one", situation(ModeWireGuard, "10.89.0.101/24",
			node("w1", "10.244.0.0/24,fd44::/64", "10.89.0.101"),
			keyed(node("w2", "10.244.1.0/24,fd44:0:0:1::/64", "10.89.0.102,fd89::102"))),
			"refuse 10.96.0.0/16\nrefuse 10.244.0.0/16\nroute 10.244.1.0/24 by the tunnel to 10.244.1.0\n" +
				"route fd44:0:0:1::/64 by the tunnel to fd44::1:ffff:ffff:ffff:ffff\n" +
				"wireguard on port 51871 [10.244.0.0 fd44::ffff:ffff:ffff:ffff], 1440 bytes\n" +
				"peer w2 " + pub("w2") + " at 10.89.0.102:51871: [10.244.1.0/24 fd44:0:0:1::/64]\npods 1440 bytes\n"},
		{"IPv6 between nodes", situation(ModeWireGuard, "fd89::101/64", node("w1", "fd44::/64", "fd89::101"),
			keyed(node("w2", "fd44:0:0:1::/64", "fd89::102"))),
			refused4 + "refuse fd44::/48\nroute fd44:0:0:1::/64 by the tunnel to " +
				"fd44::1:ffff:ffff:ffff:ffff\nrefuse fd96::/112\n" +
				"wireguard on port 51871 [fd44::ffff:ffff:ffff:ffff], 1420 bytes\n" +
				"peer w2 " + pub("w2") + " at [fd89::102]:51871: [fd44:0:0:1::/64]\npods 1420 bytes\n"},
		{"no key", situation(ModeWireGuard, "10.89.0.101/24", w1, node("w2", "10.244.1.0/24", "10.89.0.102")),
			refused4 + "wireguard on port 51871 [10.244.0.0], 1440 bytes\npods 1440 bytes\n" +
				"missing: node w2 has published no WireGuard key, and traffic to its pods is never sent unencrypted: " +
				"start its agent with --pod-network=wireguard, in a release that supports it\n"},
		{"one key twice", situation(ModeWireGuard, "10.89.0.101/24", w1,
			keyed(node("w2", "10.244.1.0/24", "10.89.0.102")), copied, ours),
			refused4 + "route 10.244.1.0/24 by the tunnel to 10.244.1.0\nwireguard on port 51871 " +
				"[10.244.0.0], 1440 bytes\n" +
				"peer w2 " + pub("w2") + " at 10.89.0.102:51871: [10.244.1.0/24]\npods 1440 bytes\n" +
				"missing: nodes w2 and w3 have the same WireGuard key, and pods of the second are not reachable: " +
				"remove wireguard.json from the state directory of the node that was copied\n" +
				"missing: nodes w1 and w4 have the same WireGuard key, and pods of the second are not reachable: " +
				"remove wireguard.json from the state directory of the node that was copied\n"},
		{"one range twice", situation(ModeWireGuard, "10.89.0.101/24", w1,
			keyed(node("w2", "10.244.1.0/24", "10.89.0.102")), keyed(node("w3", "10.244.1.0/24", "10.89.0.103"))),
			refused4 + "route 10.244.1.0/24 by the tunnel to 10.244.1.0\nwireguard on port 51871 " +
				"[10.244.0.0], 1440 bytes\n" +
				"peer w2 " + pub("w2") + " at 10.89.0.102:51871: [10.244.1.0/24]\npeer w3 " + pub("w3") +
				" at 10.89.0.103:51871: []\npods 1440 bytes\n" +
				"missing: node w3 has pods in 10.244.1.0/24, which is another node's\n"},
		{"no address of the family", situation(ModeWireGuard, "10.89.0.101/24", w1,
			keyed(node("w2", "10.244.1.0/24", "fd89::102"))),
			refused4 + "wireguard on port 51871 [10.244.0.0], 1440 bytes\npods 1440 bytes\n" +
				"missing: node w2 has no IPv4 address, the family of this node's tunnel: its pods are not reachable\n"},
		{"no link", Situation{Mode: ModeWireGuard, Self: "w1", Pods: prefixesOf("10.244.0.0/16"),
			Nodes: []*agent.Peer{keyed(node("w2", "10.244.1.0/24", "10.89.0.102"))}},
			"refuse 10.244.0.0/16\npods 0 bytes\nmissing: no interface of this node holds its address: " +
				"check --node-ip\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.s.Encryption = Encryption{Key: keyOf("w1"), Port: DefaultWireGuardPort}
			if got := Plan(c.s).String(); got != c.want {
				t.Errorf("got\n%swant\n%s", got, c.want)
			}
		})
	}
	s := situation(ModeWireGuard, "10.89.0.101/24", w1)
	s.Encryption = Encryption{Key: keyOf("w1"), Port: 7, Keepalive: 25 * time.Second}
	if got := Plan(s).String(); !strings.Contains(got, "on port 7 ") || !strings.Contains(got, "kept alive each 25s") ||
		strings.Contains(got, keyOf("w1").String()) {
		t.Errorf("with flags: %s", got)
	}
}

// F108: wherever nodes are and whatever keys they have published, nothing is routed past the
// tunnel, each range belongs to one peer, and two nodes agree on each other. The order of the nodes
// does not matter.
func TestPlanEncryptedHoldsTogether(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		count := rapid.IntRange(2, 6).Draw(t, "nodes")
		two := rapid.Bool().Draw(t, "two families")
		var nodes []*agent.Peer
		places, keys := map[string][]netip.Prefix{}, map[string]string{}
		for i := range count {
			name := fmt.Sprintf("n%d", i)
			ips, cidrs := fmt.Sprintf("10.89.%d.%d", rapid.IntRange(0, 1).Draw(t, "link"), 10+i),
				fmt.Sprintf("10.244.%d.0/24", rapid.IntRange(0, 7).Draw(t, "range"))
			places[name] = prefixesOf(ips + "/24")
			if two {
				cidrs += fmt.Sprintf(",fd44:0:0:%x::/64", i)
			}
			n := node(name, cidrs, ips)
			keys[name] = rapid.SampledFrom([]string{name, name, name, "", "n0"}).Draw(t, "key")
			if keys[name] != "" {
				n.WireGuardKey = keyOf(keys[name]).PublicKey()
			}
			nodes = append(nodes, n)
		}
		layouts := map[string]Layout{}
		for _, n := range nodes {
			s := Situation{Mode: ModeWireGuard, Self: n.Name, Nodes: nodes, OwnPods: n.PodCIDRs,
				Links: []Link{{"eth0", 1500, places[n.Name]}}, NodeIPs: n.Addresses,
				Pods: prefixesOf("10.244.0.0/16"), Encryption: Encryption{Key: keyOf(cmpOr(keys[n.Name], n.Name)),
					Port: 51871}}
			l := Plan(s)
			layouts[n.Name] = l
			s.Nodes = slices.Clone(nodes)
			slices.Reverse(s.Nodes)
			if again := Plan(s).String(); again != l.String() {
				t.Fatalf("%s:\n%s\nin another order:\n%s", n.Name, l, again)
			}
			at := map[netip.Prefix]string{}
			told := map[wgtypes.Key]bool{s.Encryption.Key.PublicKey(): true}
			for _, p := range l.WireGuard.Peers {
				if told[p.Key] || p.Key == (wgtypes.Key{}) {
					t.Fatalf("%s has the key of %s twice, or none", n.Name, p.Node)
				}
				told[p.Key] = true
				for _, a := range p.Allowed {
					if other := at[a]; other != "" || slices.Contains(n.PodCIDRs, a) {
						t.Fatalf("%s takes %s from %s and from %q", n.Name, a, p.Node, other)
					}
					at[a] = p.Node
				}
			}
			for p, r := range l.Routes {
				if r.Via.IsValid() != (at[p] != "") || r.Via.IsValid() && !r.Tunnel {
					t.Fatalf("%s routes %s by %+v, and its peer is %q", n.Name, p, r, at[p])
				}
			}
			for _, other := range nodes {
				for _, p := range podPrefixes(other) {
					if other != n && at[p] != other.Name && !slices.ContainsFunc(l.Missing, func(m string) bool {
						return strings.Contains(m, other.Name)
					}) {
						t.Fatalf("%s does not reach %s of %s and says nothing of it: %v", n.Name, p,
							other.Name, l.Missing)
					}
				}
			}
		}
		for name, l := range layouts {
			for _, p := range l.WireGuard.Peers {
				if other := layouts[p.Node].WireGuard; other.Key.PublicKey() != p.Key ||
					p.Endpoint.Addr() != places[p.Node][0].Addr() || int(p.Endpoint.Port()) != other.Port {
					t.Fatalf("%s takes the end of %s for %+v", name, p.Node, p)
				}
			}
		}
	})
}

func cmpOr(a, b string) string {
	if a == "" {
		return b
	}
	return a
}

// device is WireGuard's configuration in the kernel: a range belongs to the peer to which it was
// assigned last.
type device struct {
	wgtypes.Device
	peers map[wgtypes.Key]*wgtypes.Peer
}

func (d *device) apply(c wgtypes.Config) {
	if c.PrivateKey != nil {
		d.PrivateKey = *c.PrivateKey
		d.PrivateKey[0], d.PrivateKey[31] = d.PrivateKey[0]&^7, d.PrivateKey[31]&63|64 // clamped, as in the kernel
		delete(d.peers, c.PrivateKey.PublicKey())
	}
	if c.ListenPort != nil {
		d.ListenPort = *c.ListenPort
	}
	if c.FirewallMark != nil {
		d.FirewallMark = *c.FirewallMark
	}
	for _, p := range c.Peers {
		if p.Remove {
			delete(d.peers, p.PublicKey)
			continue
		}
		is := d.peers[p.PublicKey]
		if is == nil {
			is = &wgtypes.Peer{PublicKey: p.PublicKey}
			d.peers[p.PublicKey] = is
		}
		is.PresharedKey, is.Endpoint, is.PersistentKeepaliveInterval = *p.PresharedKey, p.Endpoint,
			*p.PersistentKeepaliveInterval
		if p.ReplaceAllowedIPs {
			is.AllowedIPs = nil
		}
		for _, a := range p.AllowedIPs {
			for _, other := range d.peers {
				other.AllowedIPs = slices.DeleteFunc(slices.Clone(other.AllowedIPs), func(b net.IPNet) bool {
					return a.String() == b.String()
				})
			}
			is.AllowedIPs = append(is.AllowedIPs, a)
		}
	}
}

func (d *device) read() *wgtypes.Device {
	out := d.Device
	for _, k := range slices.SortedFunc(maps.Keys(d.peers), func(a, b wgtypes.Key) int {
		return slices.Compare(a[:], b[:])
	}) {
		out.Peers = append(out.Peers, *d.peers[k])
	}
	return &out
}

// F108: from any state of the tunnel, one change leads to the wanted state, and the next change is
// empty.
func TestChangesOfTheTunnel(t *testing.T) {
	draw := func(t *rapid.T, label string) *WireGuard {
		w := &WireGuard{Encryption: Encryption{Key: keyOf("self"), Port: 51871}}
		if rapid.Bool().Draw(t, label+" alive") {
			w.Keepalive = 25 * time.Second
		}
		free := prefixesOf("10.244.1.0/24,10.244.2.0/24,10.244.3.0/24,fd44:0:0:1::/64,fd44:0:0:2::/64")
		for i := range rapid.IntRange(0, 4).Draw(t, label+" peers") {
			name := fmt.Sprintf("p%d", i)
			p := WireGuardPeer{Node: name, Key: keyOf(name).PublicKey(),
				Endpoint: netip.AddrPortFrom(netip.MustParseAddr(
					rapid.SampledFrom([]string{"192.0.2.1", "192.0.2.2", "2001:db8::1"}).Draw(t, label+" endpoint")),
					51871)}
			for range rapid.IntRange(0, 2).Draw(t, label+" ranges") {
				if len(free) > 0 {
					k := rapid.IntRange(0, len(free)-1).Draw(t, label+" range")
					p.Allowed = append(p.Allowed, free[k])
					free = slices.Delete(free, k, k+1)
				}
			}
			w.Peers = append(w.Peers, p)
		}
		return w
	}
	rapid.Check(t, func(t *rapid.T) {
		d := &device{peers: map[wgtypes.Key]*wgtypes.Peer{}}
		before := draw(t, "before")
		cfg, _ := wireGuardChanges(d.read(), before)
		d.apply(cfg)
		switch rapid.IntRange(0, 5).Draw(t, "damage") {
		case 1:
			d.PrivateKey = keyOf("other")
		case 2:
			d.ListenPort, d.FirewallMark = 7, 9
		case 3:
			k := keyOf("stranger").PublicKey()
			d.peers[k] = &wgtypes.Peer{PublicKey: k, AllowedIPs: ipNets(prefixesOf("0.0.0.0/0"))}
		case 4:
			for _, p := range d.peers {
				p.PresharedKey = keyOf("shared")
			}
		case 5:
			for _, p := range d.peers {
				p.Endpoint = nil
			}
		}
		want := before
		if rapid.Bool().Draw(t, "other nodes") {
			want = draw(t, "wanted")
		}
		cfg, _ = wireGuardChanges(d.read(), want)
		d.apply(cfg)
		if more, same := wireGuardChanges(d.read(), want); !same {
			t.Fatalf("after the change there is still %+v to do", more)
		}
		if d.PrivateKey.PublicKey() != want.Key.PublicKey() || d.ListenPort != want.Port || d.FirewallMark != 0 ||
			len(d.peers) != len(want.Peers) {
			t.Fatalf("the device is %+v with %d peers", d.Device, len(d.peers))
		}
		for _, p := range want.Peers {
			is := d.peers[p.Key]
			if is == nil || is.Endpoint.AddrPort() != p.Endpoint || is.PersistentKeepaliveInterval != want.Keepalive ||
				is.PresharedKey != (wgtypes.Key{}) || !sameAllowed(is.AllowedIPs, p.Allowed) {
				t.Fatalf("peer %s is %+v, want %+v", p.Node, is, p)
			}
		}
	})
}

// F108: a node has one key, which other users cannot read, until its file is removed. An invalid
// file is rejected with the remedy. Fields of later releases are ignored.
func TestKeyOfTheNode(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	path := filepath.Join(dir, KeyFile)
	a, err := OpenKey(dir)
	if err != nil {
		t.Fatal(err)
	}
	st, err := os.Stat(path)
	if err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("the file is %v, %v", st.Mode(), err)
	}
	if b, err := OpenKey(dir); b != a || err != nil {
		t.Errorf("another key the second time, %v", err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if b, err := OpenKey(dir); b == a || b == (wgtypes.Key{}) || err != nil {
		t.Errorf("after its removal the key is as before, %v", err)
	}
	for text, want := range map[string]string{
		fmt.Sprintf(`{"version":1,"privateKey":%q,"since":3}`, a): "",
		fmt.Sprintf(`{"version":2,"privateKey":%q}`, a):           "has version 2 of a later release",
		fmt.Sprintf(`{"privateKey":%q}`, a): "is not a WireGuard key file of an " +
			"agent: remove it",
		`{"version":1,"privateKey":"abc"}`:                          "contains no valid WireGuard key: remove it",
		fmt.Sprintf(`{"version":1,"privateKey":%q}`, wgtypes.Key{}): "contains no valid WireGuard key: remove it",
		"": "is not a WireGuard key file of an agent: remove it",
		"{" + strings.Repeat(" ", keyLimit) + "}": "is not a WireGuard key file of an agent: remove it",
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		k, err := OpenKey(dir)
		if want == "" && (k != a || err != nil) || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%.60s: %v, want %q", text, err, want)
		}
	}
	raw, _ := json.Marshal(keyFile{1, a.String()})
	if err := os.WriteFile(path, raw, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, 0o640); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenKey(dir); err == nil || !strings.Contains(err.Error(), "may read it (mode 0640)") {
		t.Errorf("a file that others may read: %v", err)
	}
}

// F108: the rules of a tunnel depend on its kind. Rules for another kind and rules of an earlier
// agent are removed.
func TestRulesOfTheTunnel(t *testing.T) {
	fake := knftables.NewFake(knftables.InetFamily, tunnelTable)
	secure := tunnelRulesetOf(Layout{WireGuard: &WireGuard{Pods: prefixesOf("10.244.0.0/16,fd44::/48")}})
	for _, c := range []struct {
		name string
		want tunnelRuleset
		text string
	}{
		{"none", tunnelRuleset{}, ""},
		{"vxlan", tunnelRulesetOf(Layout{Tunnel: &Tunnel{},
			Peers: []Peer{{Outer: netip.MustParseAddr("192.0.2.8")}, {Outer: netip.MustParseAddr("192.0.2.7")},
				{Outer: netip.MustParseAddr("2001:db8::7")}}}),
			"add rule inet keelson-tunnel arrived iifname keelson0 udp dport 4789 counter drop\n" +
				"add rule inet keelson-tunnel forwarded iifname keelson0 udp dport 4789 ip daddr { 192.0.2.7, " +
				"192.0.2.8 } counter drop\n" +
				"add rule inet keelson-tunnel forwarded iifname keelson0 udp dport 4789 ip6 daddr { 2001:db8::7 " +
				"} counter drop\n" +
				"add rule inet keelson-tunnel source oifname keelson-vx fib saddr type local masquerade\n"},
		{"wireguard", secure, "add rule inet keelson-tunnel encrypted oifname keelson-wg fib saddr type " +
			"local masquerade\n" +
			"add rule inet keelson-tunnel guard iifname != { keelson-wg , keelson0 , lo } ip saddr 10.244.0.0/16 ip " +
			"daddr 10.244.0.0/16 counter drop\n" +
			"add rule inet keelson-tunnel guard iifname != { keelson-wg , keelson0 , lo } ip6 saddr fd44::/48 ip6 " +
			"daddr fd44::/48 counter drop\n"},
		{"wireguard of one family", tunnelRulesetOf(Layout{WireGuard: &WireGuard{Pods: prefixesOf("10.244.0.0/16")}}),
			"add rule inet keelson-tunnel encrypted oifname keelson-wg fib saddr type local masquerade\n" +
				"add rule inet keelson-tunnel guard iifname != { keelson-wg , keelson0 , lo } ip saddr 10.244.0.0/16 " +
				"ip daddr 10.244.0.0/16 counter drop\n"},
		{"vxlan again", tunnelRulesetOf(Layout{Tunnel: &Tunnel{}}),
			"add rule inet keelson-tunnel arrived iifname keelson0 udp dport 4789 counter drop\n" +
				"add rule inet keelson-tunnel source oifname keelson-vx fib saddr type local masquerade\n"},
		{"none again", tunnelRuleset{}, ""},
	} {
		s := &tunnelRules{nft: fake} // of a new agent
		if err := s.syncRules(t.Context(), c.want); err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		var got strings.Builder
		for line := range strings.Lines(fake.Dump()) {
			if strings.HasPrefix(line, "add rule") {
				got.WriteString(line)
			}
		}
		if got.String() != c.text {
			t.Errorf("%s:\n%swant\n%s", c.name, got.String(), c.text)
		}
	}
}
