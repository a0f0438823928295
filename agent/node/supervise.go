package node

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"keelson.dev/keelson/internal/backoff"
	"keelson.dev/keelson/internal/wait"
)

// steadyAfter is how long a restarted part of the agent must run before it counts as healthy.
const steadyAfter = 5 * time.Second

// partFailures records the current failure of each part of the agent. Use newPartFailures to create
// one.
type partFailures struct {
	mu      sync.Mutex
	byPart  map[string]string
	changed chan struct{} // buffered
}

func newPartFailures() *partFailures {
	return &partFailures{byPart: map[string]string{}, changed: make(chan struct{}, 1)}
}

// setFailure records the reason why a part has failed. "" means that the part is healthy.
func (t *partFailures) setFailure(part, why string) {
	t.mu.Lock()
	before := t.byPart[part]
	if why == "" {
		delete(t.byPart, part)
	} else {
		t.byPart[part] = why
	}
	t.mu.Unlock()
	if before == why {
		return
	}
	select {
	case t.changed <- struct{}{}:
	default:
	}
}

// describeFailures returns the failures of the parts for which pick returns true, or "" if all of
// them are healthy.
func (t *partFailures) describeFailures(pick func(part string) bool) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	var out []string
	for _, part := range slices.Sorted(maps.Keys(t.byPart)) {
		if pick(part) {
			out = append(out, part+": "+t.byPart[part])
		}
	}
	return strings.Join(out, "; ")
}

// supervisePart runs a part of the agent, and runs it again with exponential backoff each time it
// returns, until ctx ends. Other parts continue. From the second failure in a row, it records the
// failure in t, until the part has run for steadyAfter.
func supervisePart(ctx context.Context, part string, run func(context.Context) error, t *partFailures, log *slog.Logger) error {
	pause := backoff.Backoff{Min: 100 * time.Millisecond, Max: 10 * time.Second, Jitter: 0.2}
	for failures := 0; ; {
		began := time.Now()
		err := runPart(ctx, run, func() { t.setFailure(part, "") })
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err == nil {
			err = errors.New("it stopped without an error")
		}
		if time.Since(began) > steadyAfter {
			pause.Reset()
			failures = 0
		}
		if failures++; failures > 1 {
			t.setFailure(part, err.Error())
		}
		again := pause.Next()
		log.Error("a part of the agent failed and will be restarted", "part", part, "delay", again, "err", err)
		if err := wait.Delay(ctx, again); err != nil {
			return err
		}
	}
}

// runPart calls run with a context that ends when run returns, so that everything that run started
// ends with it. After steadyAfter it calls well.
func runPart(ctx context.Context, run func(context.Context) error, well func()) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer time.AfterFunc(steadyAfter, well).Stop()
	return run(ctx)
}
