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

// Mode selects how pods reach pods on other nodes: by routes, VXLAN or WireGuard. It must be the
// same on all nodes of a cluster.
type Mode string

// Values of Mode.
const (
	ModeAuto   Mode = "auto"   // routes to nodes on the same link, VXLAN to all others
	ModeRoutes Mode = "routes" // nodes on other links are not reachable
	ModeVXLAN  Mode = "vxlan"  // VXLAN to all nodes, for links that do not carry pod addresses
	// ModeWireGuard encrypts all traffic to other nodes. Nodes without a published key are not
	// reachable.
	ModeWireGuard Mode = "wireguard"
)

// ParseMode parses the name of a Mode. The empty name means ModeAuto.
func ParseMode(s string) (Mode, error) {
	switch m := Mode(s); m {
	case "":
		return ModeAuto, nil
	case ModeAuto, ModeRoutes, ModeVXLAN, ModeWireGuard:
		return m, nil
	}
	return "", fmt.Errorf("pod network %q: want auto, routes, vxlan or wireguard", s)
}

// Parameters of the VXLAN tunnel. Port and VNI are the same on all nodes.
const (
	tunnelName = "keelson-vx"
	tunnelPort = 4789 // RFC 7348
	tunnelVNI  = 75
	// The bytes that VXLAN adds to a packet: the inner Ethernet header, the VXLAN header, and the
	// UDP and IP headers.
	overhead4, overhead6 = 14 + 8 + 8 + 20, 14 + 8 + 8 + 40
	minMTU6              = 1280 // required by IPv6 (RFC 8200)

	noUplink = "no interface of this node holds its address: check --node-ip"
)

// Link is a network interface of this node that holds one of the node's addresses.
type Link struct {
	Name  string
	MTU   int
	Addrs []netip.Prefix // with the prefix length of the link's network
}

// Situation is the input of Plan: the node, its links, the other nodes and the cluster's address
// ranges.
type Situation struct {
	Mode    Mode
	Self    string
	NodeIPs []netip.Addr // addresses of this node, the primary one first
	Links   []Link
	OwnPods []netip.Prefix // this node's pod ranges
	Nodes   []*agent.Peer  // the other nodes
	// Pods and Services are the cluster's ranges.
	Pods, Services []netip.Prefix
	Encryption     Encryption // used in ModeWireGuard
}

// Layout is the kernel configuration that connects this node to the pods of other nodes: routes,
// tunnels and the MTU.
type Layout struct {
	Routes map[netip.Prefix]Route
	Tunnel *Tunnel // VXLAN interface; nil: no node requires it
	Peers  []Peer  // other ends of the VXLAN tunnel, by node name
	// WireGuard is the encrypted tunnel; nil: no encryption. It excludes Tunnel.
	WireGuard *WireGuard
	MTU       int // MTU of pod interfaces; 0 while this node's link is unknown
	// Missing states why the pods of a node are not reachable, one sentence per reason.
	Missing []string
}

// Route is the next hop for packets to a range of pod addresses.
type Route struct {
	Pods netip.Prefix
	Via  netip.Addr // next hop; invalid: packets are rejected
	// Tunnel reports that Via is the other end of the tunnel (encrypted or not), rather than a node
	// on a link.
	Tunnel bool
}

// Tunnel is the configuration of this node's VXLAN interface, which is its end of the tunnels to
// all other nodes.
type Tunnel struct {
	Local netip.Addr // this node's outer source address
	MAC   string
	MTU   int
	Addrs []netip.Addr // source addresses of the node's own packets in the tunnel
}

// Peer is another node's end of the VXLAN tunnel: its addresses and its MAC address.
type Peer struct {
	Node  string
	MAC   string
	Outer netip.Addr   // address of the node
	Inner []netip.Addr // addresses of the node's VXLAN interface, one per family
}

// HardwareAddr returns the MAC address of a node's VXLAN interface. It is derived from the node's
// name, so that all nodes can compute it.
func HardwareAddr(node string) net.HardwareAddr {
	sum := sha256.Sum256([]byte("keelson tunnel of node " + node))
	mac := net.HardwareAddr(sum[:6])
	mac[0] = mac[0]&^1 | 2 // unicast, locally administered
	return mac
}

// InnerAddr returns the address of a node's VXLAN or WireGuard interface: an address in the node's
// pod range that no pod gets. For IPv4 it is the network address. For IPv6 it is the last address,
// because the first address is the subnet-router anycast address.
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

// Plan computes the Layout for a Situation. It is pure.
func Plan(s Situation) Layout {
	l := Layout{Routes: map[netip.Prefix]Route{}}
	for _, p := range slices.Concat(s.Pods, s.Services) {
		l.Routes[p] = Route{Pods: p}
	}
	uplink, outer := s.findUplink()
	var tunneled []*agent.Peer
	nodes := slices.Clone(s.Nodes)
	slices.SortFunc(nodes, func(a, b *agent.Peer) int { return cmp.Compare(a.Name, b.Name) })
	for _, n := range nodes {
		if n.Name != s.Self && l.addNodeRoutes(s, n) {
			tunneled = append(tunneled, n)
		}
	}
	l.MTU = uplink.MTU
	switch {
	case s.Mode == ModeWireGuard:
		l.addWireGuard(s, uplink, outer, tunneled)
	case len(tunneled) > 0:
		l.addTunnel(s, uplink, outer, tunneled)
	}
	if l.MTU > 0 && l.MTU < minMTU6 && slices.ContainsFunc(s.Pods, func(p netip.Prefix) bool {
		return p.Addr().Is6()
	}) {
		l.Missing = append(l.Missing,
			fmt.Sprintf("the MTU of pod interfaces would be %d, and IPv6 requires %d: give link %s a larger MTU", l.MTU,
				minMTU6, uplink.Name))
	}
	return l
}

