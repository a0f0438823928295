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

// kindPeer is the kind under which Session.Changes reports changes of other nodes. The control
// plane's messages use the same kind to delete another node.
const kindPeer = "Peer"

// storedPeer is another node of the cluster. It is immutable.
type storedPeer struct {
	agent.Peer
	digest digest
}

// digest identifies a set of peers. It is the sum of the digests of all peers in the set, as
// defined in fleet.proto.
type digest [2]uint64

func (d digest) addDigest(e digest) digest { return digest{d[0] + e[0], d[1] + e[1]} }

func (d digest) encodeDigest() []byte {
	return binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(nil, d[0]), d[1])
}

// newStoredPeer converts the message p to a peer. It ignores an address or CIDR that this version
// cannot parse.
func newStoredPeer(p *fleetv1.Peer) (*storedPeer, error) {
	raw, err := proto.MarshalOptions{Deterministic: true}.Marshal(p)
	if err != nil {
		return nil, fmt.Errorf("peer %s: %w", p.Name, err)
	}
	sum := sha256.Sum256(raw)
	h := &storedPeer{Peer: agent.Peer{Name: p.Name, UID: types.UID(p.Uid)},
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

// peerMessage returns the protocol message of the peer.
func (h *storedPeer) peerMessage() *fleetv1.Peer {
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

// peerFromNode converts a Node to a peer message. It returns nil if the Node has no pod CIDR or no
// internal address. Replicas of the previous release send Nodes instead of peers.
func peerFromNode(n *v1.Node) *fleetv1.Peer {
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

// setPeer adds the peer in the message p to objects, or replaces the peer with the same name. The
// caller holds the lock of the view.
func (v *view) setPeer(objects *objectSet, p *fleetv1.Peer) error {
	h, err := v.shared.storedPeerFor(p)
	if err != nil {
		return err
	}
	objects.peers[h.Name] = h
	return nil
}

// removePeer removes the peer with this name and UID from objects. The caller holds the lock of the
// view.
func (v *view) removePeer(objects *objectSet, name, uid string) {
	if h := objects.peers[name]; h != nil && string(h.UID) == uid {
		delete(objects.peers, name)
		v.markPeerChanged(name)
	}
}

// applyOtherNode adds, replaces or removes a peer in objects, according to the Node of another
// node. Replicas of the previous release send Nodes instead of peers. full means that the Node is
// part of a full assignment. The caller holds the lock of the view.
func (v *view) applyOtherNode(objects *objectSet, n *v1.Node, full bool) error {
	p := peerFromNode(n)
	if p == nil {
		v.removePeer(objects, n.Name, string(n.UID))
		return nil
	}
	if !full {
		v.markPeerChanged(n.Name)
	}
	return v.setPeer(objects, p)
}

// markPeerChanged adds the peer with this name to the changed objects of the current batch. The
// caller holds the lock of the view.
func (v *view) markPeerChanged(name string) {
	v.changes.recordChange(agent.ObjectKey{Kind: kindPeer, Name: name})
}

// visitPeerDifferences calls visit with the name of each peer that differs between the sets a and
// b.
func visitPeerDifferences(a, b map[string]*storedPeer, visit func(name string)) {
	for name, x := range a {
		if y := b[name]; y == nil || x != y && (x.UID != y.UID || x.digest != y.digest) {
			visit(name)
		}
	}
	for name := range b {
		if a[name] == nil {
			visit(name)
		}
	}
}

// peersDigest returns the digest of the set of all peers in the view.
func (v *view) peersDigest() (d digest) {
	v.mu.RLock()
	defer v.mu.RUnlock()
	for _, h := range v.current.peers {
		d = d.addDigest(h.digest)
	}
	return d
}
