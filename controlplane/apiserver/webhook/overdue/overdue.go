// Package overdue provides contexts for tests that exceed their deadline at the moment when a
// server responds. It simulates a server that responds only because its connection is closed.
package overdue

import (
	"context"
	"net/http"
	"sync/atomic"
)

// Context is a context that has exceeded its deadline while Over is set.
type Context struct {
	context.Context
	Over *atomic.Bool
}

// New returns a context that has not exceeded its deadline.
func New(ctx context.Context) Context { return Context{ctx, new(atomic.Bool)} }

// Err returns context.DeadlineExceeded while Over is set.
func (c Context) Err() error {
	if c.Over.Load() {
		return context.DeadlineExceeded
	}
	return c.Context.Err()
}

// RespondWith returns a handler that sets Over and then sends the response.
func (c Context) RespondWith(response string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		c.Over.Store(true)
		_, _ = w.Write([]byte(response))
	})
}
