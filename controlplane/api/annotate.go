package api

import "context"

// Annotator takes what the audit record of a request should say besides.
type Annotator interface {
	// Annotate adds a note; a later one replaces one of the same key.
	Annotate(key, value string)
	// AnnotateContent is Annotate for a note that has something of the object in it: it is kept only where the record
	// has the objects of requests as well.
	AnnotateContent(key, value string)
}

type annotatorKey struct{}

// WithAnnotator returns a context in which Annotate is heard by a.
func WithAnnotator(ctx context.Context, a Annotator) context.Context {
	return context.WithValue(ctx, annotatorKey{}, a)
}

// AnnotatorOf returns who hears Annotate in ctx; nil when nobody does.
func AnnotatorOf(ctx context.Context) Annotator {
	a, _ := ctx.Value(annotatorKey{}).(Annotator)
	return a
}

// Annotate adds to the audit record of the request that ctx belongs to, if it has one.
func Annotate(ctx context.Context, key, value string) {
	if a := AnnotatorOf(ctx); a != nil {
		a.Annotate(key, value)
	}
}

// AnnotateContent is Annotate for a note that has something of the request's object in it.
func AnnotateContent(ctx context.Context, key, value string) {
	if a := AnnotatorOf(ctx); a != nil {
		a.AnnotateContent(key, value)
	}
}
