package kinds

import (
	"keelson.dev/keelson/controlplane/api/kinds/expressions"
)

// Option changes what All returns.
type Option func(*expressions.Options)

// Compiling makes the kinds whose objects hold CEL expressions have them compiled by f when they are written.
func Compiling(f expressions.Compile) Option { return func(o *expressions.Options) { o.Compile = f } }
