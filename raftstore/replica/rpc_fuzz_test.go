package replica_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/protobuf/proto"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/mvcc"
	"keelson.dev/keelson/raftstore/replica"
	"keelson.dev/keelson/raftstore/storetest"
)

// peerMethods are the calls of the Peer service, with an example of each request.
var peerMethods = []struct {
	name  string
	seeds []proto.Message
}{
	{"Forward", []proto.Message{
		&storev1.ForwardRequest{},
		&storev1.ForwardRequest{Proposals: []*storev1.Proposal{{}}},
		&storev1.ForwardRequest{Proposals: []*storev1.Proposal{{
			Id: &storev1.ProposalID{Incarnation: math.MaxUint64, Sequence: math.MaxUint64,
				Settled: math.MaxUint64},
			Ops: []*storev1.Op{{Kind: uint32(raftstore.OpPut), Key: "/a", Value: []byte("x"),
				TtlMs: math.MaxInt64}},
			ProposedUnixMs: math.MaxInt64,
		}}},
		&storev1.ForwardRequest{Proposals: []*storev1.Proposal{
			{Ops: []*storev1.Op{{Kind: uint32(raftstore.OpPut), Key: ""}}},
			{Ops: []*storev1.Op{{Kind: 77, Key: "/a"}}},
			{Ops: []*storev1.Op{{Kind: uint32(raftstore.OpDelete), Key: "/a", TtlMs: -1}}},
			{Ops: []*storev1.Op{{Kind: uint32(raftstore.OpPut), Key: "/a",
				If: &storev1.Precondition{Absent: true, Revision: 4}}}},
			{Fence: math.MaxUint64, Ops: []*storev1.Op{{Kind: uint32(raftstore.OpPut), Key: "/a"}}},
			{Fence: 9},
		}},
	}},
	{"Forwards", []proto.Message{
		&storev1.ForwardCall{},
		&storev1.ForwardCall{Id: math.MaxUint64, Request: &storev1.ForwardRequest{}},
		&storev1.ForwardCall{Id: 1, Request: &storev1.ForwardRequest{Group: "another",
			Proposals: []*storev1.Proposal{{}}}},
		&storev1.ForwardCall{Id: 1, Request: &storev1.ForwardRequest{Proposals: []*storev1.Proposal{
			{Ops: []*storev1.Op{{Kind: uint32(raftstore.OpPut), Key: "/a", Value: []byte("x")}}}, {Fence: 9},
		}}},
	}},
	{"ReadIndex", []proto.Message{&storev1.ReadIndexRequest{}}},
	{"State", []proto.Message{&storev1.StateRequest{}, &storev1.StateRequest{Hash: true},
		&storev1.StateRequest{Hash: true, Revision: math.MaxUint64}}},
	{"AddMember", []proto.Message{
		&storev1.AddMemberRequest{}, &storev1.AddMemberRequest{Id: "r1", Address: "nowhere"},
		&storev1.AddMemberRequest{Id: "\x00", Address: ":"}, &storev1.AddMemberRequest{Id: "r9", Address: "nowhere:1"},
	}},
	{"RemoveMember", []proto.Message{&storev1.RemoveMemberRequest{}, &storev1.RemoveMemberRequest{Id: "r1"}}},
	{"TransferLeadership", []proto.Message{&storev1.TransferLeadershipRequest{},
		&storev1.TransferLeadershipRequest{To: "r1"}, &storev1.TransferLeadershipRequest{To: "nobody"}}},
	{"Promote", []proto.Message{&storev1.PromoteRequest{}, &storev1.PromoteRequest{Id: "r1"}}},
	{"Admit", []proto.Message{&storev1.AdmitRequest{}, &storev1.AdmitRequest{Id: "r1", Group: "another"}}},
	{"NoSuchMethod", []proto.Message{&storev1.StateRequest{}}},
}

// raw passes bytes through gRPC as they are.
type raw struct{}

func (raw) Marshal(v any) ([]byte, error)      { return *v.(*[]byte), nil }
func (raw) Unmarshal(data []byte, v any) error { *v.(*[]byte) = data; return nil }
func (raw) Name() string                       { return "proto" }

// loner is a replica alone in its group, which can reach nobody but itself.
func loner(f *testing.F) (*storetest.Cluster, *replica.Replica) {
	c := storetest.NewCluster(f, 1, func(cfg *replica.Config) {
		dial, own := cfg.Network.Dial, cfg.Network.Advertise
		cfg.Network.Dial = func(ctx context.Context, address string) (net.Conn, error) {
			if address != own {
				return nil, errors.New("there is no such address")
			}
			return dial(ctx, address)
		}
	})
	r := c.Replica("r1")
	commit(f, r, raftstore.Put("/start", []byte("x")))
	return c, r
}

