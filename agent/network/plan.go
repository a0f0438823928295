package network

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"

	"keelson.dev/keelson/agent"
)

// Mode says how pods of one node reach those of another. It is the same on all nodes of a cluster.
type Mode string

// The modes.
const (
	ModeAuto   Mode = "auto"   // routes to nodes on the same link, VXLAN to all others
	ModeRoutes Mode = "routes" // nodes on other links are not reached
	ModeVXLAN  Mode = "vxlan"  // to all nodes, for links that carry no pod addresses
	// ModeWireGuard encrypts what goes to any other node. Nodes that have told no key are not reached.
	ModeWireGuard Mode = "wireguard"
)

// ParseMode reads a mode; "" is auto.
func ParseMode(s string) (Mode, error) {
	switch m := Mode(s); m {
	case "":
		return ModeAuto, nil
	case ModeAuto, ModeRoutes, ModeVXLAN, ModeWireGuard:
		return m, nil
	}
	return "", fmt.Errorf("pod network %q: want auto, routes, vxlan or wireguard", s)
}

// What the tunnel is in the kernel. Port and number are the same on all nodes.
const (
	tunnelName = "keelson-vx"
	tunnelPort = 4789 // RFC 7348
	tunnelVNI  = 75
	// overhead is what VXLAN puts around a packet: the frame's header, its own, and those of UDP and IP.
	overhead4, overhead6 = 14 + 8 + 8 + 20, 14 + 8 + 8 + 40
	leastMTU6            = 1280 // RFC 8200: IPv6 needs it

	noUplink = "no interface of this node holds its address: check --node-ip"
)

// Link is an interface of this node that holds one of its addresses.
type Link struct {
	Name  string
	MTU   int
	Addrs []netip.Prefix // with the length of the link's network
}

// Situation is what a Layout follows from.
type Situation struct {
	Mode    Mode
	Self    string
	NodeIPs []netip.Addr // of this node, the first one first
	Links   []Link
	Own     []netip.Prefix // of this node's pods
	Nodes   []*agent.Peer  // the others
	// Pods and Services are the ranges of the cluster.
	Pods, Services []netip.Prefix
	Encryption     Encryption // in ModeWireGuard
}

// Layout is what the kernel of this node is to know of other nodes' pods.
type Layout struct {
	Routes map[netip.Prefix]Route
	Tunnel *Tunnel // nil: no node needs it
	Peers  []Peer  // other ends of the tunnel, by name
	// WireGuard is the encrypted tunnel; nil: nothing is encrypted. With it there is no other tunnel.
	WireGuard *WireGuard
	MTU       int // of pods; 0 while this node's link is not known
	// Missing says why pods of a node are not reached, a sentence each.
	Missing []string
}

// Route says where packets for a range go.
type Route struct {
	Pods netip.Prefix
	Via  netip.Addr // invalid: nowhere, whoever sends to it is told so
	// Tunnel says that Via is the other end of the tunnel, encrypted or not, and no node on a link.
	Tunnel bool
}

// Tunnel is this node's end of the tunnels to all nodes.
type Tunnel struct {
	Local netip.Addr // of this node, from which it speaks to the other ends
	MAC   string
	MTU   int
	Addrs []netip.Addr // as which the node itself speaks through the tunnel
}

// Peer is another node's end of the tunnel.
type Peer struct {
	Node  string
	MAC   string
	Outer netip.Addr   // of the node
	Inner []netip.Addr // of its end, one of each family
}

// HardwareAddr is the address that a node's end of the tunnel has on it: all nodes know it by the node's name alone.
func HardwareAddr(node string) net.HardwareAddr {
	sum := sha256.Sum256([]byte("keelson tunnel of node " + node))
	mac := net.HardwareAddr(sum[:6])
	mac[0] = mac[0]&^1 | 2 // of one machine, and given by no maker
	return mac
}

// InnerAddr is the address that a node's end of the tunnel has among the node's pods: one that no pod gets. That is the
// range's own address with IPv4, and its last with IPv6, where the first is every router's.
func InnerAddr(pods netip.Prefix) netip.Addr {
	pods = pods.Masked()
	if pods.Addr().Is4() {
		return pods.Addr()
	}
	return lastAddr(pods)
}

