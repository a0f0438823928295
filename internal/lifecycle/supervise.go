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

// A part that fails is begun again after minRestart, then after twice as long with every failure up to maxRestart.
// One that has run for settled begins with minRestart again.
const (
	minRestart = 100 * time.Millisecond
	maxRestart = 30 * time.Second
	settled    = time.Minute
)

// Supervise runs every part by itself until ctx ends and all have returned. One that returns early, or panics, is
// begun again after a delay, while the others go on; failed is told of it.
func Supervise(ctx context.Context, failed func(part string, err error, again time.Duration), parts ...Part) {
	var wg sync.WaitGroup
	for _, p := range parts {
		wg.Go(func() { supervise(ctx, failed, p) })
	}
	wg.Wait()
}

func supervise(ctx context.Context, failed func(part string, err error, again time.Duration), p Part) {
	retry := backoff.Backoff{Min: minRestart, Max: maxRestart}
	for {
		began := time.Now()
		err := guarded(ctx, p)
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			err = errors.New("ended unexpectedly")
		}
		if time.Since(began) >= settled {
			retry.Reset()
		}
		delay := retry.Next()
		failed(p.Name, err, delay)
		t := time.NewTimer(delay)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return
		}
	}
}

// guarded turns a panic of the part's own goroutine into an error.
func guarded(ctx context.Context, p Part) (err error) {
	defer func() {
		if x := recover(); x != nil {
			err = fmt.Errorf("panic: %v\n%s", x, debug.Stack())
		}
	}()
	return p.Run(ctx)
}
