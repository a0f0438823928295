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
	"keelson.dev/keelson/internal/wakeup"
)

// steadyAfter is how long a restarted part of the agent must run before it counts as healthy.
const steadyAfter = 5 * time.Second

// partFailures records the current failure of each part of the agent. Use newPartFailures to create
// one.
type partFailures struct {
	mu      sync.Mutex
	byPart  map[string]string
	changed wakeup.Signal
}

func newPartFailures() *partFailures {
	return &partFailures{byPart: map[string]string{}, changed: wakeup.New()}
}

// setFailure records the reason why a part of the agent has failed; "" means that the part is
// healthy.
func (t *partFailures) setFailure(part, reason string) {
	t.mu.Lock()
	before := t.byPart[part]
	if reason == "" {
		delete(t.byPart, part)
	} else {
		t.byPart[part] = reason
	}
	t.mu.Unlock()
	if before == reason {
		return
	}
	t.changed.Send()
}

// describeFailures returns the failures of those parts for which selects returns true, or "" if all
// of these parts are healthy.
func (t *partFailures) describeFailures(selects func(part string) bool) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	var out []string
	for _, part := range slices.Sorted(maps.Keys(t.byPart)) {
		if selects(part) {
			out = append(out, part+": "+t.byPart[part])
		}
	}
	return strings.Join(out, "; ")
}

// supervisePart runs a part of the agent until ctx ends. Each time the part returns, supervisePart
// runs it again with exponential backoff. From the second failure in a row, it records the failure
// in t. When the part has run for steadyAfter, it removes the failure.
func supervisePart(
	ctx context.Context, part string, run func(context.Context) error, t *partFailures, log *slog.Logger,
) error {
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

// runPart calls run with a context that is canceled when run returns, so that everything that run
// started ends too. When run has run for steadyAfter, runPart calls markHealthy.
func runPart(ctx context.Context, run func(context.Context) error, markHealthy func()) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer time.AfterFunc(steadyAfter, markHealthy).Stop()
	return run(ctx)
}
