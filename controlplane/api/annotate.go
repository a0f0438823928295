package api

import (
	"context"
	"maps"
	"sync"
)

// notes are the audit annotations of one request.
type notes struct {
	mu   sync.Mutex
	said map[string]string
}

type notesKey struct{}

// WithAnnotations returns a context in which Annotate is heard, and the function that
// reads what was said; nil when nothing was.
func WithAnnotations(ctx context.Context) (context.Context, func() map[string]string) {
	n := &notes{}
	return context.WithValue(ctx, notesKey{}, n), func() map[string]string {
		n.mu.Lock()
		defer n.mu.Unlock()
		return maps.Clone(n.said)
	}
}

// Annotate adds to the audit record of the request; a later value replaces one of the
// same key. Without a listener in ctx it does nothing.
func Annotate(ctx context.Context, key, value string) {
	n, _ := ctx.Value(notesKey{}).(*notes)
	if n == nil {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.said == nil {
		n.said = map[string]string{}
	}
	n.said[key] = value
}
