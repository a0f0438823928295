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

// appliedTimeout bounds a call of Applied, which has no context.
const appliedTimeout = time.Second

// Client is the store of one replica in another process. While the replica
// cannot be reached calls wait within their deadline. Reads are asked again
// when the connection is lost under them; a commit that may have reached the
// replica is not: its fate is ErrOutcomeUnknown. A watch that loses its
// connection ends with ErrUnavailable and is resumed by revision.
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

// New returns a client of a replica at host:port or unix:PATH, which connects
// when it is first needed.
func New(address string, creds credentials.TransportCredentials) (*Client, error) {
	return newClient(address, creds)
}

func newClient(address string, creds credentials.TransportCredentials, more ...grpc.DialOption) (*Client, error) {
	conn, err := grpc.NewClient(address, append(more,
		grpc.WithTransportCredentials(creds),
		grpc.WithDisableServiceConfig(),
		grpc.WithInitialWindowSize(window), grpc.WithInitialConnWindowSize(4*window),
		grpc.WithDefaultCallOptions(grpc.WaitForReady(true), grpc.MaxCallRecvMsgSize(maxMessage), grpc.MaxCallSendMsgSize(maxMessage)),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 10 * time.Millisecond, Multiplier: 1.5, Jitter: 0.2, MaxDelay: 200 * time.Millisecond},
			MinConnectTimeout: time.Second,
		}),
	)...)
	if err != nil {
		return nil, fmt.Errorf("client of the replica at %s: %w", address, err)
	}
	store := storev1.NewRemoteClient(conn)
	return &Client{conn: conn, store: store, commits: newCommitter(store)}, nil
}

// Dial is New, and waits until the replica answers, as long as ctx lets it.
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
			return nil, fmt.Errorf("connecting to the replica at %s: %w: %w", address, raftstore.ErrUnavailable, ctx.Err())
		}
	}
	return c, nil
}

// Admin is the other service of a replica process, on the same connection.
func (c *Client) Admin() storev1.AdminClient { return storev1.NewAdminClient(c.conn) }

// Reconnect tries at once to connect, if the client waits between attempts: the
// replica has just been started.
func (c *Client) Reconnect() {
	c.conn.Connect()
	c.conn.ResetConnectBackoff()
}

// Close ends the connection and every watch. Later calls fail with ErrClosed.
func (c *Client) Close() error {
	c.closed.Store(true)
	c.commits.close()
	return c.conn.Close()
}

// usable refuses what needs no replica to be refused.
func (c *Client) usable(ctx context.Context) error {
	if c.closed.Load() {
		return raftstore.ErrClosed
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("%w: %w", raftstore.ErrUnavailable, err)
	}
	return nil
}

// err translates the error of a call. again says that the connection is to
// blame and the call may be made once more, if it is one that changes nothing.
func (c *Client) err(ctx context.Context, failed error) (err error, again bool) {
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

// ask makes a call that changes nothing, again when the connection was lost.
func ask[T any](ctx context.Context, c *Client, call func() (T, error)) (T, error) {
	for {
		if err := c.usable(ctx); err != nil {
			return *new(T), err
		}
		out, failed := call()
		if failed == nil {
			return out, nil
		}
		if err, again := c.err(ctx, failed); !again {
			return *new(T), err
		}
	}
}

// Commit implements raftstore.Store.
func (c *Client) Commit(ctx context.Context, commit raftstore.Commit) (raftstore.Revision, error) {
	if err := ctx.Err(); err != nil {
		return 0, fmt.Errorf("commit was not begun: %w", err)
	}
	p, err := mvcc.Proposal(commit)
	if err != nil {
		return 0, err
	}
	if err := c.usable(ctx); err != nil {
		return 0, err
	}
	r := c.commits.call(ctx, &storev1.RemoteCommitRequest{Ops: p.GetOps(), Fence: p.GetFence()})
	if r.failed == nil {
		if conflict := r.done.GetConflict(); conflict != nil {
			return 0, conflictFrom(conflict)
		}
		return raftstore.Revision(r.done.GetRevision()), nil
	}
	err, _ = c.err(ctx, r.failed)
	var said *failure
	if !errors.As(err, &said) && r.sent {
		return 0, fmt.Errorf("%w: %w", raftstore.ErrOutcomeUnknown, err)
	}
	return 0, err
}

// Get implements raftstore.Store.
func (c *Client) Get(ctx context.Context, key string, o raftstore.ReadOptions) (raftstore.Item, raftstore.Revision, error) {
	resp, err := ask(ctx, c, func() (*storev1.RemoteGetResponse, error) {
		return c.store.Get(ctx, &storev1.RemoteGetRequest{Key: []byte(key), Local: o.Local})
	})
	if err != nil {
		return raftstore.Item{}, 0, err
	}
	it := itemFrom(resp.GetItem())
	if it == nil {
		return raftstore.Item{}, raftstore.Revision(resp.GetRevision()), fmt.Errorf("%q: %w", key, raftstore.ErrNotFound)
	}
	return *it, raftstore.Revision(resp.GetRevision()), nil
}

// List implements raftstore.Store.
func (c *Client) List(ctx context.Context, prefix string, o raftstore.ListOptions) (raftstore.List, error) {
	return ask(ctx, c, func() (raftstore.List, error) {
		// Ends the stream also when it is left before its end.
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		stream, err := c.store.List(ctx, &storev1.RemoteListRequest{
			Prefix: []byte(prefix), Local: o.Local, Limit: int64(o.Limit), After: []byte(o.After), At: uint64(o.At),
		})
		if err != nil {
			return raftstore.List{}, err
		}
		return gather(stream)
	})
}

func gather(stream grpc.ServerStreamingClient[storev1.RemoteListChunk]) (raftstore.List, error) {
	var l raftstore.List
	for {
		chunk, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF // the last chunk says that it is
		}
		if err != nil {
			return raftstore.List{}, err
		}
		for _, it := range chunk.GetItems() {
			l.Items = append(l.Items, *itemFrom(it))
		}
		if chunk.GetLast() {
			l.Revision, l.More, l.Remaining = raftstore.Revision(chunk.GetRevision()), chunk.GetMore(), chunk.GetRemaining()
			return l, nil
		}
	}
}

// Sync implements raftstore.Store.
func (c *Client) Sync(ctx context.Context) (raftstore.Revision, error) {
	resp, err := ask(ctx, c, func() (*storev1.RemoteSyncResponse, error) {
		return c.store.Sync(ctx, new(storev1.RemoteSyncRequest))
	})
	return raftstore.Revision(resp.GetRevision()), err
}

// Applied implements raftstore.Store: what the replica says within a second,
// else what it said last.
func (c *Client) Applied() raftstore.Revision {
	ctx, cancel := context.WithTimeout(context.Background(), appliedTimeout)
	defer cancel()
	if resp, err := c.store.Applied(ctx, new(storev1.RemoteAppliedRequest)); err == nil {
		c.applied.Store(resp.GetRevision())
	}
	return raftstore.Revision(c.applied.Load())
}
