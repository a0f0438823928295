package peernet

import (
	"context"
	"time"
)

// WithCancelOn returns a copy of ctx that is also canceled when the channel done is closed.
func WithCancelOn(ctx context.Context, done <-chan struct{}) (context.Context, context.CancelFunc) {
	return WithCancelAfter(ctx, done, 0)
}

// WithCancelAfter returns a copy of ctx that is also canceled when the given grace period has
// passed after the channel done was closed.
func WithCancelAfter(ctx context.Context, done <-chan struct{},
	grace time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		select {
		case <-done:
		case <-ctx.Done():
			return
		}
		if grace > 0 {
			timer := time.NewTimer(grace)
			defer timer.Stop()
			select {
			case <-timer.C:
			case <-ctx.Done():
			}
		}
		cancel()
	}()
	return ctx, cancel
}
