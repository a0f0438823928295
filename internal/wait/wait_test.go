package wait

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"keelson.dev/keelson/internal/virtual"
)

// A condition that cancels the context is not called again, however long it took. Its error is
// reported.
func TestLastWordIsTold(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		refused := errors.New("refused")
		for range 100 {
			ctx, cancel := context.WithCancel(t.Context())
			asked := 0
			err := For(ctx, time.Second, func() error {
				asked++
				time.Sleep(2 * time.Second)
				cancel()
				return refused
			})
			if asked != 1 || !errors.Is(err, refused) || !errors.Is(err, context.Canceled) {
				t.Fatalf("asked %d times: %v", asked, err)
			}
		}
	})
}

// If the last call was interrupted by the deadline, the error of the call before it is reported.
func TestWordBeforeTheEnd(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		late := errors.New("not ready in a second")
		for _, end := range []func(ctx context.Context) error{context.Context.Err, context.Cause} {
			ctx, cancel := context.WithTimeoutCause(t.Context(), time.Second, late)
			defer cancel()
			missing, asked := errors.New("cp2 is missing"), 0
			err := For(ctx, 10*time.Millisecond, func() error {
				if asked++; asked < 3 {
					return missing
				}
				<-ctx.Done()
				return fmt.Errorf("asking cp1: %w", end(ctx))
			})
			if asked != 3 || !errors.Is(err, missing) || !errors.Is(err, late) {
				t.Errorf("asked %d times: %v", asked, err)
			}
		}
	})
	virtual.Test(t, func(t *testing.T) { // every call was interrupted
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		err := For(ctx, 10*time.Millisecond, func() error {
			<-ctx.Done()
			return fmt.Errorf("asking cp1: %w", ctx.Err())
		})
		if err == nil || !strings.Contains(err.Error(), "asking cp1") {
			t.Error(err)
		}
	})
}

// A condition is called once per interval. A slow condition runs at most half of the time, and a
// hanging one again soon.
func TestSlowConditionsAreLeftAlone(t *testing.T) {
	for _, c := range []struct{ interval, takes, every time.Duration }{
		{25 * time.Millisecond, 0, 25 * time.Millisecond},
		{25 * time.Millisecond, 10 * time.Millisecond, 25 * time.Millisecond},
		{25 * time.Millisecond, 20 * time.Millisecond, 40 * time.Millisecond},
		{25 * time.Millisecond, 300 * time.Millisecond, 600 * time.Millisecond},
		{25 * time.Millisecond, time.Minute, 61 * time.Second},
		{5 * time.Second, time.Minute, 61 * time.Second},
	} {
		virtual.Test(t, func(t *testing.T) {
			began, asked := time.Now(), 0
			err := For(t.Context(), c.interval, func() error {
				if asked++; asked == 4 {
					return nil
				}
				time.Sleep(c.takes)
				return errors.New("not yet")
			})
			if took := time.Since(began); err != nil || took != 3*c.every {
				t.Errorf("every %s, taking %s: called again after %s: want %s (%v)", c.interval, c.takes,
					took/3, c.every, err)
			}
		})
	}
}
