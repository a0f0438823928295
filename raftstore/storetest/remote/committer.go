package remote

import (
	"context"
	"runtime"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"keelson.dev/keelson/internal/wakeup"
	storev1 "keelson.dev/keelson/proto/store/v1"
)

// committer sends the commits of all callers of a Client on one Commits stream. Calls that are made
// while a message is being sent are sent together in the next message.
type committer struct {
	store storev1.RemoteClient
	life  context.Context
	end   context.CancelFunc
	once  sync.Once
	wake  wakeup.Signal

	mu     sync.Mutex
	last   uint64
	queue  []*commitCall // calls that have not been sent
	sent   map[uint64]*commitCall
	gone   []uint64 // IDs of sent calls that their callers have abandoned
	closed bool
}

type commitCall struct {
	id   uint64
	ctx  context.Context
	req  *storev1.RemoteCommitRequest
	done chan commitReply // receives the reply; buffered, so that the sender does not block
}

// commitReply is the result of a commit. failed is the error of the gRPC call; nil if the commit
// was answered. sent is true if the commit may have reached the replica.
type commitReply struct {
	done   *storev1.RemoteCommitResponse
	failed error
	sent   bool
}

// sendBytes is the maximum size of the keys and values in one message, unless a single commit is
// larger. replyCost is the assumed size of a reply in addition to its strings and values. Both are
// in bytes.
const (
	sendBytes = 1 << 20
	replyCost = 128 // size of a reply in addition to its values
)

func newCommitter(store storev1.RemoteClient) *committer {
	m := &committer{store: store, wake: wakeup.New(), sent: make(map[uint64]*commitCall)}
	m.life, m.end = context.WithCancel(context.Background())
	return m
}

// callCommit sends one commit and returns its result. If no stream is open, the commit waits for
// the next stream. If ctx ends first, callCommit abandons the call and returns an error.
func (m *committer) callCommit(ctx context.Context, req *storev1.RemoteCommitRequest) commitReply {
	m.once.Do(func() { go m.runStreams() })
	c := &commitCall{ctx: ctx, req: req, done: make(chan commitReply, 1)}
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		return commitReply{failed: status.FromContextError(context.Canceled).Err()}
	}
	m.last++
	c.id = m.last
	m.queue = append(m.queue, c)
	m.mu.Unlock()
	m.wakeSender()
	select {
	case r := <-c.done:
		return r
	case <-ctx.Done():
		return m.abandonCall(c)
	}
}

// abandonCall abandons a call after the end of its context, and returns its result. If the call has
// been sent, the replica is requested to cancel it.
func (m *committer) abandonCall(c *commitCall) commitReply {
	m.mu.Lock()
	defer m.mu.Unlock()
	r := commitReply{failed: status.FromContextError(c.ctx.Err()).Err()}
	if m.sent[c.id] == c {
		delete(m.sent, c.id)
		m.gone = append(m.gone, c.id)
		m.wakeSender()
		r.sent = true
		return r
	}
	for i, q := range m.queue {
		if q == c {
			m.queue = append(m.queue[:i:i], m.queue[i+1:]...)
			return r
		}
	}
	return <-c.done // the reply arrived at the same moment
}

func (m *committer) wakeSender() {
	m.wake.Send()
}

// closeStream closes the stream and ends every call with an error.
func (m *committer) closeStream() {
	m.end()
	m.once.Do(func() {}) // runStreams is not started after this call
	m.mu.Lock()
	defer m.mu.Unlock()
	m.closed = true
	m.failCalls(status.FromContextError(context.Canceled).Err(), true)
}

// failCalls ends the calls that have been sent with the error err. If all is set, it also ends the
// calls that have not been sent. The caller holds m.mu.
func (m *committer) failCalls(err error, all bool) {
	for id, c := range m.sent {
		delete(m.sent, id)
		c.done <- commitReply{failed: err, sent: true}
	}
	m.gone = nil
	if !all {
		return
	}
	for _, c := range m.queue {
		c.done <- commitReply{failed: err}
	}
	m.queue = nil
}

