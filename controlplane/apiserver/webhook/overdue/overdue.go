// Package overdue makes contexts for tests whose time is over once a service answers: the answer is heard, as it is
// when a service that sees the connection end says something just then.
package overdue

import (
	"context"
	"net/http"
	"sync/atomic"
)

// Context is a context whose time is over while Over is set.
type Context struct {
	context.Context
	Over *atomic.Bool
}

// New returns a context whose time is not over yet.
func New(ctx context.Context) Context { return Context{ctx, new(atomic.Bool)} }

// Err is context.DeadlineExceeded while Over is set.
func (c Context) Err() error {
	if c.Over.Load() {
		return context.DeadlineExceeded
	}
	return c.Context.Err()
}

// Says is a service that gives one answer, when the time is over.
func (c Context) Says(answer string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		c.Over.Store(true)
		_, _ = w.Write([]byte(answer))
	})
}
