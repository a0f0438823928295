// Package remote provides raftstore.Store over gRPC, for tests and benchmarks with replicas in
// separate processes. Register serves a store, and Dial returns a client that implements Store with
// the same errors and deadlines.
//
// The memory of a watcher is bounded on both sides. Flow control windows are fixed, so a slow
// reader blocks the replica's watcher. That watcher then catches up from history or is ended, as
// with a reader in the same process.
package remote

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
)

const (
	// maxMessage is the largest gRPC message in bytes. The largest message in use is a commit of
	// about 8 MiB.
	maxMessage = 32 << 20
	// window is the flow control window of a stream: how many bytes may be sent but not read yet.
	window = 256 << 10
	// chunkBytes is the size of a message with a part of a list or of a revision. A larger item or
	// event has a message of its own.
	chunkBytes = 1 << 20
	// replyReserve is the part of a deadline that is reserved for the response.
	replyReserve = 100 * time.Millisecond
)

// ServerOptions returns the options with which a gRPC server must be created to serve a store.
func ServerOptions() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.MaxRecvMsgSize(maxMessage), grpc.MaxSendMsgSize(maxMessage),
		grpc.InitialWindowSize(window), grpc.InitialConnWindowSize(4 * window),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: time.Second, PermitWithoutStream: true}),
	}
}

// Register registers a gRPC service that serves the store s to clients of this package.
func Register(r grpc.ServiceRegistrar, s raftstore.Store) {
	storev1.RegisterRemoteServer(r, &server{store: s})
}

type server struct {
	storev1.UnimplementedRemoteServer
	store raftstore.Store
}

// withReplyReserve returns a context with an earlier deadline than ctx, so that time is left to
// send the response. The outcome of a call matters more to the client than the last milliseconds of
// waiting.
func withReplyReserve(ctx context.Context) (context.Context, context.CancelFunc) {
	deadline, ok := ctx.Deadline()
	if !ok {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, usableTimeout(time.Until(deadline)))
}

// usableTimeout returns the part of a timeout that the store may use for a call. The rest is
// reserved for the response.
func usableTimeout(t time.Duration) time.Duration { return t - min(replyReserve, t/5) }

func (s *server) Commit(ctx context.Context, req *storev1.RemoteCommitRequest) (*storev1.RemoteCommitResponse, error) {
	ctx, cancel := withReplyReserve(ctx)
	defer cancel()
	return s.commitRequest(ctx, req)
}

func (s *server) commitRequest(ctx context.Context, req *storev1.RemoteCommitRequest) (
	*storev1.RemoteCommitResponse, error,
) {
	c, err := commitFrom(req)
	if err != nil {
		return nil, StatusOf(err)
	}
	rev, err := s.store.Commit(ctx, c)
	var conflict *raftstore.ConflictError
	if errors.As(err, &conflict) {
		return &storev1.RemoteCommitResponse{Conflict: conflictTo(conflict)}, nil
	}
	if err != nil {
		return nil, StatusOf(err)
	}
	return &storev1.RemoteCommitResponse{Revision: uint64(rev)}, nil
}

func (s *server) Get(ctx context.Context, req *storev1.RemoteGetRequest) (*storev1.RemoteGetResponse, error) {
	ctx, cancel := withReplyReserve(ctx)
	defer cancel()
	it, rev, err := s.store.Get(ctx, string(req.GetKey()), raftstore.ReadOptions{Local: req.GetLocal()})
	if errors.Is(err, raftstore.ErrNotFound) {
		return &storev1.RemoteGetResponse{Revision: uint64(rev)}, nil
	}
	if err != nil {
		return nil, StatusOf(err)
	}
	return &storev1.RemoteGetResponse{Item: itemTo(&it), Revision: uint64(rev)}, nil
}

