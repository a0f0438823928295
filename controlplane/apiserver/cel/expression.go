// Package cel compiles the CEL expressions of authentication, authorization and admission, and
// evaluates admission expressions. An environment takes several megabytes and milliseconds to
// create. Each environment is created when the first expression needs it, and is then shared.
package cel

import (
	"sync"

	authenticationcel "k8s.io/apiserver/pkg/authentication/cel"
	authorizationcel "k8s.io/apiserver/pkg/authorization/cel"
	"k8s.io/apiserver/pkg/cel/environment"

	_ "keelson.dev/keelson/controlplane/apiserver/cel/celquantity" // limits quantities in all expressions
	"keelson.dev/keelson/internal/lrucache"
)

// Compilers contains the compilers and their CEL environments.
type Compilers struct {
	authentication func() authenticationcel.Compiler
	authorization  func() authorizationcel.Compiler
	admission      *Admission
}

// New returns compilers with the default cache size. Their CEL environments are created on use.
func New() *Compilers { return WithBudget(programBudget) }

// WithBudget is like New, with a cache of limit bytes for compiled admission expressions.
func WithBudget(limit int64) *Compilers {
	base := sync.OnceValue(func() *environment.EnvSet {
		return environment.MustBaseEnvSet(environment.DefaultCompatibilityVersion())
	})
	return &Compilers{
		authentication: sync.OnceValue(func() authenticationcel.Compiler {
			return authenticationcel.NewCompiler(base())
		}),
		authorization: sync.OnceValue(func() authorizationcel.Compiler {
			return authorizationcel.NewCompiler(base())
		}),
		admission: &Admission{base: base, budget: lrucache.New(limit),
			devices: sync.OnceValues(func() (*deviceEnv, error) { return newDeviceEnv(base()) })},
	}
}

// Authentication returns the compiler of expressions about token claims and users.
func (c *Compilers) Authentication() authenticationcel.Compiler {
	return lazyAuthentication(c.authentication)
}

// Authorization returns the compiler of expressions about SubjectAccessReviews.
func (c *Compilers) Authorization() authorizationcel.Compiler {
	return lazyAuthorization(c.authorization)
}

type lazyAuthentication func() authenticationcel.Compiler

func (l lazyAuthentication) CompileClaimsExpression(
	e authenticationcel.ExpressionAccessor,
) (authenticationcel.CompilationResult, error) {
	return l().CompileClaimsExpression(e)
}

func (l lazyAuthentication) CompileUserExpression(
	e authenticationcel.ExpressionAccessor,
) (authenticationcel.CompilationResult, error) {
	return l().CompileUserExpression(e)
}

type lazyAuthorization func() authorizationcel.Compiler

func (l lazyAuthorization) CompileCELExpression(
	e authorizationcel.ExpressionAccessor,
) (authorizationcel.CompilationResult, error) {
	return l().CompileCELExpression(e)
}
