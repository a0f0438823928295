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

// reasons counts why sessions of agents ended, as a log handler: what is the same but for numbers is one reason.
type reasons struct {
	mu    sync.Mutex
	count map[string]int
}

const (
	reasonsEvery = 10 * time.Second
	mostReasons  = 200 // that are told apart
	shownReasons = 8
)

var numbers = regexp.MustCompile(`\d[\d.:a-fµ]*`)

func (r *reasons) Enabled(_ context.Context, l slog.Level) bool { return l >= slog.LevelWarn }
func (r *reasons) WithAttrs([]slog.Attr) slog.Handler           { return r }
func (r *reasons) WithGroup(string) slog.Handler                { return r }

func (r *reasons) Handle(_ context.Context, rec slog.Record) error {
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
	if _, known := r.count[what]; known || len(r.count) < mostReasons {
		r.count[what]++
	}
	return nil
}

// tell writes the most frequent reasons of each while, if there are any, until ctx ends.
func (r *reasons) tell(ctx context.Context, out io.Writer) {
	tick := time.NewTicker(reasonsEvery)
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
		names := slices.SortedFunc(maps.Keys(count), func(a, b string) int { return cmp.Or(count[b]-count[a], cmp.Compare(a, b)) })
		for _, what := range names[:min(len(names), shownReasons)] {
			fmt.Fprintf(out, "%6d times within %s: %s\n", count[what], reasonsEvery, what)
		}
	}
}
