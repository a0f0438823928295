package nodegateway

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"slices"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// kindPeer is the kind name of other nodes in deletions.
const kindPeer = "Peer"

// wireguardKey is the Node annotation with the node's WireGuard public key. Nodes without WireGuard
// do not set it.
const wireguardKey = "keelson.dev/wireguard-key"

// Field numbers of ObjectSet.
const (
	fieldUpserts protowire.Number = 2
	fieldPeers   protowire.Number = 4
)

// digest identifies a set of peers: the sum of the hashes of its members (fleet.proto).
type digest [2]uint64

func (d digest) plus(e digest) digest  { return digest{d[0] + e[0], d[1] + e[1]} }
func (d digest) minus(e digest) digest { return digest{d[0] - e[0], d[1] - e[1]} }

// digestOf parses an agent's digest; nil if the agent does not support peers.
func digestOf(raw []byte) *digest {
	if len(raw) != 16 {
		return nil
	}
	return &digest{binary.BigEndian.Uint64(raw), binary.BigEndian.Uint64(raw[8:])}
}

// peerOf returns the information that other nodes get about a node, or nil if its pods are not
// reachable yet (no pod CIDR or address).
func peerOf(n *v1.Node) *fleetv1.Peer {
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
	if key, err := base64.StdEncoding.DecodeString(n.Annotations[wireguardKey]); err == nil && len(key) == 32 {
		p.WireguardKey = key
	}
	return p
}

func samePeer(a, b *fleetv1.Peer) bool {
	return a.Name == b.Name && a.Uid == b.Uid && slices.Equal(a.PodCidrs, b.PodCidrs) && slices.Equal(a.Addresses, b.Addresses) &&
		bytes.Equal(a.WireguardKey, b.WireguardKey)
}

// field encodes a message as a field of ObjectSet. It returns the field with its tag, and the
// message alone.
func field(n protowire.Number, m proto.Message) (wire, body []byte, err error) {
	if body, err = (proto.MarshalOptions{Deterministic: true}).Marshal(m); err != nil {
		return nil, nil, err
	}
	wire = protowire.AppendTag(make([]byte, 0, len(body)+8), n, protowire.BytesType)
	return protowire.AppendBytes(wire, body), body, nil
}

// noticeOf returns the log entry of an object of a kind that every node gets.
func noticeOf(k kind, o api.Object) (notice, error) {
	n := notice{key: keyOf(k, o), uid: o.GetUID(), revision: revisionOf(o)}
	enc, err := encode(k, o)
	if err == nil {
		n.wire, _, err = field(fieldUpserts, enc)
	}
	if err != nil {
		return n, fmt.Errorf("fleet: %s %s: %w", kinds[k].name, n.key.storeKey(), err)
	}
	return n, nil
}

// noticeOfPeer returns the log entry of a node as a peer.
func noticeOfPeer(o *v1.Node, p *fleetv1.Peer) (notice, error) {
	n := notice{key: keyOf(kindNode, o), uid: o.UID, revision: revisionOf(o)}
	wire, body, err := field(fieldPeers, p)
	if err != nil {
		return n, fmt.Errorf("fleet: node %s as a peer: %w", o.Name, err)
	}
	sum := sha256.Sum256(body)
	n.wire, n.digest = wire, digest{binary.BigEndian.Uint64(sum[:8]), binary.BigEndian.Uint64(sum[8:16])}
	return n, nil
}

// goneNotice returns the log entry of a deleted object.
func goneNotice(k kind, o api.Object) notice { return notice{key: keyOf(k, o), uid: o.GetUID()} }

// thin returns the encoded object without content, for an agent that already holds this revision.
func (n *notice) thin() ([]byte, error) {
	wire, _, err := field(fieldUpserts, &fleetv1.Object{Kind: kinds[n.key.kind].name, Namespace: n.key.namespace, Name: n.key.name, Revision: n.revision})
	return wire, err
}
