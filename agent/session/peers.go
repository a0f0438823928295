package session

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"net/netip"

	"google.golang.org/protobuf/proto"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// kindPeer is what Changes and deletions call the other nodes.
const kindPeer = "Peer"

// heldPeer is another node as it was told of. It is immutable.
type heldPeer struct {
	agent.Peer
	digest digest
}

// digest stands for a set of peers: the sum of those of each (fleet.proto).
type digest [2]uint64

func (d digest) plus(e digest) digest { return digest{d[0] + e[0], d[1] + e[1]} }

func (d digest) bytes() []byte {
	return binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(nil, d[0]), d[1])
}

// newHeldPeer reads what was sent. An address or CIDR of a form that this version does not know is left out.
func newHeldPeer(p *fleetv1.Peer) (*heldPeer, error) {
	raw, err := proto.MarshalOptions{Deterministic: true}.Marshal(p)
	if err != nil {
		return nil, fmt.Errorf("peer %s: %w", p.Name, err)
	}
	sum := sha256.Sum256(raw)
	h := &heldPeer{Peer: agent.Peer{Name: p.Name, UID: types.UID(p.Uid)},
		digest: digest{binary.BigEndian.Uint64(sum[:8]), binary.BigEndian.Uint64(sum[8:16])}}
	for _, c := range p.PodCidrs {
		if cidr, err := netip.ParsePrefix(c); err == nil {
			h.PodCIDRs = append(h.PodCIDRs, cidr)
		}
	}
	for _, a := range p.Addresses {
		if ip, err := netip.ParseAddr(a); err == nil {
			h.Addresses = append(h.Addresses, ip)
		}
	}
	if len(p.WireguardKey) == len(h.WireGuardKey) {
		h.WireGuardKey = [32]byte(p.WireguardKey)
	}
	return h, nil
}

// message is the peer as it was sent.
func (h *heldPeer) message() *fleetv1.Peer {
	p := &fleetv1.Peer{Name: h.Name, Uid: string(h.UID)}
	for _, c := range h.PodCIDRs {
		p.PodCidrs = append(p.PodCidrs, c.String())
	}
	for _, a := range h.Addresses {
		p.Addresses = append(p.Addresses, a.String())
	}
	if h.WireGuardKey != [32]byte{} {
		p.WireguardKey = h.WireGuardKey[:]
	}
	return p
}

// peerOfNode is what a Node says as a peer; nil while it is nobody's. Replicas of the release before send whole Nodes.
func peerOfNode(n *v1.Node) *fleetv1.Peer {
	p := &fleetv1.Peer{Name: n.Name, Uid: string(n.UID), PodCidrs: n.Spec.PodCIDRs}
	if len(p.PodCidrs) == 0 && n.Spec.PodCIDR != "" {
		p.PodCidrs = []string{n.Spec.PodCIDR}
	}
	for _, a := range n.Status.Addresses {
		if a.Type == v1.NodeInternalIP {
			p.Addresses = append(p.Addresses, a.Address)
		}
	}
	if len(p.PodCidrs) == 0 || len(p.Addresses) == 0 {
		return nil
	}
	return p
}

// putPeer is called under the lock.
func (v *view) putPeer(into *contents, p *fleetv1.Peer) error {
	h, err := v.shared.peer(p)
	if err != nil {
		return err
	}
	into.peers[h.Name] = h
	return nil
}

// removePeer is called under the lock.
func (v *view) removePeer(from *contents, name, uid string) {
	if h := from.peers[name]; h != nil && string(h.UID) == uid {
		delete(from.peers, name)
		v.peerChanged(name)
	}
}

// applyNode takes another node's object, as replicas of the release before send it. It is called under the lock.
func (v *view) applyNode(into *contents, n *v1.Node, full bool) error {
	p := peerOfNode(n)
	if p == nil {
		v.removePeer(into, n.Name, string(n.UID))
		return nil
	}
	if !full {
		v.peerChanged(n.Name)
	}
	return v.putPeer(into, p)
}

// peerChanged is called under the lock.
func (v *view) peerChanged(name string) {
	v.changed[kindPeer] = struct{}{}
	v.named.AddKey(agent.ObjectKey{Kind: kindPeer, Name: name})
}

// differingPeers tells of which peers the two differ.
func differingPeers(a, b map[string]*heldPeer, tell func(name string)) {
	for name, x := range a {
		if y := b[name]; y == nil || x != y && (x.UID != y.UID || x.digest != y.digest) {
			tell(name)
		}
	}
	for name := range b {
		if a[name] == nil {
			tell(name)
		}
	}
}

// peersDigest stands for the peers that are held.
func (v *view) peersDigest() (d digest) {
	v.mu.RLock()
	defer v.mu.RUnlock()
	for _, h := range v.now.peers {
		d = d.plus(h.digest)
	}
	return d
}

// Peers implements agent.Objects.
func (s *Session) Peers() []*agent.Peer {
	s.view.mu.RLock()
	defer s.view.mu.RUnlock()
	out := make([]*agent.Peer, 0, len(s.view.now.peers))
	for _, h := range s.view.now.peers {
		out = append(out, &h.Peer)
	}
	return out
}