// runStreams opens a stream when there are calls to send, and serves it until it breaks. It does so
// repeatedly until the committer is closed.
func (m *committer) runStreams() {
	for {
		select {
		case <-m.wake:
		case <-m.life.Done():
			return
		}
		m.mu.Lock()
		idle := len(m.queue) == 0
		m.mu.Unlock()
		if idle {
			continue
		}
		err, opened := m.serveStream()
		m.mu.Lock()
		m.failCalls(err, !opened)
		left := len(m.queue) > 0
		m.mu.Unlock()
		if left {
			m.wakeSender()
		}
	}
}

// serveStream opens a stream, and sends calls and receives replies until the stream breaks. It
// returns the error of the stream, and whether the stream was opened.
func (m *committer) serveStream() (err error, opened bool) {
	ctx, cancel := context.WithCancel(m.life)
	defer cancel()
	s, err := m.store.Commits(ctx)
	if err != nil {
		return err, false
	}
	broken := make(chan error, 1)
	go func() { broken <- m.receiveReplies(s) }()
	for {
		// Callers that received replies of one message usually make new calls at once. They may do
		// so here, so that one message has all these calls.
		runtime.Gosched()
		for msg := m.takeCalls(); msg != nil; msg = m.takeCalls() {
			if s.Send(msg) != nil {
				return <-broken, true // receiveReplies returns the reason
			}
		}
		select {
		case <-m.wake:
		case err := <-broken:
			return err, true
		}
	}
}

// takeCalls removes calls from the queue and returns them as one message. The message has at most
// sendBytes bytes of keys and values, or a single call. takeCalls returns nil if there is nothing
// to send.
func (m *committer) takeCalls() *storev1.RemoteCommitCalls {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.queue) == 0 && len(m.gone) == 0 {
		return nil
	}
	msg := new(storev1.RemoteCommitCalls)
	for _, id := range m.gone {
		msg.Calls = append(msg.Calls, &storev1.RemoteCommitCall{Id: id})
	}
	m.gone = nil
	n, size := 0, 0
	for _, c := range m.queue {
		for _, op := range c.req.GetOps() {
			size += len(op.GetKey()) + len(op.GetValue())
		}
		if n > 0 && size > sendBytes {
			break
		}
		n++
		call := &storev1.RemoteCommitCall{Id: c.id, Commit: c.req}
		if deadline, ok := c.ctx.Deadline(); ok {
			call.TimeoutUs = max(1, time.Until(deadline).Microseconds())
		}
		msg.Calls = append(msg.Calls, call)
		m.sent[c.id] = c
	}
	rest := copy(m.queue, m.queue[n:])
	clear(m.queue[rest:])
	m.queue = m.queue[:rest]
	return msg
}

// receiveReplies passes received replies to the waiting callers until the stream breaks, and
// returns the error of the stream.
func (m *committer) receiveReplies(s storev1.Remote_CommitsClient) error {
	for {
		msg, err := s.Recv()
		if err != nil {
			return err
		}
		m.mu.Lock()
		for _, r := range msg.GetReplies() {
			c := m.sent[r.GetId()]
			if c == nil {
				continue
			}
			delete(m.sent, c.id)
			c.done <- commitReply{done: r.GetDone(), failed: failedFrom(r), sent: true}
		}
		m.mu.Unlock()
	}
}

func failedFrom(r *storev1.RemoteCommitReply) error {
	if r.GetDone() != nil {
		return nil
	}
	said := status.New(codes.Code(r.GetCode()), r.GetMessage())
	if with, err := said.WithDetails(r.GetFailure()); r.GetFailure() != nil && err == nil {
		said = with
	}
	if said.Code() == codes.OK {
		return status.Error(codes.Unknown, "empty reply")
	}
	return said.Err()
}
