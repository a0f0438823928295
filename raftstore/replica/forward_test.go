package replica_test

import (
	"context"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore/replica"
	"keelson.dev/keelson/raftstore/storetest"
)

type forwardStream = grpc.BidiStreamingServer[storev1.ForwardCall, storev1.ForwardReply]

// leaderOf serves Forwards as a test says.
type leaderOf struct {
	storev1.UnimplementedPeerServer
	streams atomic.Int32
	serve   func(stream forwardStream) error
}

func (l *leaderOf) Forwards(stream forwardStream) error {
	l.streams.Add(1)
	return l.serve(stream)
}

// oldLeader is one of a version that knows single calls only.
type oldLeader struct {
	storev1.UnimplementedPeerServer
}

func (oldLeader) Forward(_ context.Context, req *storev1.ForwardRequest) (*storev1.ForwardResponse, error) {
	return reply(req), nil
}

// reply tells by its index which call it answers.
func reply(req *storev1.ForwardRequest) *storev1.ForwardResponse {
	return &storev1.ForwardResponse{Index: req.GetProposals()[0].GetFence()}
}

func request(n uint64) *storev1.ForwardRequest {
	return &storev1.ForwardRequest{Proposals: []*storev1.Proposal{{Fence: n}}}
}

// forwarding serves a leader and returns who forwards to it, and where it is.
func forwarding(t testing.TB, leader storev1.PeerServer) (*replica.ForwardingClient, string) {
	authority, err := storetest.NewAuthority()
	if err != nil {
		t.Fatal(err)
	}
	serverTLS, clientTLS, err := authority.Issue("r1")
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer(grpc.Creds(credentials.NewTLS(serverTLS)))
	storev1.RegisterPeerServer(s, leader)
	served := make(chan struct{})
	go func() {
		defer close(served)
		if err := s.Serve(l); err != nil {
			t.Error(err)
		}
	}()
	f := replica.NewForwardingClient(clientTLS)
	t.Cleanup(func() {
		f.Close()
		s.Stop()
		<-served
	})
	return f, l.Addr().String()
}

// Batches share one stream, and each gets its own answer, in whatever order they come.
func TestForwardsShareAStream(t *testing.T) {
	const n = 3
	leader := &leaderOf{serve: func(stream forwardStream) error {
		var calls []*storev1.ForwardCall
		for range n {
			call, err := stream.Recv()
			if err != nil {
				return err
			}
			calls = append(calls, call)
		}
		for i := range calls {
			call := calls[n-1-i]
			if err := stream.Send(&storev1.ForwardReply{Id: call.GetId(), Response: reply(call.GetRequest())}); err !=
				nil {
				return err
			}
		}
		<-stream.Context().Done()
		return nil
	}}
	f, address := forwarding(t, leader)
	moved := make(chan struct{})
	var wg sync.WaitGroup
	for i := range uint64(n) {
		wg.Go(func() {
			resp, err := f.Call(within(t, patience), address, moved, request(i))
			if err != nil || resp.GetIndex() != i {
				t.Errorf("call %d: answer of %d, error %v", i, resp.GetIndex(), err)
			}
		})
	}
	wg.Wait()
	if s := leader.streams.Load(); s != 1 {
		t.Errorf("%d streams", s)
	}
}

// A leader of a version before there were streams is called.
func TestForwardsToAnOldLeader(t *testing.T) {
	f, address := forwarding(t, oldLeader{})
	moved := make(chan struct{})
	for i := range uint64(3) {
		resp, err := f.Call(within(t, patience), address, moved, request(i))
		if err != nil || resp.GetIndex() != i {
			t.Errorf("call %d: answer of %d, error %v", i, resp.GetIndex(), err)
		}
	}
}

