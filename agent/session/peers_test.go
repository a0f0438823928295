package session

import (
	"bytes"
	"log/slog"
	"net/netip"
	"slices"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	v1 "k8s.io/api/core/v1"

	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

func sentPeer(name, uid, cidr, address string) *fleetv1.Peer {
	return &fleetv1.Peer{Name: name, Uid: uid, PodCidrs: []string{cidr}, Addresses: []string{address}}
}

// peerNames returns the names of the peers in a session's view.
func peerNames(s *Session) (out []string) {
	for _, p := range s.Peers() {
		out = append(out, p.Name)
	}
	slices.Sort(out)
	return out
}

// Other nodes arrive as peers, change by increments and are removed. They are kept if the control
// plane states that they are unchanged. Readers are notified.
func TestPeers(t *testing.T) {
	s := New(Config{NodeName: "w1"})
	v := s.view
	apply := func(set *fleetv1.ObjectSet, want ...string) {
		t.Helper()
		if err := v.applyObjects(set); err != nil {
			t.Fatal(err)
		}
		v.completeBatch(1, set.Full)
		if got := peerNames(s); !slices.Equal(got, want) {
			t.Errorf("peers %v, want %v", got, want)
		}
	}
	changes := s.Changes(t.Context())
	<-changes
	if d := v.peersDigest(); d != (digest{}) {
		t.Errorf("of none the digest is %v", d)
	}
	w2, w3 := sentPeer("w2", "2", "10.1.0.0/24", "192.0.2.2"), sentPeer("w3", "3", "10.2.0.0/24", "192.0.2.3")
	apply(&fleetv1.ObjectSet{Full: true, Peers: []*fleetv1.Peer{w2}}, "w2")
	apply(&fleetv1.ObjectSet{Peers: []*fleetv1.Peer{w3}}, "w2", "w3")
	if _, told := (<-changes)[kindPeer]; !told {
		t.Error("readers are not told of peers")
	}
	both := v.peersDigest()
	apply(&fleetv1.ObjectSet{Deletes: []*fleetv1.Ref{{Kind: kindPeer, Name: "w2", Uid: "another"}}}, "w2", "w3")
	apply(&fleetv1.ObjectSet{Deletes: []*fleetv1.Ref{{Kind: kindPeer, Name: "w2", Uid: "2"}}}, "w3")
	apply(&fleetv1.ObjectSet{Peers: []*fleetv1.Peer{w2}}, "w2", "w3")
	if got := v.peersDigest(); got != both || len(got.encodeDigest()) != 16 {
		t.Errorf("the digest %v depends on the order, was %v", got, both)
	}
	apply(&fleetv1.ObjectSet{Full: true, PeersHeld: true}, "w2", "w3")
	apply(&fleetv1.ObjectSet{Full: true})
	// Fields of a later release do not prevent reading the known fields, and count in the digest.
	more := sentPeer("w2", "2", "10.1.0.0/24", "192.0.2.2")
	more.PodCidrs, more.Addresses = append(more.PodCidrs, "of a new form"), append(more.Addresses, "fd00::2")
	more.ProtoReflect().SetUnknown(protowire.AppendString(protowire.AppendTag(nil, 100, protowire.BytesType), "new"))
	apply(&fleetv1.ObjectSet{Peers: []*fleetv1.Peer{more, w3}}, "w2", "w3")
	if v.peersDigest() == both {
		t.Error("the digest does not show all that is said of a peer")
	}
	for _, p := range s.Peers() {
		if p.Name == "w2" && (len(p.PodCIDRs) != 1 || len(p.Addresses) != 2 ||
			p.Addresses[1] != netip.MustParseAddr("fd00::2")) {
			t.Errorf("w2 is %+v", p)
		}
	}
}

// A replica of the previous release sends complete Nodes of all other nodes. The agent's own Node
// is not a peer.
func TestPeersFromNodes(t *testing.T) {
	s := New(Config{NodeName: "w1"})
	node := func(name string, cidr string) *fleetv1.Object {
		n := &v1.Node{Spec: v1.NodeSpec{PodCIDR: cidr}, Status: v1.NodeStatus{Addresses: []v1.NodeAddress{
			{Type: v1.NodeHostName, Address: name}, {Type: v1.NodeInternalIP, Address: "192.0.2.1"}}}}
		n.Name, n.UID = name, "uid"
		raw, err := encodeObject("Node", n)
		if err != nil {
			t.Fatal(err)
		}
		return &fleetv1.Object{Kind: "Node", Name: name, Revision: 1, Raw: raw}
	}
	apply := func(set *fleetv1.ObjectSet, want ...string) {
		t.Helper()
		if err := s.view.applyObjects(set); err != nil {
			t.Fatal(err)
		}
		s.view.completeBatch(1, set.Full)
		if got := peerNames(s); !slices.Equal(got, want) {
			t.Errorf("peers %v, want %v", got, want)
		}
	}
	apply(fullSet(node("w1", "10.1.0.0/24"), node("w2", "10.2.0.0/24"), node("w3", "")), "w2")
	if n, ok := s.Node(); !ok || n.Name != "w1" || s.Cluster().PodCIDR != "10.1.0.0/24" {
		t.Errorf("the own node is %v, with pods of %s", n, s.Cluster().PodCIDR)
	}
	apply(&fleetv1.ObjectSet{Upserts: []*fleetv1.Object{node("w3", "10.3.0.0/24")}}, "w2", "w3")
	apply(&fleetv1.ObjectSet{Upserts: []*fleetv1.Object{node("w3", "")}}, "w2")
	apply(&fleetv1.ObjectSet{Deletes: []*fleetv1.Ref{{Kind: "Node", Name: "w2", Uid: "uid"}}})
}

// Peers are stored in the checkpoint with their digest. Sessions of one process share them.
func TestPeersAreKept(t *testing.T) {
	dir := t.TempDir()
	var shared Shared
	w2 := sentPeer("w2", "2", "10.1.0.0/24", "192.0.2.2")
	w2.WireguardKey = bytes.Repeat([]byte{7}, 32)
	cfg := Config{NodeName: "w1", StateDir: dir, RunDir: dir, Shared: &shared, Log: slog.New(slog.DiscardHandler)}
	a := New(cfg)
	if err := a.view.applyObjects(&fleetv1.ObjectSet{Full: true, Peers: []*fleetv1.Peer{
		w2, sentPeer("w3", "3", "fd00:1::/64", "fd00::3")}}); err != nil {
		t.Fatal(err)
	}
	a.view.completeBatch(4, true)
	if err := a.writeCheckpoint(); err != nil {
		t.Fatal(err)
	}
	b := New(cfg)
	if err := b.loadCheckpoint(); err != nil {
		t.Fatal(err)
	}
	if got := peerNames(b); !slices.Equal(got, []string{"w2", "w3"}) || b.view.peersDigest() != a.view.peersDigest() {
		t.Errorf("loaded %v", got)
	}
	if a.view.current.peers["w2"] != b.view.current.peers["w2"] {
		t.Error("sessions that share hold a peer twice")
	}
	shared = Shared{}
	c := New(cfg)
	if err := c.loadCheckpoint(); err != nil || c.view.current.peers["w2"].WireGuardKey != [32]byte(w2.WireguardKey) ||
		c.view.peersDigest() != a.view.peersDigest() {
		t.Errorf("of the key the checkpoint knows %v, %v", c.view.current.peers["w2"].WireGuardKey, err)
	}
	// Another key is another peer. A key of an unknown form is ignored.
	for _, key := range [][]byte{bytes.Repeat([]byte{8}, 32), make([]byte, 33)} {
		w2 = sentPeer("w2", "2", "10.1.0.0/24", "192.0.2.2")
		w2.WireguardKey = key
		if err := c.view.applyObjects(&fleetv1.ObjectSet{Peers: []*fleetv1.Peer{w2}}); err != nil {
			t.Fatal(err)
		}
		if got := c.view.current.peers["w2"].WireGuardKey; got != ([32]byte{}) != (len(key) == 32) ||
			len(key) == 32 && got != [32]byte(key) {
			t.Errorf("told %v, it is %v", key, got)
		}
	}
}
