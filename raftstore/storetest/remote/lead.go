package remote

import (
	"context"
	"fmt"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
)

// Lead implements raftstore.Leader. It calls lead while the remote replica is the leader. When the
// replica loses leadership, the context of lead ends with a delay. During this delay the replica
// refuses commits with the fence. If the connection is lost, Lead returns ErrUnavailable.
func (c *Client) Lead(ctx context.Context, lead func(ctx context.Context, fence raftstore.Fence) error) error {
	if c.closed.Load() {
		return raftstore.ErrClosed
	}
	asked := ctx
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stream, err := c.store.Lead(ctx, new(storev1.RemoteLeadRequest))
	if err != nil {
		return c.endOfLead(asked, ctx, err)
	}
	var now *leadership
	for {
		m, err := stream.Recv()
		if now != nil && (err != nil || m.GetFence() == 0) {
			now.endLeadership()
			now = nil
		}
		if err != nil {
			return c.endOfLead(asked, ctx, err)
		}
		if fence := m.GetFence(); fence != 0 && now == nil {
			now = startLeadership(ctx, cancel, raftstore.Fence(fence), lead)
		}
	}
}

// endOfLead returns the result of Lead after its stream has failed with the error failed. callerCtx
// is the context of the caller of Lead, and ctx the context of the stream. If callerCtx has ended,
// the result is nil. If the callback passed to Lead has returned an error, the result is that
// error, which is the cause of the end of ctx. Otherwise the result is failed, converted to a
// raftstore error.
func (c *Client) endOfLead(callerCtx, ctx context.Context, failed error) error {
	if callerCtx.Err() != nil {
		return nil
	}
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	err, _ := c.translateError(ctx, failed)
	return err
}

// leadership is a running call of the function that was passed to Client.Lead.
type leadership struct {
	cancel context.CancelFunc
	done   chan struct{}
}

// startLeadership calls lead with the fence in a new goroutine. If lead returns an error while its
// context has not ended, that error is passed to fail, which ends Client.Lead.
func startLeadership(
	ctx context.Context, fail context.CancelCauseFunc, fence raftstore.Fence,
	lead func(ctx context.Context, fence raftstore.Fence) error,
) *leadership {
	ctx, cancel := context.WithCancel(ctx)
	l := &leadership{cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(l.done)
		if err := lead(ctx, fence); err != nil && ctx.Err() == nil {
			fail(fmt.Errorf("leading in term %d: %w", fence, err))
		}
	}()
	return l
}

func (l *leadership) endLeadership() {
	l.cancel()
	<-l.done
}
