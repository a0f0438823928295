package replica_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"math"
	"net"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/replica"
	"keelson.dev/keelson/raftstore/storetest"
)

// framed puts messages one after the other, each behind its length.
func framed(messages ...[]byte) []byte {
	var out []byte
	for _, m := range messages {
		out = append(binary.AppendUvarint(out, uint64(len(m))), m...)
	}
	return out
}

// frames takes them apart again, and makes some of any bytes.
func frames(b []byte) [][]byte {
	var out [][]byte
	for len(b) > 0 && len(out) < 50 {
		n, size := binary.Uvarint(b)
		if size <= 0 {
			break
		}
		b = b[size:]
		n = min(n, uint64(len(b)))
		out, b = append(out, b[:n]), b[n:]
	}
	return out
}

func encoded(f *testing.F, messages ...proto.Message) [][]byte {
	var out [][]byte
	for _, m := range messages {
		data, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		out = append(out, data)
	}
	return out
}

// FuzzForwardStream: whatever messages another replica sends on one stream, this
// one goes on, and nothing changes but by proposals that are in order.
func FuzzForwardStream(f *testing.F) {
	put := func(key string) *storev1.ForwardRequest {
		return &storev1.ForwardRequest{Proposals: []*storev1.Proposal{
			{Ops: []*storev1.Op{{Kind: uint32(raftstore.OpPut), Key: key, Value: []byte("x")}}}}}
	}
	good := encoded(f, &storev1.ForwardCall{Id: 1, Request: put("/a")}, &storev1.ForwardCall{Id: 1, Request: put("/b")},
		&storev1.ForwardCall{Id: math.MaxUint64}, &storev1.ForwardCall{})
	f.Add(framed(good...))
	f.Add(framed(good[0], []byte{0xff}, good[1]))
	f.Add(framed(good[0], good[0][:len(good[0])/2]))
	f.Add(framed(nil, nil, nil, []byte{0x12, 0xff, 0xff, 0xff, 0xff, 0x0f}))
	f.Add(bytes.Repeat([]byte{0}, 50))
	c, r := loner(f)
	conn, err := grpc.NewClient("passthrough:///"+r.Address(),
		grpc.WithTransportCredentials(credentials.NewTLS(c.Config("r1").Network.ClientTLS.Clone())))
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { conn.Close() })
	// Of all inputs together: what a stream has brought may be applied after its end.
	allowed := r.Applied()
	f.Fuzz(func(t *testing.T, data []byte) {
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer cancel()
		stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true},
			storev1.Peer_Forwards_FullMethodName, grpc.ForceCodec(raw{}))
		if err != nil {
			t.Fatalf("the replica is gone: %v", err)
		}
		for _, m := range frames(data) {
			call := new(storev1.ForwardCall)
			if proto.Unmarshal(m, call) == nil {
				allowed += goodProposals(call.GetRequest())
			}
			if stream.SendMsg(&m) != nil { // it may end the stream at any of them
				break
			}
		}
		_ = stream.CloseSend()
		for reply := []byte(nil); stream.RecvMsg(&reply) == nil; {
			if err := proto.Unmarshal(reply, new(storev1.ForwardReply)); err != nil {
				t.Errorf("answer %x to %x: %v", reply, data, err)
			}
		}
		after, err := r.Sync(within(t, patience))
		if err != nil {
			t.Fatalf("after %x the replica is gone: %v", data, err)
		}
		if after > allowed {
			t.Errorf("%x moved the revision to %d, and all proposals in order make %d", data, after, allowed)
		}
	})
}

// liar is a leader that answers forwarded batches with any bytes.
type liar struct {
	replies chan []byte // one stream's worth
}

func (l *liar) serve(_ any, stream grpc.ServerStream) error {
	if name, _ := grpc.MethodFromServerStream(stream); name != storev1.Peer_Forwards_FullMethodName {
		return status.Error(codes.Unimplemented, name)
	}
	var call []byte
	if err := stream.RecvMsg(&call); err != nil {
		return err
	}
	var data []byte
	select {
	case data = <-l.replies:
	case <-stream.Context().Done():
	}
	for _, m := range frames(data) {
		if err := stream.SendMsg(&m); err != nil {
			return err
		}
	}
	return nil
}

// FuzzForwardReplies: whatever a leader answers on the stream, whoever has
// forwarded a batch gets an answer of the kind that he can read, or an error.
func FuzzForwardReplies(f *testing.F) {
	ok := &storev1.ForwardResponse{Index: 7, Outcomes: []*storev1.Outcome{{Revision: 7}}}
	one := encoded(f, &storev1.ForwardReply{Id: 1, Response: ok})[0]
	f.Add(framed(one))
	f.Add(framed(one, one, one)) // answered thrice
	f.Add(framed(encoded(f, &storev1.ForwardReply{Id: 2, Response: ok}, &storev1.ForwardReply{},
		&storev1.ForwardReply{Id: 1})...))
	f.Add(framed(encoded(f, &storev1.ForwardReply{Id: 1, Code: uint32(codes.Unimplemented)})...))
	f.Add(framed(encoded(f, &storev1.ForwardReply{Id: 1, Code: math.MaxUint32, Message: "?"})...))
	f.Add(framed(one[:len(one)-1]))
	f.Add([]byte{})
	authority, err := storetest.NewAuthority()
	if err != nil {
		f.Fatal(err)
	}
	serverTLS, clientTLS, err := authority.Issue("r1")
	if err != nil {
		f.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		f.Fatal(err)
	}
	lies := &liar{replies: make(chan []byte, 1)}
	server := grpc.NewServer(grpc.Creds(credentials.NewTLS(serverTLS)), grpc.ForceServerCodec(raw{}),
		grpc.UnknownServiceHandler(lies.serve))
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	forwards := replica.NewForwardingClient(clientTLS)
	f.Cleanup(func() {
		forwards.Close()
		server.Stop()
		<-served
	})
	f.Fuzz(func(t *testing.T, data []byte) {
		lies.replies <- data
		moved := make(chan struct{}) // a stream of its own
		resp, err := forwards.Call(within(t, patience), l.Addr().String(), moved, request(1))
		close(moved)
		if errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%x: no answer at all", data)
		}
		if err == nil && resp != nil && len(resp.GetOutcomes()) > len(data) {
			t.Errorf("%d outcomes out of %d bytes", len(resp.GetOutcomes()), len(data))
		}
		select {
		case <-lies.replies: // the call did not come that far
		default:
		}
	})
}