// Whatever bytes another replica sends as a request: no panic, and no change
// but by proposals that are in order.
func FuzzPeerCalls(f *testing.F) {
	for i, m := range peerMethods {
		for _, msg := range m.seeds {
			data, err := proto.Marshal(msg)
			if err != nil {
				f.Fatal(err)
			}
			f.Add(uint8(i), data)
			f.Add(uint8(i), append(data, 0xff))
			f.Add(uint8(i), data[:len(data)/2])
		}
		f.Add(uint8(i), []byte{0x0a, 0xff, 0xff, 0xff, 0xff, 0x0f})
	}
	c, r := loner(f)
	conn, err := grpc.NewClient("passthrough:///"+r.Address(),
		grpc.WithTransportCredentials(credentials.NewTLS(c.Config("r1").Network.ClientTLS.Clone())))
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { conn.Close() })
	f.Fuzz(func(t *testing.T, method uint8, data []byte) {
		name := peerMethods[int(method)%len(peerMethods)].name
		before, members := r.Applied(), stripped(r)
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer cancel()
		var reply []byte
		// Any answer will do.
		callErr := conn.Invoke(ctx, "/keelson.store.v1.Peer/"+name, &data, &reply, grpc.ForceCodec(raw{}))
		good := raftstore.Revision(0)
		switch name {
		case "Forward":
			req := new(storev1.ForwardRequest)
			if proto.Unmarshal(data, req) == nil {
				good = goodProposals(req)
			}
		case "Forwards": // a stream of one message
			call := new(storev1.ForwardCall)
			if proto.Unmarshal(data, call) == nil {
				good = goodProposals(call.GetRequest())
			}
		}
		after, err := r.Sync(within(t, patience))
		if err != nil {
			t.Fatalf("%s of %x: the replica is gone: %v", name, data, err)
		}
		if after > before+good {
			t.Errorf("%s of %x (answer %x, error %v) moved the revision from %d to %d, with %d proposals in order",
				name, data, reply, callErr, before, after, good)
		}
		if now := stripped(r); now != members {
			t.Errorf("%s of %x changed the members from %s to %s", name, data, members, now)
		}
	})
}

// stripped is who is a member, without what changes by itself.
func stripped(r *replica.Replica) string {
	var out string
	for _, m := range r.Status().Members {
		out += fmt.Sprintf("%s %s %v;", m.ID, m.Address, m.Voter)
	}
	return out
}

// goodProposals counts the proposals that a replica may well apply.
func goodProposals(req *storev1.ForwardRequest) (n raftstore.Revision) {
	for _, p := range req.GetProposals() {
		var c raftstore.Commit
		for _, o := range p.GetOps() {
			c.Ops = append(c.Ops, raftstore.Op{
				Kind: raftstore.OpKind(o.GetKind()), Key: o.GetKey(), Value: o.GetValue(),
				TTL: time.Duration(min(o.GetTtlMs(), 1)) * time.Millisecond,
				If: raftstore.Precondition{Absent: o.GetIf().GetAbsent(),
					Revision: raftstore.Revision(o.GetIf().GetRevision())},
			})
		}
		if _, err := mvcc.Proposal(c); err == nil {
			n++
		}
	}
	return n
}

// packed is a map in raft's encoding, of names and values by turns; num a small number.
func packed(pairs ...any) []byte {
	out := []byte{0x80 | byte(len(pairs)/2)}
	for i := 0; i < len(pairs); i += 2 {
		name := pairs[i].(string)
		out = append(append(out, 0xa0|byte(len(name))), name...)
		out = append(out, pairs[i+1].([]byte)...)
	}
	return out
}

func num(n byte) []byte { return []byte{n} }

// Whatever bytes arrive at raft's side of the peer port from a member: the
// replica goes on.
func FuzzRaftStream(f *testing.F) {
	for kind := range byte(8) {
		f.Add([]byte{kind})
		f.Add([]byte{kind, 0xdd, 0xff, 0xff, 0xff, 0xff}) // an array of four thousand million
		f.Add([]byte{kind, 0xc6, 0xff, 0xff, 0xff, 0xff}) // and as many bytes
		f.Add([]byte{kind, 0xdf, 0x7f, 0xff, 0xff, 0xff, 0x01})
		f.Add(append([]byte{kind}, bytes.Repeat([]byte{0x81}, 1000)...)) // nested a thousand times
		for _, msg := range [][]byte{
			packed("RPCHeader", packed("ProtocolVersion", num(3)), "Term", num(0), "Entries", []byte{0x92, 0xc0, 0x80}),
			packed("RPCHeader", packed("ProtocolVersion", num(99)), "LastLogTerm", num(7)),
			packed("RPCHeader", packed("ProtocolVersion", num(3)), "SnapshotVersion", num(9), "Size",
				[]byte{0xcf, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}),
			packed("RPCHeader", packed("ProtocolVersion", num(3)), "Size", []byte{0xff}, "Configuration",
				[]byte{0xc4, 2, 1, 2}),
			packed("Entries", packed("Index", num(1))),
		} {
			f.Add(append([]byte{kind}, msg...))
			f.Add(append([]byte{kind}, msg[:len(msg)/2]...))
		}
	}
	c, r := loner(f)
	good := c.Config("r1").Network.ClientTLS.Clone()
	good.NextProtos = []string{"keelson-raft"}
	f.Fuzz(func(t *testing.T, data []byte) {
		conn, err := tls.Dial("tcp", r.Address(), good)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if err := conn.SetDeadline(time.Now().Add(100 * time.Millisecond)); err != nil {
			t.Fatal(err)
		}
		// It may hang up in the middle of it.
		_, _ = conn.Write(data)
		_ = conn.CloseWrite()
		_, _ = io.Copy(io.Discard, conn)
		if _, err := r.Sync(within(t, patience)); err != nil {
			t.Fatalf("after %x the replica is gone: %v", data, err)
		}
	})
}
