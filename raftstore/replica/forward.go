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
)

// forwards sends batches to the leader, as messages of one stream for as long
// as it leads. A leader of a version without such streams is called instead.
type forwards struct {
	peers *peers

	mu   sync.Mutex
	line *forwardLine // the present one; nil when there was none
}

// leaderLine says where to send: the leader's address, and when it leads no more.
type leaderLine struct {
	address string
	moved   <-chan struct{}
}

// forwardLine is a stream to one leader during one leadership.
type forwardLine struct {
	to     leaderLine
	client storev1.PeerClient
	stream storev1.Peer_ForwardsClient
	ctx    context.Context // ends with the leadership
	cancel context.CancelFunc

	sending sync.Mutex

	mu      sync.Mutex
	last    uint64
	waiting map[uint64]chan *storev1.ForwardReply // each buffered for its reply
	ended   chan struct{}                         // closed when nothing more is received
	err     error                                 // and why; set before
}

// call forwards one batch. An error that wraps errNotProposed says that certainly
// none of it is in the log. It gives up when the leader changes, so that nobody
// waits for one who is gone.
//
// A leader of a previous release answers FailedPrecondition also when it has split the
// batch and a part of it is in the log; the current release answers with fates instead.
func (f *forwards) call(ctx context.Context, to leaderLine, req *storev1.ForwardRequest) (*storev1.ForwardResponse, error) {
	l, err := f.open(ctx, to)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errNotProposed, err)
	}
	req.Fates = true
	resp, err := l.call(req)
	if status.Code(err) == codes.Unimplemented { // and so it is not done
		resp, err = l.client.Forward(l.ctx, req)
	}
	c := status.Code(err)
	if c == codes.FailedPrecondition && len(req.GetProposals()) == 1 || c == codes.InvalidArgument {
		err = fmt.Errorf("%w: %w", errNotProposed, err)
	}
	return resp, err
}

// open returns the stream to the leader. One that has broken is made again;
// one that the leader does not know stays, and says so.
func (f *forwards) open(ctx context.Context, to leaderLine) (*forwardLine, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	select {
	case <-to.moved: // a line to another may be up already
		return nil, errors.New("the leader has changed")
	default:
	}
	if l := f.line; l != nil {
		if l.to.moved == to.moved && l.good() {
			return l, nil
		}
		f.line = nil
		l.close()
	}
	client, err := f.peers.client(to.address)
	if err != nil {
		return nil, err
	}
	l := &forwardLine{to: to, client: client, waiting: make(map[uint64]chan *storev1.ForwardReply), ended: make(chan struct{})}
	l.ctx, l.cancel = until(ctx, to.moved)
	if l.stream, err = client.Forwards(l.ctx); err != nil {
		l.cancel()
		return nil, err
	}
	go l.receive()
	f.line = l
	return l, nil
}

// close ends the stream, and returns when it has ended.
func (f *forwards) close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.line != nil {
		f.line.close()
		f.line = nil
	}
}

func (l *forwardLine) close() {
	l.cancel()
	<-l.ended
}

// good reports whether the stream may be used.
func (l *forwardLine) good() bool {
	select {
	case <-l.ended:
		return status.Code(l.err) == codes.Unimplemented
	default:
		return true
	}
}

func (l *forwardLine) call(req *storev1.ForwardRequest) (*storev1.ForwardResponse, error) {
	done := make(chan *storev1.ForwardReply, 1)
	l.mu.Lock()
	l.last++
	id := l.last
	l.waiting[id] = done
	l.mu.Unlock()
	l.sending.Lock()
	err := l.stream.Send(&storev1.ForwardCall{Id: id, Request: req})
	l.sending.Unlock()
	if err != nil && !errors.Is(err, io.EOF) { // of which receiving tells why
		l.cancel()
	}
	select {
	case r := <-done:
		return replied(r)
	case <-l.ended:
	}
	select {
	case r := <-done: // it came before the end
		return replied(r)
	default:
		return nil, l.err
	}
}

func replied(r *storev1.ForwardReply) (*storev1.ForwardResponse, error) {
	return r.GetResponse(), status.Error(codes.Code(r.GetCode()), r.GetMessage()) // nil for OK
}

// receive hands out replies until the stream ends.
func (l *forwardLine) receive() {
	defer close(l.ended)
	for {
		r, err := l.stream.Recv()
		if err != nil {
			l.err = err
			return
		}
		l.mu.Lock()
		done := l.waiting[r.GetId()]
		delete(l.waiting, r.GetId())
		l.mu.Unlock()
		if done != nil {
			done <- r
		}
	}
}

