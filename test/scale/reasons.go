package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"regexp"
	"slices"
	"sync"
	"time"
)

// warningCounter is a log handler that counts the warnings and errors of agents, mostly why
// sessions ended. Messages that differ in numbers only are counted as the same reason.
type warningCounter struct {
	mu    sync.Mutex
	count map[string]int
}

const (
	warningInterval = 10 * time.Second
	maxWarnings     = 200 // most different reasons counted
	shownWarnings   = 8
)

var numbers = regexp.MustCompile(`\d[\d.:a-fµ]*`)

func (r *warningCounter) Enabled(_ context.Context, l slog.Level) bool { return l >= slog.LevelWarn }
func (r *warningCounter) WithAttrs([]slog.Attr) slog.Handler           { return r }
func (r *warningCounter) WithGroup(string) slog.Handler                { return r }

func (r *warningCounter) Handle(_ context.Context, rec slog.Record) error {
	what := rec.Message
	rec.Attrs(func(a slog.Attr) bool {
		if a.Key == "err" {
			what += ": " + a.Value.String()
		}
		return true
	})
	what = numbers.ReplaceAllString(what, "#")
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, known := r.count[what]; known || len(r.count) < maxWarnings {
		r.count[what]++
	}
	return nil
}

// printWarnings writes the most frequent reasons to out every warningInterval, and resets the
// counts, until ctx ends.
func (r *warningCounter) printWarnings(ctx context.Context, out io.Writer) {
	tick := time.NewTicker(warningInterval)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		r.mu.Lock()
		count := r.count
		r.count = make(map[string]int)
		r.mu.Unlock()
		names := slices.SortedFunc(maps.Keys(count), func(a, b string) int {
			return cmp.Or(count[b]-count[a], cmp.Compare(a, b))
		})
		for _, what := range names[:min(len(names), shownWarnings)] {
			fmt.Fprintf(out, "%6d times within %s: %s\n", count[what], warningInterval, what)
		}
	}
}
