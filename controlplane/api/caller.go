package api

import "context"

// Caller is the identity of the client that sent a request, for request handlers and for the log.
type Caller struct {
	User   User // the effective user, after impersonation
	Sender User // the authenticated user; differs from User in case of impersonation
}

type callerKey struct{}

// WithCaller returns a copy of ctx that carries the caller.
func WithCaller(ctx context.Context, caller Caller) context.Context {
	return context.WithValue(ctx, callerKey{}, caller)
}

// CallerOf returns the Caller of ctx, or the zero Caller if ctx carries none.
func CallerOf(ctx context.Context) Caller {
	c, _ := ctx.Value(callerKey{}).(Caller)
	return c
}