func (s *peerServer) Forward(ctx context.Context, req *storev1.ForwardRequest) (*storev1.ForwardResponse, error) {
	if n := len(req.GetProposals()); n > maxForward {
		return nil, status.Errorf(codes.InvalidArgument, "%d proposals, at most %d", n, maxForward)
	}
	items, results := make([]*item, len(req.GetProposals())), make([]result, len(req.GetProposals()))
	err := s.r.up(ctx)
	if err == nil && s.r.group.strangers(req.GetGroup()) {
		err = errAnotherGroup
	}
	if err != nil {
		for i := range results {
			results[i].err = fmt.Errorf("%w: %w", errNotProposed, err)
		}
		return forwardResponse(results, req.GetFates())
	}
	for i, p := range req.GetProposals() {
		items[i] = newItem(p)
		items[i].local = true // no second hop
	}
	s.r.queue.put(items...)
	for i, it := range items {
		select {
		case results[i] = <-it.done:
		case <-ctx.Done():
			return nil, status.FromContextError(ctx.Err()).Err()
		}
	}
	return forwardResponse(results, req.GetFates())
}

// forwardResponse answers a forwarded batch with the outcome of each proposal or, where it has none, its fate. A follower of a
// previous release knows no fates and takes an error for that of the whole batch: FailedPrecondition says that certainly
// none of it is in the log.
func forwardResponse(results []result, fates bool) (*storev1.ForwardResponse, error) {
	resp := &storev1.ForwardResponse{Outcomes: make([]*storev1.Outcome, len(results))}
	of, size := make([]storev1.ForwardResponse_Fate, len(results)), 0
	var notProposed, undecided error
	for i, res := range results {
		switch {
		case res.err == nil:
		case errors.Is(res.err, errNotProposed):
			of[i], notProposed = storev1.ForwardResponse_NOT_PROPOSED, res.err
		default:
			of[i], undecided = storev1.ForwardResponse_UNKNOWN, res.err
		}
		resp.Outcomes[i] = res.outcome.Proto()
		size += outcomeBytes(resp.Outcomes[i])
		resp.Index = max(resp.Index, res.index)
	}
	switch {
	case size > maxMessage:
		// gRPC would end the stream, and all calls on it.
		return nil, status.Errorf(codes.ResourceExhausted, "the outcomes of %d proposals are %d bytes, at most %d", len(results), size, maxMessage)
	case notProposed == nil && undecided == nil:
		return resp, nil
	case fates:
		resp.Fates = of
		return resp, nil
	case undecided != nil:
		return nil, statusOf(undecided)
	case slices.Contains(of, storev1.ForwardResponse_DECIDED):
		return nil, statusOf(fmt.Errorf("%w: the leader has split the batch", errMaybe))
	default:
		return nil, statusOf(notProposed)
	}
}

// forwardResult is the result of one proposal of a forwarded batch, by the leader's answer.
func forwardResult(resp *storev1.ForwardResponse, i, proposals int) result {
	fates := resp.GetFates()
	if len(resp.GetOutcomes()) != proposals || len(fates) != 0 && len(fates) != proposals {
		return result{err: errMaybe}
	}
	if len(fates) > 0 {
		switch fates[i] {
		case storev1.ForwardResponse_DECIDED:
		case storev1.ForwardResponse_NOT_PROPOSED:
			return result{err: errNotProposed}
		default:
			return result{err: errMaybe}
		}
	}
	return result{outcome: mvcc.OutcomeFrom(resp.GetOutcomes()[i]), index: resp.GetIndex()}
}

// outcomeBytes is at least the length of an outcome in a message. It is small:
// keys and messages are bounded, and no outcome has a value.
func outcomeBytes(o *storev1.Outcome) int {
	return 128 + len(o.GetKey()) + len(o.GetMessage()) + len(o.GetHave().GetKey()) + len(o.GetHave().GetValue())
}

// maxForwards bounds the calls of one stream that are under way at once.
const maxForwards = 2 * inFlight

// Forwards serves a stream until the other replica ends it and all its calls
// are answered, or the connection is lost, which ends the calls.
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
				said := status.Convert(err)
				reply.Code, reply.Message = uint32(said.Code()), strings.ToValidUTF8(said.Message(), "?") // else it could not be sent
			}
			sending.Lock()
			defer sending.Unlock()
			_ = stream.Send(reply) // if it fails, so does receiving
		})
	}
}
