package api

import (
	"context"
	"slices"
	"sync"
)

// Limits of the warnings of one response, which are sent in its header.
const (
	warningBytes  = 1024 // maximum length of one warning
	warningsBytes = 4096 // maximum length of all warnings together
)

// warnings collects the warnings for one response.
type warnings struct {
	mu    sync.Mutex
	said  []string
	bytes int
}

type warningsKey struct{}

// WithWarnings returns a context in which Warn collects warnings, and a function that returns the
// collected warnings.
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

// Warn adds a warning (an HTTP Warning header) to the response of the request of ctx. Equal texts
// are added once. Long texts are truncated, and warnings that exceed the limit of a response are
// dropped. It does nothing if ctx collects no warnings.
func Warn(ctx context.Context, text string) {
	w, _ := ctx.Value(warningsKey{}).(*warnings)
	if w == nil {
		return
	}
	text = Truncate(text, warningBytes)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.bytes+len(text) <= warningsBytes && !slices.Contains(w.said, text) {
		w.said = append(w.said, text)
		w.bytes += len(text)
	}
}
