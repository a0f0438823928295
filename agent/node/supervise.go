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

// steady is how long a part has to run to count as well again.
const steady = 5 * time.Second

// troubles are the parts of the agent that fail at present, and why. The zero value is not usable: see newTroubles.
type troubles struct {
	mu      sync.Mutex
	byPart  map[string]string
	changed chan struct{} // buffered
}

func newTroubles() *troubles {
	return &troubles{byPart: map[string]string{}, changed: make(chan struct{}, 1)}
}

// set says how a part is; "" is well.
func (t *troubles) set(part, why string) {
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

// of words what ails those of the parts for which pick is true; "" when all are well.
func (t *troubles) of(pick func(part string) bool) string {
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

// supervise runs a part again whenever it ends, with growing pauses, until ctx ends. The rest of the agent goes on
// meanwhile. A failure that repeats is told in troubles until the part has run steadily.
func supervise(ctx context.Context, part string, run func(context.Context) error, t *troubles, log *slog.Logger) error {
	pause := backoff.Backoff{Min: 100 * time.Millisecond, Max: 10 * time.Second, Jitter: 0.2}
	for failures := 0; ; {
		began := time.Now()
		err := once(ctx, run, func() { t.set(part, "") })
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err == nil {
			err = errors.New("it ended without a reason")
		}
		if time.Since(began) > steady {
			pause.Reset()
			failures = 0
		}
		if failures++; failures > 1 {
			t.set(part, err.Error())
		}
		again := pause.Next()
		log.Error("a part of the agent failed and is started again", "part", part, "again in", again, "err", err)
		if err := wait.Delay(ctx, again); err != nil {
			return err
		}
	}
}

// once runs a part once; what it started with its context ends with it.
func once(ctx context.Context, run func(context.Context) error, well func()) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer time.AfterFunc(steady, well).Stop()
	return run(ctx)
}
