package api

import "context"

// Caller is the identity of a request's client, for handlers behind the apiserver and for the log.
type Caller struct {
	User   User // the effective user, after impersonation
	Sender User // the authenticated user; differs from User when impersonating
}

type callerKey struct{}

// WithCaller returns a copy of ctx that carries the Caller c.
func WithCaller(ctx context.Context, c Caller) context.Context {
	return context.WithValue(ctx, callerKey{}, c)
}

// CallerOf returns the Caller of ctx, or the zero Caller if ctx carries none.
func CallerOf(ctx context.Context) Caller {
	c, _ := ctx.Value(callerKey{}).(Caller)
	return c
}