// What the leader refuses is certainly not proposed; what it may have taken is
// not said to be, whether it ceases to lead or its stream breaks.
func TestForwardsTellWhatMayBeProposed(t *testing.T) { // F53
	got := make(chan uint64, 1)
	leader := &leaderOf{serve: func(stream forwardStream) error {
		for {
			call, err := stream.Recv()
			if err != nil {
				return err
			}
			switch n := call.GetRequest().GetProposals()[0].GetFence(); n {
			case 1:
				if err := stream.Send(&storev1.ForwardReply{Id: call.GetId(), Code: uint32(codes.FailedPrecondition),
					Message: "not me"}); err != nil {
					return err
				}
			case 6, 7:
				said := map[uint64]codes.Code{6: codes.InvalidArgument, 7: codes.ResourceExhausted}[n]
				if err := stream.Send(&storev1.ForwardReply{Id: call.GetId(), Code: uint32(said),
					Message: "too much"}); err != nil {
					return err
				}
			case 2:
				return status.Error(codes.Unavailable, "broken")
			case 3:
				got <- n
			default:
				if err := stream.Send(&storev1.ForwardReply{Id: call.GetId(),
					Response: reply(call.GetRequest())}); err != nil {
					return err
				}
			}
		}
	}}
	f, address := forwarding(t, leader)
	moved := make(chan struct{})
	ctx := within(t, patience)
	if _, err := f.Call(ctx, address, moved, request(1)); !errors.Is(err, replica.ErrBatchNotProposed) {
		t.Errorf("refused: %v", err)
	}
	if _, err := f.Call(ctx, address, moved, request(6)); !errors.Is(err, replica.ErrBatchNotProposed) {
		t.Errorf("refused as it is: %v", err)
	}
	if _, err := f.Call(ctx, address, moved, request(7)); status.Code(err) != codes.ResourceExhausted ||
		errors.Is(err, replica.ErrBatchNotProposed) {
		t.Errorf("an answer that is too large: %v", err)
	}
	if _, err := f.Call(ctx, address, moved, request(2)); err == nil || errors.Is(err, replica.ErrBatchNotProposed) {
		t.Errorf("a stream that broke: %v", err)
	}
	if resp, err := f.Call(ctx, address, moved, request(9)); err != nil || resp.GetIndex() != 9 {
		t.Errorf("after it broke: %v, error %v", resp, err)
	}
	failed := make(chan error)
	go func() {
		_, err := f.Call(ctx, address, moved, request(3))
		failed <- err
	}()
	<-got
	close(moved)
	if err := <-failed; err == nil || errors.Is(err, replica.ErrBatchNotProposed) {
		t.Errorf("the leader ceased to lead: %v", err)
	}
	if _, err := f.Call(ctx, address, moved, request(4)); !errors.Is(err, replica.ErrBatchNotProposed) {
		t.Errorf("to one who leads no more: %v", err)
	}
	if resp, err := f.Call(ctx, address, make(chan struct{}), request(5)); err != nil || resp.GetIndex() != 5 {
		t.Errorf("to the next: %v, error %v", resp, err)
	}
	if n := leader.streams.Load(); n != 3 {
		t.Errorf("%d streams, want one, another when it broke, and one to the next leader", n)
	}
}

// BenchmarkForward is a small batch on its way to a leader and back.
func BenchmarkForward(b *testing.B) {
	for name, leader := range map[string]storev1.PeerServer{
		"calls": oldLeader{},
		"stream": &leaderOf{serve: func(stream forwardStream) error {
			for {
				call, err := stream.Recv()
				if err != nil {
					return nil
				}
				if err := stream.Send(&storev1.ForwardReply{Id: call.GetId(),
					Response: reply(call.GetRequest())}); err != nil {
					return err
				}
			}
		}},
	} {
		b.Run(name, func(b *testing.B) {
			f, address := forwarding(b, leader)
			moved := make(chan struct{})
			req := &storev1.ForwardRequest{}
			for range 8 {
				req.Proposals = append(req.Proposals,
					&storev1.Proposal{Ops: []*storev1.Op{{Key: "/bench/k", Value: make([]byte, 1024)}}})
			}
			b.ReportAllocs()
			for b.Loop() {
				if _, err := f.Call(b.Context(), address, moved, req); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
