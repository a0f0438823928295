package remote

import (
	"context"
	"errors"
	"io"
	"runtime"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	"keelson.dev/keelson/internal/wakeup"
	storev1 "keelson.dev/keelson/proto/store/v1"
)

// commitStream is the server's side of one Commits stream, on which a client sends concurrent
// commits.
type commitStream struct {
	store   *server
	running sync.WaitGroup // counts the goroutines that receive calls and that execute commits
	wake    wakeup.Signal
	work    chan commitWork // commits to be executed, received by idle workers

	mu      sync.Mutex
	cancels map[uint64]context.CancelFunc // cancel functions of the running commits, by call ID
	replies []*storev1.RemoteCommitReply  // replies that are not sent yet
}

// Commits serves a stream of commits. It returns when the client has closed the stream and all its
// commits are answered. If the connection is lost, it cancels the commits that are running.
func (s *server) Commits(
	stream grpc.BidiStreamingServer[storev1.RemoteCommitCalls, storev1.RemoteCommitReplies],
) error {
	b := &commitStream{store: s, wake: wakeup.New(), work: make(chan commitWork),
		cancels: make(map[uint64]context.CancelFunc)}
	ctx, cancel := context.WithCancel(stream.Context())
	defer b.running.Wait()
	defer cancel()
	ended := make(chan error, 1)
	b.running.Add(1)
	go func() {
		defer b.running.Done()
		ended <- b.readCalls(ctx, stream)
	}()
	for {
		select {
		case <-b.wake:
			// Commits of one batch are answered at the same moment: let other workers add their
			// replies to the message.
			runtime.Gosched()
			if err := b.sendReplies(stream); err != nil {
				return err
			}
		case err := <-ended:
			if !errors.Is(err, io.EOF) {
				return err
			}
			b.running.Wait()
			return b.sendReplies(stream)
		}
	}
}

// sendReplies sends the waiting replies in one or more messages. Each message has at most sendBytes
// bytes or one reply, because replies contain the values of conflicts.
func (b *commitStream) sendReplies(
	stream grpc.BidiStreamingServer[storev1.RemoteCommitCalls, storev1.RemoteCommitReplies],
) error {
	b.mu.Lock()
	replies := b.replies
	b.replies = nil
	b.mu.Unlock()
	for len(replies) > 0 {
		n := countFitting(replies)
		if err := stream.Send(&storev1.RemoteCommitReplies{Replies: replies[:n]}); err != nil {
			return err
		}
		replies = replies[n:]
	}
	return nil
}

// countFitting returns how many of the replies, from the first, fit into one message of sendBytes
// bytes. It returns at least 1.
func countFitting(replies []*storev1.RemoteCommitReply) int {
	size := 0
	for n, r := range replies {
		c := r.GetDone().GetConflict()
		size += replyCost + len(r.GetMessage()) + 2*len(c.GetKey()) + len(c.GetHave().GetValue())
		if n > 0 && size > sendBytes {
			return n
		}
	}
	return len(replies)
}

// readCalls receives messages until the stream ends. It starts each commit, and cancels the commits
// that the client has abandoned.
func (b *commitStream) readCalls(
	ctx context.Context, stream grpc.BidiStreamingServer[storev1.RemoteCommitCalls, storev1.RemoteCommitReplies],
) error {
	defer close(b.work)
	for {
		msg, err := stream.Recv()
		if err != nil {
			return err
		}
		for _, call := range msg.GetCalls() {
			if call.GetCommit() == nil {
				b.forgetCommit(call.GetId())
				continue
			}
			b.startCommit(ctx, call)
		}
	}
}

// commitWork is one received commit and the context with which it is executed.
type commitWork struct {
	ctx  context.Context
	call *storev1.RemoteCommitCall
}

// startCommit passes one commit to an idle worker, or to a new worker. It does not wait for the
// result.
func (b *commitStream) startCommit(ctx context.Context, call *storev1.RemoteCommitCall) {
	var cancel context.CancelFunc
	w := commitWork{call: call}
	if t := time.Duration(call.GetTimeoutUs()) * time.Microsecond; t > 0 {
		w.ctx, cancel = context.WithTimeout(ctx, usableTimeout(t))
	} else {
		w.ctx, cancel = context.WithCancel(ctx)
	}
	b.mu.Lock()
	b.cancels[call.GetId()] = cancel
	b.mu.Unlock()
	select {
	case b.work <- w:
	default: // all workers are busy
		b.running.Add(1)
		go b.runCommits(w)
	}
}

// runCommits is a worker: it executes the commit w and then further commits, one after the other,
// until the stream ends. Workers are reused because a goroutine with a grown stack is cheaper than
// a new one.
func (b *commitStream) runCommits(w commitWork) {
	defer b.running.Done()
	for ok := true; ok; w, ok = <-b.work {
		done, err := b.store.commitRequest(w.ctx, w.call.GetCommit())
		b.forgetCommit(w.call.GetId())
		b.sendReply(w.call.GetId(), done, err)
		w = commitWork{}
	}
}

// forgetCommit cancels the context of the commit with the given call ID, and removes the commit
// from the running commits.
func (b *commitStream) forgetCommit(id uint64) {
	b.mu.Lock()
	cancel := b.cancels[id]
	delete(b.cancels, id)
	b.mu.Unlock()
	if cancel != nil {
		cancel()
	}
}

func (b *commitStream) sendReply(id uint64, done *storev1.RemoteCommitResponse, err error) {
	r := &storev1.RemoteCommitReply{Id: id, Done: done}
	if err != nil {
		said := status.Convert(err)
		r.Done, r.Code, r.Message = nil, uint32(said.Code()), said.Message()
		for _, d := range said.Details() {
			r.Failure, _ = d.(*storev1.RemoteFailure)
		}
	}
	b.mu.Lock()
	b.replies = append(b.replies, r)
	b.mu.Unlock()
	b.wake.Send()
}
