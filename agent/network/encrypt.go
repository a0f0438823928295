package network

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"keelson.dev/keelson/agent"
)

const (
	wireguardName = "keelson-wg"
	// DefaultWireGuardPort is the default UDP port for encrypted traffic between nodes.
	DefaultWireGuardPort = 51871
	// The bytes that WireGuard adds to a packet: 32 bytes of its own, and the UDP and IP headers.
	wireguardOverhead4, wireguardOverhead6 = 32 + 8 + 20, 32 + 8 + 40
)

// Encryption contains the settings of ModeWireGuard.
type Encryption struct {
	Key       wgtypes.Key   // the node's private key
	Port      int           // must be the same on all nodes
	Keepalive time.Duration // in whole seconds; 0: an idle node sends no packets
}

// WireGuard is the wanted configuration of this node's WireGuard interface, which has one peer per
// other node.
type WireGuard struct {
	Encryption
	MTU   int
	Addrs []netip.Addr // source addresses of the node's own packets in the tunnel
	// Pods are the pod ranges of the cluster. Packets between two of their addresses are accepted
	// only from this tunnel, not from a link.
	Pods  []netip.Prefix
	Peers []WireGuardPeer // sorted by node name
}

// WireGuardPeer is another node as a peer of the WireGuard interface. Packets to addresses in
// Allowed are sent to this peer. Packets from these addresses are accepted only from it.
type WireGuardPeer struct {
	Node     string
	Key      wgtypes.Key // public key
	Endpoint netip.AddrPort
	Allowed  []netip.Prefix // the node's pod ranges in both families; disjoint from those of other peers
}

// addWireGuard adds to the layout the WireGuard interface, and the routes to the pods of all nodes
// with a known key. Packets to the pods of a node without a key are rejected by an unreachable
// route; they are never sent unencrypted. outer is this node's address on uplink.
func (l *Layout) addWireGuard(s Situation, uplink Link, outer netip.Addr, nodes []*agent.Peer) {
	if !outer.IsValid() {
		l.Missing = append(l.Missing, noUplink)
		return
	}
	overhead := wireguardOverhead4
	if outer.Is6() {
		overhead = wireguardOverhead6
	}
	w := WireGuard{Encryption: s.Encryption, MTU: uplink.MTU - overhead, Pods: s.Pods}
	for _, p := range s.OwnPods {
		w.Addrs = append(w.Addrs, InnerAddr(p))
	}
	holders := map[wgtypes.Key]string{s.Encryption.Key.PublicKey(): s.Self}
	for _, n := range nodes {
		key, to := wgtypes.Key(n.WireGuardKey), addressInFamily(n, outer.Is4())
		other, taken := holders[key]
		switch {
		case key == wgtypes.Key{}:
			l.Missing = append(l.Missing,
				fmt.Sprintf("node %s has published no WireGuard key, and traffic to its pods is never "+
					"sent unencrypted: "+
					"start its agent with --pod-network=wireguard, in a release that supports it", n.Name))
			continue
		case taken:
			l.Missing = append(l.Missing,
				fmt.Sprintf("nodes %s and %s have the same WireGuard key, and pods of the second are not reachable: "+
					"remove %s from the state directory of the node that was copied", other, n.Name, KeyFile))
			continue
		case !to.IsValid():
			l.Missing = append(l.Missing,
				fmt.Sprintf("node %s has no %s address, the family of this node's tunnel: its pods are not reachable",
					n.Name, familyName(outer)))
			continue
		}
		holders[key] = n.Name
		peer := WireGuardPeer{Node: n.Name, Key: key, Endpoint: netip.AddrPortFrom(to, uint16(s.Encryption.Port))}
		for _, p := range podPrefixes(n) {
			if slices.Contains(s.OwnPods, p) {
				continue // addNodeRoutes has already reported this range
			}
			if l.Routes[p].Via.IsValid() {
				l.Missing = append(l.Missing, fmt.Sprintf("node %s has pods in %s, which is another node's", n.Name, p))
				continue
			}
			l.Routes[p] = Route{Pods: p, Via: InnerAddr(p), Tunnel: true}
			peer.Allowed = append(peer.Allowed, p)
		}
		w.Peers = append(w.Peers, peer)
	}
	l.WireGuard, l.MTU = &w, w.MTU
}

// String returns one line for the WireGuard interface and one per peer. It contains no private
// keys.
func (w *WireGuard) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "wireguard on port %d %v, %d bytes", w.Port, w.Addrs, w.MTU)
	if w.Keepalive > 0 {
		fmt.Fprintf(&b, ", kept alive each %s", w.Keepalive)
	}
	b.WriteByte('\n')
	for _, p := range w.Peers {
		fmt.Fprintf(&b, "peer %s %s at %s: %v\n", p.Node, p.Key, p.Endpoint, p.Allowed)
	}
	return b.String()
}
