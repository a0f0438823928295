package api

import (
	"context"
	"slices"
	"sync"
)

// The bounds of what one answer warns of: it travels in its header.
const (
	warningBytes  = 1024 // of one warning
	warningsBytes = 4096 // of all
)

// warnings collects what a client should be told although its request succeeds.
type warnings struct {
	mu    sync.Mutex
	said  []string
	bytes int
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

// CollectsWarnings reports whether Warn has an effect in ctx.
func CollectsWarnings(ctx context.Context) bool {
	w, _ := ctx.Value(warningsKey{}).(*warnings)
	return w != nil
}

// Warn tells the client of the request something (an HTTP Warning header), once.
// Long texts are cut off, and what is too much for one answer is not told.
// Without a listener in ctx it does nothing.
func Warn(ctx context.Context, text string) {
	w, _ := ctx.Value(warningsKey{}).(*warnings)
	if w == nil {
		return
	}
	text = Clip(text, warningBytes)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.bytes+len(text) <= warningsBytes && !slices.Contains(w.said, text) {
		w.said = append(w.said, text)
		w.bytes += len(text)
	}
}
