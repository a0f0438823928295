package api

import "context"

// Annotator adds annotations to the audit record of a request.
type Annotator interface {
	// Annotate sets the annotation key to value, replacing an earlier value of the same key.
	Annotate(key, value string)
	// AnnotateContent is like Annotate, for a value that contains part of the request's object. The
	// annotation is recorded only if the audit level also records request bodies.
	AnnotateContent(key, value string)
}

type annotatorKey struct{}

// WithAnnotator returns a copy of ctx in which Annotate and AnnotateContent write to the annotator.
func WithAnnotator(ctx context.Context, annotator Annotator) context.Context {
	return context.WithValue(ctx, annotatorKey{}, annotator)
}

// AnnotatorOf returns the Annotator of ctx, or nil if ctx has none.
func AnnotatorOf(ctx context.Context) Annotator {
	a, _ := ctx.Value(annotatorKey{}).(Annotator)
	return a
}

// Annotate sets an annotation in the audit record of the request of ctx. It does nothing if ctx has
// no Annotator.
func Annotate(ctx context.Context, key, value string) {
	if a := AnnotatorOf(ctx); a != nil {
		a.Annotate(key, value)
	}
}

// AnnotateContent is like Annotate, for a value that contains part of the request's object: see
// Annotator.AnnotateContent.
func AnnotateContent(ctx context.Context, key, value string) {
	if a := AnnotatorOf(ctx); a != nil {
		a.AnnotateContent(key, value)
	}
}
