// Package wait polls conditions that offer no channel to wait on.
package wait

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// maxPause is the longest pause that For makes because a call of the condition was slow.
const maxPause = time.Second

// For calls cond until it returns nil: immediately, and then once per interval. If a call takes
// longer than half of the interval, For pauses for as long as the call took, at most maxPause.
// Polling therefore does not slow down the work that it waits for. If ctx ends first, For returns
// an error that wraps the cause of ctx and the last error of cond. If this last error only reports
// that ctx ended, an earlier error, if any, is wrapped instead.
func For(ctx context.Context, interval time.Duration, cond func() error) error {
	var last error
	for {
		began := time.Now()
		err := cond()
		if err == nil {
			return nil
		}
		if last == nil || !isContextEnd(ctx, err) {
			last = err
		}
		took := time.Since(began)
		_ = Delay(ctx, max(interval-took, min(took, maxPause)))
		if ctx.Err() != nil { // checked even if the interval has passed: cond may have canceled ctx to stop the polling
			return fmt.Errorf("%w; last: %w", context.Cause(ctx), last)
		}
	}
}

// isContextEnd reports whether ctx has ended and err only reports this end.
func isContextEnd(ctx context.Context, err error) bool {
	return ctx.Err() != nil &&
		(errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) ||
			errors.Is(err, context.Cause(ctx)))
}

// Delay waits for d. If ctx ends first, it returns the error of ctx. Use it for real delays, such
// as a backoff, and not for synchronization.
func Delay(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}
