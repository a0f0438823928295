package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"time"

	"keelson.dev/keelson/internal/backoff"
)

// Delays before a failed part is restarted. The delay starts at minRestart and doubles with every
// failure, up to maxRestart. After the part has run for at least stableAfter, it starts at
// minRestart again.
const (
	minRestart  = 100 * time.Millisecond
	maxRestart  = 30 * time.Second
	stableAfter = time.Minute
)

// Supervise runs every part until ctx ends and all parts have returned. A part that returns before
// ctx ends, or panics, is restarted after a delay, while the others continue. Before each delay,
// Supervise calls onFailure with the part's name, the error and the delay.
func Supervise(ctx context.Context, onFailure func(part string, err error, delay time.Duration), parts ...Part) {
	var wg sync.WaitGroup
	for _, p := range parts {
		wg.Go(func() { supervisePart(ctx, onFailure, p) })
	}
	wg.Wait()
}

func supervisePart(ctx context.Context, onFailure func(part string, err error, delay time.Duration), p Part) {
	retry := backoff.Backoff{Min: minRestart, Max: maxRestart}
	for {
		began := time.Now()
		err := runRecovering(ctx, p)
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			err = errors.New("ended unexpectedly")
		}
		if time.Since(began) >= stableAfter {
			retry.Reset()
		}
		delay := retry.Next()
		onFailure(p.Name, err, delay)
		t := time.NewTimer(delay)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return
		}
	}
}

// runRecovering runs the part once and returns its error. A panic in the goroutine that runs the
// part is returned as an error. A panic in another goroutine still ends the process.
func runRecovering(ctx context.Context, p Part) (err error) {
	defer func() {
		if x := recover(); x != nil {
			err = fmt.Errorf("panic: %v\n%s", x, debug.Stack())
		}
	}()
	return p.Run(ctx)
}
