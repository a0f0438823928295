package lifecycle

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"keelson.dev/keelson/internal/virtual"
)

// A part that fails or panics is restarted on its own, with growing delays. Other parts are not
// affected.
func TestSupervise(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		var failing, panicking, ending, steady atomic.Int64
		var delays []time.Duration
		var panicked atomic.Value
		done := make(chan struct{})
		go func() {
			defer close(done)
			Supervise(ctx, func(part string, err error, again time.Duration) {
				switch part {
				case "failing":
					delays = append(delays, again)
				case "panicking":
					panicked.Store(err.Error())
				}
			},
				Part{"failing", func(context.Context) error { failing.Add(1); return errors.New("a conflict") }},
				Part{"panicking", func(context.Context) error { panicking.Add(1); panic("at the disco") }},
				Part{"ending", func(context.Context) error { ending.Add(1); return nil }},
				Part{"steady", func(ctx context.Context) error { steady.Add(1); <-ctx.Done(); return ctx.Err() }},
			)
		}()
		time.Sleep(10 * time.Minute) // virtual time
		virtual.Wait()
		if steady.Load() != 1 {
			t.Errorf("the healthy part was started %d times", steady.Load())
		}
		for name, n := range map[string]int64{"failing": failing.Load(), "panicking": panicking.Load(),
			"ending": ending.Load()} {
			if n < 20 || n > 40 {
				t.Errorf("%s was started %d times in 10 minutes", name, n)
			}
		}
		if len(delays) < 12 || delays[0] != minRestart || delays[1] != 2*minRestart || delays[11] != maxRestart {
			t.Errorf("delays %v", delays)
		}
		if text, _ := panicked.Load().(string); !strings.HasPrefix(text, "panic: at the disco\n") {
			t.Errorf("the panic is reported as %.60q", text)
		}
		cancel()
		<-done
	})
}

// A part that ran for a long time is restarted after the shortest delay.
func TestSuperviseForgetsOldFailures(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		var last time.Duration
		n := 0
		Supervise(ctx, func(_ string, _ error, again time.Duration) {
			last = again
		}, Part{"p", func(ctx context.Context) error {
			if n++; n == 10 {
				time.Sleep(2 * stableAfter)
			}
			if n == 11 {
				cancel()
			}
			return errors.New("no")
		}})
		if last != minRestart {
			t.Errorf("restarted after %v", last)
		}
	})
}
