package api

import "context"

// Caller is who asks, for handlers behind the apiserver and for the log.
type Caller struct {
	User   User // as whom
	Sender User // who has proved to be that; another than User when impersonating
}

type callerKey struct{}

// WithCaller returns a context that says who asks.
func WithCaller(ctx context.Context, c Caller) context.Context {
	return context.WithValue(ctx, callerKey{}, c)
}

// CallerOf returns who asks; nobody when the context does not say.
func CallerOf(ctx context.Context) Caller {
	c, _ := ctx.Value(callerKey{}).(Caller)
	return c
}