func lastAddr(p netip.Prefix) netip.Addr {
	raw := p.Addr().As16()
	first := p.Bits()
	if p.Addr().Is4() {
		first += 96
	}
	for i := first; i < 128; i++ {
		raw[i/8] |= 1 << (7 - i%8)
	}
	a := netip.AddrFrom16(raw)
	if p.Addr().Is4() {
		a = a.Unmap()
	}
	return a
}

// Plan computes the layout.
func Plan(s Situation) Layout {
	l := Layout{Routes: map[netip.Prefix]Route{}}
	for _, p := range slices.Concat(s.Pods, s.Services) {
		l.Routes[p] = Route{Pods: p}
	}
	uplink, outer := s.uplink()
	var tunneled []*agent.Peer
	nodes := slices.Clone(s.Nodes)
	slices.SortFunc(nodes, func(a, b *agent.Peer) int { return cmp.Compare(a.Name, b.Name) })
	for _, n := range nodes {
		if n.Name != s.Self && l.reach(s, n) {
			tunneled = append(tunneled, n)
		}
	}
	l.MTU = uplink.MTU
	switch {
	case s.Mode == ModeWireGuard:
		l.encrypt(s, uplink, outer, tunneled)
	case len(tunneled) > 0:
		l.dig(s, uplink, outer, tunneled)
	}
	if l.MTU > 0 && l.MTU < leastMTU6 && slices.ContainsFunc(s.Pods, func(p netip.Prefix) bool { return p.Addr().Is6() }) {
		l.Missing = append(l.Missing, fmt.Sprintf("pods' interfaces would carry %d bytes, and IPv6 needs %d: give link %s a larger MTU", l.MTU, leastMTU6, uplink.Name))
	}
	return l
}

// Overlap refuses a node whose own address is in a range of the cluster: what others send to it would be looked for among pods
// or Services.
func (s Situation) Overlap() error {
	for _, ip := range s.NodeIPs {
		if flag, p := s.within(ip); flag != "" {
			return fmt.Errorf("--node-ip %s is in the cluster's --%s %s: give the node an address outside of it, or make the cluster with a range that no machine has addresses of", ip, flag, p)
		}
	}
	return nil
}

// within says which range of the cluster an address is in, by the flag that made it; "" = none.
func (s Situation) within(ip netip.Addr) (flag string, in netip.Prefix) {
	for flag, list := range map[string][]netip.Prefix{"cluster-cidr": s.Pods, "service-cidr": s.Services} {
		for _, p := range list {
			if p.Contains(ip.Unmap()) {
				return flag, p
			}
		}
	}
	return "", netip.Prefix{}
}

// reach routes to a node's pods, and says whether that takes a tunnel, whose routes are added by dig or encrypt.
func (l *Layout) reach(s Situation, n *agent.Peer) (tunnel bool) {
	for _, ip := range n.Addresses {
		if flag, p := s.within(ip); flag != "" {
			l.Missing = append(l.Missing, fmt.Sprintf("node %s has address %s, which is in the cluster's --%s %s: give it one outside", n.Name, ip, flag, p))
			return false
		}
	}
	for _, p := range podPrefixes(n) {
		if slices.Contains(s.Own, p) || l.Routes[p].Via.IsValid() {
			l.Missing = append(l.Missing, fmt.Sprintf("node %s has pods in %s, which is another node's", n.Name, p))
			continue
		}
		if s.Mode == ModeVXLAN || s.Mode == ModeWireGuard {
			tunnel = true
			continue
		}
		if via, ok := s.neighbour(n, p.Addr().Is4()); ok {
			l.Routes[p] = Route{Pods: p, Via: via}
			continue
		}
		if s.Mode == ModeRoutes {
			l.Missing = append(l.Missing, fmt.Sprintf("node %s has no %s address on a link of this node: its pods in %s are reached with --pod-network=auto or vxlan only",
				n.Name, family(p.Addr()), p))
			continue
		}
		tunnel = true
	}
	return tunnel
}

