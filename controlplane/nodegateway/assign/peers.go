package assign

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
	"keelson.dev/keelson/controlplane/nodegateway/wire"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// kindPeer is the kind that deletions of peers, which are other nodes, have in messages.
const kindPeer = "Peer"

// Field numbers of ObjectSet.
const (
	fieldUpserts protowire.Number = 2
	fieldPeers   protowire.Number = 4
)

// digest identifies a set of peers: it is the sum of the hashes of the peers (fleet.proto).
type digest [2]uint64

func (d digest) addDigest(e digest) digest      { return digest{d[0] + e[0], d[1] + e[1]} }
func (d digest) subtractDigest(e digest) digest { return digest{d[0] - e[0], d[1] - e[1]} }

// parseDigest parses the digest that an agent sends. It returns nil if the agent does not support
// peers.
func parseDigest(raw []byte) *digest {
	if len(raw) != 16 {
		return nil
	}
	return &digest{binary.BigEndian.Uint64(raw), binary.BigEndian.Uint64(raw[8:])}
}

// buildPeer returns the information about a node that other nodes get. It returns nil if the node's
// pods are not reachable yet, because the node has no pod CIDR or address.
func buildPeer(n *v1.Node) *fleetv1.Peer {
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
	if key, err := base64.StdEncoding.DecodeString(n.Annotations[wire.WireGuardKey]); err == nil && len(key) == 32 {
		p.WireguardKey = key
	}
	return p
}

func equalPeers(a, b *fleetv1.Peer) bool {
	return a.Name == b.Name && a.Uid == b.Uid && slices.Equal(a.PodCidrs, b.PodCidrs) &&
		slices.Equal(a.Addresses, b.Addresses) &&
		bytes.Equal(a.WireguardKey, b.WireguardKey)
}

// encodeField encodes a message as the field n of ObjectSet. It returns the field with its tag, and
// the message alone.
func encodeField(n protowire.Number, m proto.Message) (encoded, body []byte, err error) {
	if body, err = (proto.MarshalOptions{Deterministic: true}).Marshal(m); err != nil {
		return nil, nil, err
	}
	encoded = protowire.AppendTag(make([]byte, 0, len(body)+8), n, protowire.BytesType)
	return protowire.AppendBytes(encoded, body), body, nil
}

// encodeEntry returns the log entry of an object whose kind every node gets.
func encodeEntry(k kind, o api.Object) (logEntry, error) {
	entry := logEntry{key: keyOf(k, o), uid: o.GetUID(), revision: wire.RevisionOf(o)}
	enc, err := encodeObject(k, o)
	if err == nil {
		entry.encoded, _, err = encodeField(fieldUpserts, enc)
	}
	if err != nil {
		return entry, fmt.Errorf("fleet: %s %s: %w", kinds[k].name, entry.key.storeKey(), err)
	}
	return entry, nil
}

// encodePeerEntry returns the log entry of a node, with the information peer that other nodes get.
func encodePeerEntry(node *v1.Node, peer *fleetv1.Peer) (logEntry, error) {
	entry := logEntry{key: keyOf(kindNode, node), uid: node.UID, revision: wire.RevisionOf(node)}
	encoded, body, err := encodeField(fieldPeers, peer)
	if err != nil {
		return entry, fmt.Errorf("fleet: node %s as a peer: %w", node.Name, err)
	}
	sum := sha256.Sum256(body)
	entry.encoded, entry.digest = encoded, digest{binary.BigEndian.Uint64(sum[:8]), binary.BigEndian.Uint64(sum[8:16])}
	return entry, nil
}

// deletionEntry returns the log entry of a deleted object.
func deletionEntry(k kind, o api.Object) logEntry { return logEntry{key: keyOf(k, o), uid: o.GetUID()} }

// encodeWithoutContent returns the encoded object without content, for an agent that already holds
// this revision.
func (e *logEntry) encodeWithoutContent() ([]byte, error) {
	encoded, _, err := encodeField(fieldUpserts, &fleetv1.Object{Kind: kinds[e.key.kind].name,
		Namespace: e.key.namespace, Name: e.key.name, Revision: e.revision})
	return encoded, err
}
