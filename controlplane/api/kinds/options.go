package kinds

import (
	"keelson.dev/keelson/controlplane/api/kinds/expressions"
)

// Option is an option of All.
type Option func(*expressions.Options)

// Compiling sets the compiler that validates the CEL expressions in objects when they are written.
func Compiling(f expressions.Compile) Option { return func(o *expressions.Options) { o.Compile = f } }