// CheckOverlap returns an error if an address of this node is in a pod or Service range of the
// cluster. Packets to that address would be routed to pods or Services.
func (s Situation) CheckOverlap() error {
	for _, ip := range s.NodeIPs {
		if flag, p := s.clusterRangeOf(ip); flag != "" {
			return fmt.Errorf("--node-ip %s is in the cluster's --%s %s: give the node an address outside of the "+
				"range, or create the cluster with a range in which no machine has an address", ip, flag, p)
		}
	}
	return nil
}

// clusterRangeOf returns the pod or Service range of the cluster that contains ip, and the
// command-line flag that sets this range. flag is "" if no range contains ip.
func (s Situation) clusterRangeOf(ip netip.Addr) (flag string, in netip.Prefix) {
	for flag, list := range map[string][]netip.Prefix{"cluster-cidr": s.Pods, "service-cidr": s.Services} {
		for _, p := range list {
			if p.Contains(ip.Unmap()) {
				return flag, p
			}
		}
	}
	return "", netip.Prefix{}
}

// addNodeRoutes adds to the layout the routes to those pod ranges of node n that need no tunnel. It
// returns true if other pod ranges of n need a tunnel. The caller must add their routes with
// addTunnel or addWireGuard.
func (l *Layout) addNodeRoutes(s Situation, n *agent.Peer) (tunnel bool) {
	for _, ip := range n.Addresses {
		if flag, p := s.clusterRangeOf(ip); flag != "" {
			l.Missing = append(l.Missing,
				fmt.Sprintf("node %s has address %s, which is in the cluster's --%s %s: give it one outside",
					n.Name, ip, flag, p))
			return false
		}
	}
	for _, p := range podPrefixes(n) {
		if slices.Contains(s.OwnPods, p) || l.Routes[p].Via.IsValid() {
			l.Missing = append(l.Missing, fmt.Sprintf("node %s has pods in %s, which is another node's", n.Name, p))
			continue
		}
		if s.Mode == ModeVXLAN || s.Mode == ModeWireGuard {
			tunnel = true
			continue
		}
		if via, ok := s.neighborAddress(n, p.Addr().Is4()); ok {
			l.Routes[p] = Route{Pods: p, Via: via}
			continue
		}
		if s.Mode == ModeRoutes {
			l.Missing = append(l.Missing,
				fmt.Sprintf("node %s has no %s address on a link of this node: its pods in %s are reachable only with "+
					"--pod-network=auto or vxlan",
					n.Name, familyName(p.Addr()), p))
			continue
		}
		tunnel = true
	}
	return tunnel
}

// addTunnel adds to the layout the VXLAN interface, and the routes to the pods of nodes that
// require a tunnel. outer is this node's address on uplink.
func (l *Layout) addTunnel(s Situation, uplink Link, outer netip.Addr, nodes []*agent.Peer) {
	if !outer.IsValid() {
		l.Missing = append(l.Missing, noUplink)
		return
	}
	overhead := overhead4
	if outer.Is6() {
		overhead = overhead6
	}
	t := Tunnel{Local: outer, MAC: HardwareAddr(s.Self).String(), MTU: uplink.MTU - overhead}
	for _, p := range s.OwnPods {
		t.Addrs = append(t.Addrs, InnerAddr(p))
	}
	macs := map[string]string{t.MAC: s.Self}
	for _, n := range nodes {
		to := addressInFamily(n, outer.Is4())
		if !to.IsValid() {
			l.Missing = append(l.Missing,
				fmt.Sprintf("node %s has no %s address, the family of this node's tunnel: its pods are not reachable",
					n.Name, familyName(outer)))
			continue
		}
		peer := Peer{Node: n.Name, MAC: HardwareAddr(n.Name).String(), Outer: to}
		if other := macs[peer.MAC]; other != "" {
			l.Missing = append(l.Missing,
				fmt.Sprintf("nodes %s and %s have the same hardware address on the tunnel, which follows from their "+
					"names: rename one of them", other, n.Name))
			continue
		}
		macs[peer.MAC] = n.Name
		for _, p := range podPrefixes(n) {
			if slices.Contains(s.OwnPods, p) {
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

// findUplink returns the first of the node's addresses that a network link holds, and this link.
// The address is invalid if no link holds any of them.
func (s Situation) findUplink() (Link, netip.Addr) {
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

// neighborAddress returns an address of node n on the network of one of this node's links, in the
// family that wantIPv4 selects. It returns false if n has no such address.
func (s Situation) neighborAddress(n *agent.Peer, wantIPv4 bool) (netip.Addr, bool) {
	for _, ip := range n.Addresses {
		if ip.Is4() != wantIPv4 || slices.Contains(s.NodeIPs, ip) {
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

func addressInFamily(n *agent.Peer, wantIPv4 bool) netip.Addr {
	for _, ip := range n.Addresses {
		if ip.Is4() == wantIPv4 {
			return ip
		}
	}
	return netip.Addr{}
}

// podPrefixes returns the pod ranges of a node. It omits invalid ranges, and ranges with a single
// address.
func podPrefixes(n *agent.Peer) []netip.Prefix {
	var out []netip.Prefix
	for _, p := range n.PodCIDRs {
		if p = p.Masked(); p.IsValid() && !p.IsSingleIP() {
			out = append(out, p)
		}
	}
	return out
}

func familyName(a netip.Addr) string {
	if a.Is4() {
		return "IPv4"
	}
	return "IPv6"
}

// String returns the layout for logs and tests, one line per item.
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
