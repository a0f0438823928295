package api

import (
	"context"
	"slices"
	"sync"
)

// warnings collects what a client should be told although its request succeeds.
type warnings struct {
	mu   sync.Mutex
	said []string
}

type warningsKey struct{}

// WithWarnings returns a context in which Warn is heard, and the function that reads what was said.
func WithWarnings(ctx context.Context) (context.Context, func() []string) {
	w := &warnings{}
	return context.WithValue(ctx, warningsKey{}, w), func() []string {
		w.mu.Lock()
		defer w.mu.Unlock()
		return slices.Clone(w.said)
	}
}

// Warn tells the client of the request something (an HTTP Warning header), once.
// Without a listener in ctx it does nothing.
func Warn(ctx context.Context, text string) {
	w, _ := ctx.Value(warningsKey{}).(*warnings)
	if w == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if !slices.Contains(w.said, text) {
		w.said = append(w.said, text)
	}
}
