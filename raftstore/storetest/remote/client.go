package remote

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/mvcc"
)

// appliedTimeout is the timeout of Client.Applied, which has no context.
const appliedTimeout = time.Second

// Client is a raftstore.Store over gRPC, served by one replica in another process. While the
// replica cannot be reached, calls wait until their deadlines. Reads are retried if the connection
// is lost. A commit that may have reached the replica is not retried: its outcome is
// ErrOutcomeUnknown. A watch that loses its connection ends with ErrUnavailable and can be resumed
// by revision.
type Client struct {
	conn    *grpc.ClientConn
	store   storev1.RemoteClient
	commits *committer
	applied atomic.Uint64
	closed  atomic.Bool
}

var (
	_ raftstore.Store  = (*Client)(nil)
	_ raftstore.Leader = (*Client)(nil)
)

// New returns a client of the replica at address, which is host:port or unix:PATH. It connects on
// first use.
func New(address string, creds credentials.TransportCredentials) (*Client, error) {
	return newClient(address, creds)
}

func newClient(address string, creds credentials.TransportCredentials, more ...grpc.DialOption) (*Client, error) {
	conn, err := grpc.NewClient(address, append(more,
		grpc.WithTransportCredentials(creds),
		grpc.WithDisableServiceConfig(),
		grpc.WithInitialWindowSize(window), grpc.WithInitialConnWindowSize(4*window),
		grpc.WithDefaultCallOptions(grpc.WaitForReady(true), grpc.MaxCallRecvMsgSize(maxMessage),
			grpc.MaxCallSendMsgSize(maxMessage)),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{BaseDelay: 10 * time.Millisecond, Multiplier: 1.5, Jitter: 0.2,
				MaxDelay: 200 * time.Millisecond},
			MinConnectTimeout: time.Second,
		}),
	)...)
	if err != nil {
		return nil, fmt.Errorf("client of the replica at %s: %w", address, err)
	}
	store := storev1.NewRemoteClient(conn)
	return &Client{conn: conn, store: store, commits: newCommitter(store)}, nil
}

// Dial returns a client like New, but waits until the replica responds. It returns an error if ctx
// ends before.
func Dial(ctx context.Context, address string, creds credentials.TransportCredentials) (*Client, error) {
	c, err := New(address, creds)
	if err != nil {
		return nil, err
	}
	for s := c.conn.GetState(); s != connectivity.Ready; s = c.conn.GetState() {
		if s == connectivity.Idle {
			c.conn.Connect()
		}
		if !c.conn.WaitForStateChange(ctx, s) {
			c.Close()
			return nil, fmt.Errorf("connecting to the replica at %s: %w: %w", address,
				raftstore.ErrUnavailable, ctx.Err())
		}
	}
	return c, nil
}

// Admin returns a client of the replica process's admin service, on the same connection.
func (c *Client) Admin() storev1.AdminClient { return storev1.NewAdminClient(c.conn) }

// Reconnect makes the client connect immediately if it is waiting between attempts. Tests call it
// after they have started the replica.
func (c *Client) Reconnect() {
	c.conn.Connect()
	c.conn.ResetConnectBackoff()
}

// Close closes the connection and ends every watch. Later calls fail with ErrClosed.
func (c *Client) Close() error {
	c.closed.Store(true)
	c.commits.closeStream()
	return c.conn.Close()
}

// checkUsable returns an error if the client is closed or ctx has ended.
func (c *Client) checkUsable(ctx context.Context) error {
	if c.closed.Load() {
		return raftstore.ErrClosed
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("%w: %w", raftstore.ErrUnavailable, err)
	}
	return nil
}

// translateError converts failed to a raftstore error. failed is the error of a gRPC call with the
// context ctx. again is true if the connection failed, so that a read can be retried.
func (c *Client) translateError(ctx context.Context, failed error) (err error, again bool) {
	err = Err(failed)
	var said *failure
	switch {
	case errors.As(err, &said):
		return err, false
	case c.closed.Load():
		return fmt.Errorf("%w: %w", raftstore.ErrClosed, failed), false
	case ctx.Err() != nil:
		return fmt.Errorf("%w: %w: %w", raftstore.ErrUnavailable, ctx.Err(), failed), false
	}
	return err, errors.Is(err, errLost)
}