// dig makes the tunnel and routes to the pods of nodes that nothing else leads to.
func (l *Layout) dig(s Situation, uplink Link, outer netip.Addr, nodes []*agent.Peer) {
	if !outer.IsValid() {
		l.Missing = append(l.Missing, noUplink)
		return
	}
	overhead := overhead4
	if outer.Is6() {
		overhead = overhead6
	}
	t := Tunnel{Local: outer, MAC: HardwareAddr(s.Self).String(), MTU: uplink.MTU - overhead}
	for _, p := range s.Own {
		t.Addrs = append(t.Addrs, InnerAddr(p))
	}
	macs := map[string]string{t.MAC: s.Self}
	for _, n := range nodes {
		to := addressOf(n, outer.Is4())
		if !to.IsValid() {
			l.Missing = append(l.Missing, fmt.Sprintf("node %s has no %s address, in which this node speaks to others: its pods are not reached", n.Name, family(outer)))
			continue
		}
		peer := Peer{Node: n.Name, MAC: HardwareAddr(n.Name).String(), Outer: to}
		if other := macs[peer.MAC]; other != "" {
			l.Missing = append(l.Missing, fmt.Sprintf("nodes %s and %s have names that cannot be told apart on the tunnel: give one of them another name", other, n.Name))
			continue
		}
		macs[peer.MAC] = n.Name
		for _, p := range podPrefixes(n) {
			if slices.Contains(s.Own, p) {
				continue
			}
			peer.Inner = append(peer.Inner, InnerAddr(p))
			if !l.Routes[p].Via.IsValid() {
				l.Routes[p] = Route{Pods: p, Via: InnerAddr(p), Tunnel: true}
			}
		}
		l.Peers = append(l.Peers, peer)
	}
	l.Tunnel, l.MTU = &t, t.MTU
}

// uplink is the link that holds the node's first address, and that address.
func (s Situation) uplink() (Link, netip.Addr) {
	for _, ip := range s.NodeIPs {
		for _, link := range s.Links {
			for _, a := range link.Addrs {
				if a.Addr() == ip {
					return link, ip
				}
			}
		}
	}
	return Link{}, netip.Addr{}
}

// neighbour is the address of a node that is on a link of this one.
func (s Situation) neighbour(n *agent.Peer, four bool) (netip.Addr, bool) {
	for _, ip := range n.Addresses {
		if ip.Is4() != four || slices.Contains(s.NodeIPs, ip) {
			continue
		}
		for _, link := range s.Links {
			for _, a := range link.Addrs {
				if a.Contains(ip) && !a.IsSingleIP() {
					return ip, true
				}
			}
		}
	}
	return netip.Addr{}, false
}

func addressOf(n *agent.Peer, four bool) netip.Addr {
	for _, ip := range n.Addresses {
		if ip.Is4() == four {
			return ip
		}
	}
	return netip.Addr{}
}

// podPrefixes are the ranges of a node's pods that can be routed to.
func podPrefixes(n *agent.Peer) []netip.Prefix {
	var out []netip.Prefix
	for _, p := range n.PodCIDRs {
		if p = p.Masked(); p.IsValid() && !p.IsSingleIP() {
			out = append(out, p)
		}
	}
	return out
}

func family(a netip.Addr) string {
	if a.Is4() {
		return "IPv4"
	}
	return "IPv6"
}

// String is the layout for people and tests: a line for each thing.
func (l Layout) String() string {
	var b strings.Builder
	for _, p := range slices.SortedFunc(maps.Keys(l.Routes), netip.Prefix.Compare) {
		switch r := l.Routes[p]; {
		case r.Tunnel:
			fmt.Fprintf(&b, "route %s by the tunnel to %s\n", p, r.Via)
		case r.Via.IsValid():
			fmt.Fprintf(&b, "route %s by node %s\n", p, r.Via)
		default:
			fmt.Fprintf(&b, "refuse %s\n", p)
		}
	}
	if t := l.Tunnel; t != nil {
		fmt.Fprintf(&b, "tunnel from %s as %s %v, %d bytes\n", t.Local, t.MAC, t.Addrs, t.MTU)
	}
	for _, p := range l.Peers {
		fmt.Fprintf(&b, "peer %s %s at %s: %v\n", p.Node, p.MAC, p.Outer, p.Inner)
	}
	if w := l.WireGuard; w != nil {
		b.WriteString(w.String())
	}
	fmt.Fprintf(&b, "pods %d bytes\n", l.MTU)
	for _, m := range l.Missing {
		fmt.Fprintf(&b, "missing: %s\n", m)
	}
	return b.String()
}
