// Package forwarding sends batches of proposals from a follower to the leader.
package forwarding

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore/replica/peernet"
	"keelson.dev/keelson/raftstore/replica/proposals"
)

// Client forwards batches of proposals to the leader. All batches of one leadership are sent on one
// stream. A leader of a release that does not support such streams is called once per batch. A
// Client is safe for concurrent use.
type Client struct {
	Peers *peernet.Clients

	mu   sync.Mutex
	line *leaderStream // the current stream; nil if no stream has been opened
}

// Leader is the leader to which batches are forwarded. Moved is closed when it no longer leads.
type Leader struct {
	Address string
	Moved   <-chan struct{}
}

// leaderStream is the stream to one leader during one leadership.
type leaderStream struct {
	to     Leader
	client storev1.PeerClient
	stream storev1.Peer_ForwardsClient
	ctx    context.Context // ends with the leadership
	cancel context.CancelFunc

	sending sync.Mutex

	mu      sync.Mutex
	last    uint64
	waiting map[uint64]chan *storev1.ForwardReply // buffered channels for the replies, by call ID
	ended   chan struct{}                         // closed when the stream has ended
	err     error                                 // why the stream has ended; set before ended is closed
}

// ForwardBatch forwards one batch and returns the response of the leader. An error that wraps
// proposals.ErrNotProposed guarantees that no proposal of the batch is in the log. The call ends
// with an error when the leader changes.
//
// A leader of a previous release also answers FailedPrecondition if it has split the batch and a
// part of it is in the log. The current release answers with the fate of each proposal instead:
// whether it may be in the log.
func (f *Client) ForwardBatch(ctx context.Context, leader Leader,
	req *storev1.ForwardRequest) (*storev1.ForwardResponse, error) {
	l, err := f.openStream(ctx, leader)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", proposals.ErrNotProposed, err)
	}
	req.Fates = true
	resp, err := l.callLeader(req)
	if status.Code(err) == codes.Unimplemented { // the leader has not executed the call
		resp, err = l.client.Forward(l.ctx, req)
	}
	c := status.Code(err)
	if c == codes.FailedPrecondition && len(req.GetProposals()) == 1 || c == codes.InvalidArgument {
		err = fmt.Errorf("%w: %w", proposals.ErrNotProposed, err)
	}
	return resp, err
}

// openStream returns the stream to the leader. It opens a new stream if there is no usable one. A
// stream that the leader does not implement stays open, and its calls return Unimplemented.
func (f *Client) openStream(ctx context.Context, leader Leader) (*leaderStream, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	select {
	case <-leader.Moved: // the open stream may be one to another leader
		return nil, errors.New("the leader has changed")
	default:
	}
	if l := f.line; l != nil {
		if l.to.Moved == leader.Moved && l.isUsable() {
			return l, nil
		}
		f.line = nil
		l.closeStream()
	}
	client, err := f.Peers.Client(leader.Address)
	if err != nil {
		return nil, err
	}
	l := &leaderStream{to: leader, client: client, waiting: make(map[uint64]chan *storev1.ForwardReply),
		ended: make(chan struct{})}
	l.ctx, l.cancel = peernet.WithCancelOn(ctx, leader.Moved)
	if l.stream, err = client.Forwards(l.ctx); err != nil {
		l.cancel()
		return nil, err
	}
	go l.receiveReplies()
	f.line = l
	return l, nil
}

// Close closes the stream and returns when it has ended.
func (f *Client) Close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.line != nil {
		f.line.closeStream()
		f.line = nil
	}
}

func (l *leaderStream) closeStream() {
	l.cancel()
	<-l.ended
}

// isUsable reports whether the stream can carry another call.
func (l *leaderStream) isUsable() bool {
	select {
	case <-l.ended:
		return status.Code(l.err) == codes.Unimplemented
	default:
		return true
	}
}

func (l *leaderStream) callLeader(req *storev1.ForwardRequest) (*storev1.ForwardResponse, error) {
	done := make(chan *storev1.ForwardReply, 1)
	l.mu.Lock()
	l.last++
	id := l.last
	l.waiting[id] = done
	l.mu.Unlock()
	l.sending.Lock()
	err := l.stream.Send(&storev1.ForwardCall{Id: id, Request: req})
	l.sending.Unlock()
	if err != nil && !errors.Is(err, io.EOF) { // for io.EOF receiving returns the cause
		l.cancel()
	}
	select {
	case r := <-done:
		return replyResult(r)
	case <-l.ended:
	}
	select {
	case r := <-done: // the reply arrived before the stream ended
		return replyResult(r)
	default:
		return nil, l.err
	}
}

func replyResult(r *storev1.ForwardReply) (*storev1.ForwardResponse, error) {
	return r.GetResponse(), status.Error(codes.Code(r.GetCode()), r.GetMessage()) // nil for OK
}

// receiveReplies passes each reply to its call until the stream ends.
func (l *leaderStream) receiveReplies() {
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
