package remote

import (
	"context"
	"fmt"
	"sync"

	"google.golang.org/grpc"

	"keelson.dev/keelson/internal/wakeup"
	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
)

// ahead is the size of a watcher's buffer: how many received revisions it holds for its reader.
const ahead = 16

type watchStream = grpc.BidiStreamingClient[storev1.RemoteWatchRequest, storev1.RemoteEvents]

// watcher is the client's side of one watch. It implements raftstore.Watcher and
// raftstore.ProgressRequester.
type watcher struct {
	c      chan raftstore.Events
	ctx    context.Context // context of the stream
	cancel context.CancelFunc
	asked  wakeup.Signal

	mu  sync.Mutex
	err error // set before c is closed
}

// Watch implements raftstore.Store. When it returns without an error, the watch is running on the
// replica.
func (c *Client) Watch(ctx context.Context, prefix string, after raftstore.Revision) (raftstore.Watcher, error) {
	ctx, cancel := context.WithCancel(ctx)
	stream, err := retryRead(ctx, c, func() (watchStream, error) { return c.openWatch(ctx, prefix, after) })
	if err != nil {
		cancel()
		return nil, fmt.Errorf("watch of %q: %w", prefix, err)
	}
	w := &watcher{c: make(chan raftstore.Events, ahead), ctx: ctx, cancel: cancel, asked: wakeup.New()}
	go w.receiveRevisions(c, stream)
	go w.sendProgressRequests(stream)
	return w, nil
}

// openWatch opens the stream of a watch and waits for the first message of the replica, which
// confirms that the watch is running.
func (c *Client) openWatch(ctx context.Context, prefix string, after raftstore.Revision) (watchStream, error) {
	stream, err := c.store.Watch(ctx)
	if err != nil {
		return nil, err
	}
	// The error of Send is also returned by Recv.
	_ = stream.Send(&storev1.RemoteWatchRequest{Ask: &storev1.RemoteWatchRequest_Begin{
		Begin: &storev1.RemoteWatchBegin{Prefix: []byte(prefix), After: uint64(after)},
	}})
	_, err = stream.Recv()
	return stream, err
}

// receiveRevisions passes received revisions to the channel until the stream ends. It joins the
// parts of a revision that was sent in several messages.
func (w *watcher) receiveRevisions(c *Client, stream watchStream) {
	defer close(w.c)
	defer w.cancel()
	var whole raftstore.Events // the received parts of a revision
	for {
		m, failed := stream.Recv()
		if w.ctx.Err() != nil {
			return // stopped or cancelled: no error
		}
		if failed != nil {
			err, _ := c.translateError(w.ctx, failed)
			w.mu.Lock()
			w.err = err
			w.mu.Unlock()
			return
		}
		part := eventsFrom(m)
		if whole.Revision = part.Revision; len(whole.Events) == 0 {
			whole.Events = part.Events
		} else {
			whole.Events = append(whole.Events, part.Events...)
		}
		if m.GetMore() {
			continue
		}
		ev := whole
		whole = raftstore.Events{}
		select {
		case w.c <- ev:
		case <-w.ctx.Done():
			return
		}
	}
}

// sendProgressRequests sends the requests of RequestProgress to the replica until the stream ends.
func (w *watcher) sendProgressRequests(stream watchStream) {
	for {
		select {
		case <-w.asked:
			_ = stream.Send(&storev1.RemoteWatchRequest{
				Ask: &storev1.RemoteWatchRequest_Progress{Progress: new(storev1.RemoteProgressRequest)},
			})
		case <-w.ctx.Done():
			return
		}
	}
}

// C implements raftstore.Watcher.
func (w *watcher) C() <-chan raftstore.Events { return w.c }

// Err implements raftstore.Watcher.
func (w *watcher) Err() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.err
}

// Stop implements raftstore.Watcher.
func (w *watcher) Stop() { w.cancel() }

// RequestProgress implements raftstore.ProgressRequester.
func (w *watcher) RequestProgress() {
	w.asked.Send()
}
