package replica

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore/mvcc"
	"keelson.dev/keelson/raftstore/replica/peernet"
	"keelson.dev/keelson/raftstore/replica/proposals"
)

func (s *peerServer) Forward(ctx context.Context, req *storev1.ForwardRequest) (*storev1.ForwardResponse, error) {
	if n := len(req.GetProposals()); n > maxForward {
		return nil, status.Errorf(codes.InvalidArgument, "%d proposals, at most %d", n, maxForward)
	}
	items, results := make([]*proposals.Item, len(req.GetProposals())),
		make([]proposals.Result, len(req.GetProposals()))
	err := s.r.node.awaitRunning(ctx)
	if err == nil && s.r.net.group.IsForeign(req.GetGroup()) {
		err = peernet.ErrAnotherGroup
	}
	if err != nil {
		for i := range results {
			results[i].Err = fmt.Errorf("%w: %w", proposals.ErrNotProposed, err)
		}
		return forwardResponse(results, req.GetFates())
	}
	for i, p := range req.GetProposals() {
		items[i] = proposals.NewItem(p)
		items[i].Local = true // this replica must not forward the proposal again
	}
	s.r.commits.queue.Enqueue(items...)
	for i, it := range items {
		select {
		case results[i] = <-it.Done:
		case <-ctx.Done():
			return nil, status.FromContextError(ctx.Err()).Err()
		}
	}
	return forwardResponse(results, req.GetFates())
}

// forwardResponse returns the response to a forwarded batch. It contains, for each proposal, the
// outcome or else the fate: whether the proposal may be in the log. fates reports whether the
// follower supports fates. A follower of a previous release does not. It interprets an error as
// that of the whole batch: FailedPrecondition means that certainly no proposal is in the log.
func forwardResponse(results []proposals.Result, fates bool) (*storev1.ForwardResponse, error) {
	resp := &storev1.ForwardResponse{Outcomes: make([]*storev1.Outcome, len(results))}
	of, size := make([]storev1.ForwardResponse_Fate, len(results)), 0
	var notProposed, undecided error
	for i, res := range results {
		switch {
		case res.Err == nil:
		case errors.Is(res.Err, proposals.ErrNotProposed):
			of[i], notProposed = storev1.ForwardResponse_NOT_PROPOSED, res.Err
		default:
			of[i], undecided = storev1.ForwardResponse_UNKNOWN, res.Err
		}
		resp.Outcomes[i] = res.Outcome.Proto()
		size += boundOutcome(resp.Outcomes[i])
		resp.Index = max(resp.Index, res.Index)
	}
	switch {
	case size > peernet.MaxMessage:
		// gRPC would end the stream and all calls on it
		return nil, status.Errorf(codes.ResourceExhausted, "the outcomes of %d proposals are %d bytes, at most %d",
			len(results), size, peernet.MaxMessage)
	case notProposed == nil && undecided == nil:
		return resp, nil
	case fates:
		resp.Fates = of
		return resp, nil
	case undecided != nil:
		return nil, errorToStatus(undecided)
	case slices.Contains(of, storev1.ForwardResponse_DECIDED):
		return nil, errorToStatus(fmt.Errorf("%w: the leader has split the batch", proposals.ErrMaybe))
	default:
		return nil, errorToStatus(notProposed)
	}
}

// forwardResult returns the result of proposal i of a forwarded batch, taken from the leader's
// response. sent is the number of proposals in the batch.
func forwardResult(resp *storev1.ForwardResponse, i, sent int) proposals.Result {
	fates := resp.GetFates()
	if len(resp.GetOutcomes()) != sent || len(fates) != 0 && len(fates) != sent {
		return proposals.Result{Err: proposals.ErrMaybe}
	}
	if len(fates) > 0 {
		switch fates[i] {
		case storev1.ForwardResponse_DECIDED:
		case storev1.ForwardResponse_NOT_PROPOSED:
			return proposals.Result{Err: proposals.ErrNotProposed}
		default:
			return proposals.Result{Err: proposals.ErrMaybe}
		}
	}
	return proposals.Result{Outcome: mvcc.OutcomeFrom(resp.GetOutcomes()[i]), Index: resp.GetIndex()}
}

// boundOutcome returns an upper bound of the encoded size of an outcome, in bytes. The bound is
// small: keys and messages are bounded, and an outcome contains no value.
func boundOutcome(o *storev1.Outcome) int {
	return 128 + len(o.GetKey()) + len(o.GetMessage()) + len(o.GetHave().GetKey()) + len(o.GetHave().GetValue())
}

// maxForwards is the maximum number of concurrent calls of one Forwards stream.
const maxForwards = 2 * proposals.InFlight

// Forwards serves a stream of batches that another replica forwards to this one. It returns nil
// when that replica has closed the stream and all calls are answered. It returns an error when the
// connection is lost, which cancels the calls.
func (s *peerServer) Forwards(stream grpc.BidiStreamingServer[storev1.ForwardCall, storev1.ForwardReply]) error {
	var (
		sending sync.Mutex
		calls   sync.WaitGroup
		places  = make(chan struct{}, maxForwards)
	)
	ctx, cancel := context.WithCancel(stream.Context())
	defer calls.Wait()
	defer cancel()
	for {
		call, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			calls.Wait()
			return nil
		}
		if err != nil {
			return err
		}
		select {
		case places <- struct{}{}:
		case <-ctx.Done():
			return status.FromContextError(ctx.Err()).Err()
		}
		calls.Go(func() {
			defer func() { <-places }()
			reply := &storev1.ForwardReply{Id: call.GetId()}
			if resp, err := s.Forward(ctx, call.GetRequest()); err == nil {
				reply.Response = resp
			} else {
				refusal := status.Convert(err)
				// invalid UTF-8 could not be sent
				reply.Code, reply.Message = uint32(refusal.Code()), strings.ToValidUTF8(refusal.Message(), "?")
			}
			sending.Lock()
			defer sending.Unlock()
			_ = stream.Send(reply) // if it fails, receiving fails too
		})
	}
}
