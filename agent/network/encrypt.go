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
	// DefaultWireGuardPort is the UDP port between nodes.
	DefaultWireGuardPort = 51871
	// What WireGuard puts around a packet: 32 bytes of its own, and the headers of UDP and IP.
	encrypted4, encrypted6 = 32 + 8 + 20, 32 + 8 + 40
)

// Encryption is how this node speaks to others in ModeWireGuard.
type Encryption struct {
	Key       wgtypes.Key   // the node's own, private
	Port      int           // the same on all nodes
	Keepalive time.Duration // of whole seconds; 0: a node that has nothing to say is silent
}

// WireGuard is this node's end of the encrypted tunnels to all nodes.
type WireGuard struct {
	Encryption
	MTU   int
	Addrs []netip.Addr // as which the node itself speaks through it
	// Pods are the ranges of the cluster. What comes from one and goes to one is taken from this tunnel alone, not from a link.
	Pods  []netip.Prefix
	Peers []WireGuardPeer // by name of the node
}

// WireGuardPeer is another node's end. Packets for Allowed go to it, and only from it are packets of Allowed taken.
type WireGuardPeer struct {
	Node     string
	Key      wgtypes.Key // public
	Endpoint netip.AddrPort
	Allowed  []netip.Prefix // its pods, of each family; no other peer has any of them
}

// encrypt makes the encrypted tunnel, and routes to the pods of all nodes whose key is known. To others nothing leads: what
// is sent to their pods is refused, as all that has no route, and never goes out in the clear.
func (l *Layout) encrypt(s Situation, uplink Link, outer netip.Addr, nodes []*agent.Peer) {
	if !outer.IsValid() {
		l.Missing = append(l.Missing, noUplink)
		return
	}
	overhead := encrypted4
	if outer.Is6() {
		overhead = encrypted6
	}
	w := WireGuard{Encryption: s.Encryption, MTU: uplink.MTU - overhead, Pods: s.Pods}
	for _, p := range s.Own {
		w.Addrs = append(w.Addrs, InnerAddr(p))
	}
	holders := map[wgtypes.Key]string{s.Encryption.Key.PublicKey(): s.Self}
	for _, n := range nodes {
		key, to := wgtypes.Key(n.WireGuardKey), addressOf(n, outer.Is4())
		other, taken := holders[key]
		switch {
		case key == wgtypes.Key{}:
			l.Missing = append(l.Missing, fmt.Sprintf("node %s has told no WireGuard key, and nothing goes to its pods unencrypted: "+
				"start its agent with --pod-network=wireguard, of a release that has it", n.Name))
			continue
		case taken:
			l.Missing = append(l.Missing, fmt.Sprintf("nodes %s and %s have one WireGuard key, and pods of the second are not reached: "+
				"remove %s from the state folder of the one that was copied", other, n.Name, KeyFile))
			continue
		case !to.IsValid():
			l.Missing = append(l.Missing, fmt.Sprintf("node %s has no %s address, in which this node speaks to others: its pods are not reached", n.Name, family(outer)))
			continue
		}
		holders[key] = n.Name
		peer := WireGuardPeer{Node: n.Name, Key: key, Endpoint: netip.AddrPortFrom(to, uint16(s.Encryption.Port))}
		for _, p := range podPrefixes(n) {
			if slices.Contains(s.Own, p) {
				continue // reach has told of it
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

// String has a line for the tunnel and one for each peer; of keys the public ones.
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