func (s *server) List(
	req *storev1.RemoteListRequest, stream grpc.ServerStreamingServer[storev1.RemoteListChunk],
) error {
	ctx, cancel := withReplyReserve(stream.Context())
	defer cancel()
	limit := int(req.GetLimit())
	if limit < 0 || int64(limit) != req.GetLimit() {
		return StatusOf(fmt.Errorf("%w: limit of %d items", raftstore.ErrInvalid, req.GetLimit()))
	}
	l, err := s.store.List(ctx, string(req.GetPrefix()), raftstore.ListOptions{
		ReadOptions: raftstore.ReadOptions{Local: req.GetLocal()},
		Limit:       limit, After: string(req.GetAfter()), At: raftstore.Revision(req.GetAt()),
	})
	if err != nil {
		return StatusOf(err)
	}
	chunk := new(storev1.RemoteListChunk)
	size := 0
	for i := range l.Items {
		it := &l.Items[i]
		if size += len(it.Key) + len(it.Value); size > chunkBytes && len(chunk.Items) > 0 {
			if err := stream.Send(chunk); err != nil {
				return err
			}
			chunk, size = new(storev1.RemoteListChunk), len(it.Key)+len(it.Value)
		}
		chunk.Items = append(chunk.Items, itemTo(it))
	}
	chunk.Last, chunk.Revision, chunk.More, chunk.Remaining = true, uint64(l.Revision), l.More, l.Remaining
	return stream.Send(chunk)
}

func (s *server) Watch(stream grpc.BidiStreamingServer[storev1.RemoteWatchRequest, storev1.RemoteEvents]) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	begin := first.GetBegin()
	if begin == nil {
		return StatusOf(fmt.Errorf("%w: a watch begins with a prefix and a revision", raftstore.ErrInvalid))
	}
	w, err := s.store.Watch(stream.Context(), string(begin.GetPrefix()), raftstore.Revision(begin.GetAfter()))
	if err != nil {
		return StatusOf(err)
	}
	defer w.Stop()
	if err := stream.Send(new(storev1.RemoteEvents)); err != nil {
		return err
	}
	asked := make(chan error, 1)
	go func() { asked <- forwardProgress(stream, w) }() // the goroutine ends with the stream
	for {
		select {
		case ev, open := <-w.C():
			if !open {
				return StatusOf(endOf(w, stream.Context()))
			}
			for more := true; more; {
				var part *storev1.RemoteEvents
				part, ev = eventsTo(ev)
				more = part.More
				if err := stream.Send(part); err != nil {
					return err
				}
			}
		case err := <-asked:
			if err != nil {
				return StatusOf(err)
			}
			asked = nil // the client sends no more requests; the watch continues
		}
	}
}

func endOf(w raftstore.Watcher, ctx context.Context) error {
	if err := w.Err(); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	return raftstore.ErrClosed
}

// forwardProgress receives requests for progress notes on the stream of a running watch, and passes
// them to the watcher. It returns nil when the client will send no more, and otherwise an error.
func forwardProgress(
	stream grpc.BidiStreamingServer[storev1.RemoteWatchRequest, storev1.RemoteEvents], w raftstore.Watcher,
) error {
	for {
		m, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		case m.GetProgress() == nil:
			return fmt.Errorf("%w: a running watch can only be asked for progress", raftstore.ErrInvalid)
		}
		if p, ok := w.(raftstore.ProgressRequester); ok {
			p.RequestProgress()
		}
	}
}

func (s *server) Sync(ctx context.Context, _ *storev1.RemoteSyncRequest) (*storev1.RemoteSyncResponse, error) {
	ctx, cancel := withReplyReserve(ctx)
	defer cancel()
	rev, err := s.store.Sync(ctx)
	if err != nil {
		return nil, StatusOf(err)
	}
	return &storev1.RemoteSyncResponse{Revision: uint64(rev)}, nil
}

func (s *server) Applied(context.Context, *storev1.RemoteAppliedRequest) (*storev1.RemoteAppliedResponse, error) {
	return &storev1.RemoteAppliedResponse{Revision: uint64(s.store.Applied())}, nil
}

func (s *server) Lead(_ *storev1.RemoteLeadRequest, stream grpc.ServerStreamingServer[storev1.RemoteLeadership]) error {
	l, ok := s.store.(raftstore.Leader)
	if !ok {
		return status.Errorf(codes.Unimplemented, "%T has no leaderships", s.store)
	}
	err := l.Lead(stream.Context(), func(ctx context.Context, fence raftstore.Fence) error {
		if err := stream.Send(&storev1.RemoteLeadership{Fence: uint64(fence)}); err != nil {
			return err
		}
		<-ctx.Done()
		return stream.Send(new(storev1.RemoteLeadership))
	})
	if err == nil && stream.Context().Err() == nil {
		err = raftstore.ErrClosed // the replica is stopping: it will not lead again
	}
	return StatusOf(err)
}