// retryRead calls call, which must have no effect on the store, and returns its result. If the
// connection was lost during the call, it calls again.
func retryRead[T any](ctx context.Context, c *Client, call func() (T, error)) (T, error) {
	for {
		if err := c.checkUsable(ctx); err != nil {
			return *new(T), err
		}
		out, failed := call()
		if failed == nil {
			return out, nil
		}
		if err, again := c.translateError(ctx, failed); !again {
			return *new(T), err
		}
	}
}

// Commit implements raftstore.Store.
func (c *Client) Commit(ctx context.Context, commit raftstore.Commit) (raftstore.Revision, error) {
	if err := ctx.Err(); err != nil {
		return 0, fmt.Errorf("commit was not started: %w", err)
	}
	p, err := mvcc.Proposal(commit)
	if err != nil {
		return 0, err
	}
	if err := c.checkUsable(ctx); err != nil {
		return 0, err
	}
	r := c.commits.callCommit(ctx, &storev1.RemoteCommitRequest{Ops: p.GetOps(), Fence: p.GetFence()})
	if r.failed == nil {
		if conflict := r.done.GetConflict(); conflict != nil {
			return 0, conflictFrom(conflict)
		}
		return raftstore.Revision(r.done.GetRevision()), nil
	}
	err, _ = c.translateError(ctx, r.failed)
	var said *failure
	if !errors.As(err, &said) && r.sent {
		return 0, fmt.Errorf("%w: %w", raftstore.ErrOutcomeUnknown, err)
	}
	return 0, err
}

// Get implements raftstore.Store.
func (c *Client) Get(ctx context.Context, key string, o raftstore.ReadOptions) (
	raftstore.Item, raftstore.Revision, error,
) {
	resp, err := retryRead(ctx, c, func() (*storev1.RemoteGetResponse, error) {
		return c.store.Get(ctx, &storev1.RemoteGetRequest{Key: []byte(key), Local: o.Local})
	})
	if err != nil {
		return raftstore.Item{}, 0, err
	}
	it := itemFrom(resp.GetItem())
	if it == nil {
		return raftstore.Item{}, raftstore.Revision(resp.GetRevision()),
			fmt.Errorf("%q: %w", key, raftstore.ErrNotFound)
	}
	return *it, raftstore.Revision(resp.GetRevision()), nil
}

// List implements raftstore.Store.
func (c *Client) List(ctx context.Context, prefix string, o raftstore.ListOptions) (raftstore.List, error) {
	return retryRead(ctx, c, func() (raftstore.List, error) {
		// cancel also ends an unfinished stream
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		stream, err := c.store.List(ctx, &storev1.RemoteListRequest{
			Prefix: []byte(prefix), Local: o.Local, Limit: int64(o.Limit), After: []byte(o.After), At: uint64(o.At),
		})
		if err != nil {
			return raftstore.List{}, err
		}
		return collectChunks(stream)
	})
}

func collectChunks(stream grpc.ServerStreamingClient[storev1.RemoteListChunk]) (raftstore.List, error) {
	var l raftstore.List
	for {
		chunk, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF // only the last chunk is marked as such
		}
		if err != nil {
			return raftstore.List{}, err
		}
		for _, it := range chunk.GetItems() {
			l.Items = append(l.Items, *itemFrom(it))
		}
		if chunk.GetLast() {
			l.Revision, l.More, l.Remaining = raftstore.Revision(chunk.GetRevision()), chunk.GetMore(),
				chunk.GetRemaining()
			return l, nil
		}
	}
}

// Sync implements raftstore.Store.
func (c *Client) Sync(ctx context.Context) (raftstore.Revision, error) {
	resp, err := retryRead(ctx, c, func() (*storev1.RemoteSyncResponse, error) {
		return c.store.Sync(ctx, new(storev1.RemoteSyncRequest))
	})
	return raftstore.Revision(resp.GetRevision()), err
}

// Applied implements raftstore.Store. If the replica does not respond within a second, it returns
// the revision of the last response.
func (c *Client) Applied() raftstore.Revision {
	ctx, cancel := context.WithTimeout(context.Background(), appliedTimeout)
	defer cancel()
	if resp, err := c.store.Applied(ctx, new(storev1.RemoteAppliedRequest)); err == nil {
		c.applied.Store(resp.GetRevision())
	}
	return raftstore.Revision(c.applied.Load())
}
