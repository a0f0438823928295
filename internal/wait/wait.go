// Package wait polls conditions that offer no channel to wait on.
package wait

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// maxPause is how long a condition that is slow is left alone at most, where the interval is not longer.
const maxPause = time.Second

// For calls cond every interval, the first time at once, until it returns nil. One that takes longer than half of the interval
// is left alone for as long as it took, so that asking does not keep busy, by itself, those whose work it waits for.
// When ctx ends first, the error wraps both ctx's and cond's last one; where the last question was cut off by that very end, the
// one before, which says more.
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
		if ctx.Err() != nil { // also when the next time has come as well: cond may have ended ctx because it is sure
			return fmt.Errorf("%w; last: %w", context.Cause(ctx), last)
		}
	}
}

// isContextEnd says whether an error is no more than that ctx has ended.
func isContextEnd(ctx context.Context, err error) bool {
	return ctx.Err() != nil &&
		(errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) || errors.Is(err, context.Cause(ctx)))
}

// Delay returns after d, or with ctx's error when it ends first. It is for real
// delays (a backoff), never for synchronisation.
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
