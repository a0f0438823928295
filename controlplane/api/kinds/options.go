package kinds

import (
	"keelson.dev/keelson/controlplane/api/kinds/expressions"
)

// Option is an option of All.
type Option func(*expressions.Options)

// WithCompiler sets the compiler that validates the CEL expressions in objects when they are
// written.
func WithCompiler(compile expressions.Compile) Option {
	return func(o *expressions.Options) { o.Compile = compile }
}
