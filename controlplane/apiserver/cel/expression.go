// Package cel compiles the CEL expressions of authentication, authorization and admission, and evaluates those
// of admission. An environment takes some megabytes and a few milliseconds, so each is made when the first expression
// asks for it, and is then shared.
package cel

import (
	"sync"

	authenticationcel "k8s.io/apiserver/pkg/authentication/cel"
	authorizationcel "k8s.io/apiserver/pkg/authorization/cel"
	"k8s.io/apiserver/pkg/cel/environment"

	_ "keelson.dev/keelson/controlplane/apiserver/cel/celquantity" // bounds quantities in all expressions
	"keelson.dev/keelson/internal/lrucache"
)

// Compilers make the environments.
type Compilers struct {
	authentication func() authenticationcel.Compiler
	authorization  func() authorizationcel.Compiler
	admission      *Admission
}

// New returns compilers without environments.
func New() *Compilers { return Within(roomForPrograms) }

// Within is New with a room of so many bytes for what is compiled for admission.
func Within(most int64) *Compilers {
	base := sync.OnceValue(func() *environment.EnvSet {
		return environment.MustBaseEnvSet(environment.DefaultCompatibilityVersion())
	})
	return &Compilers{
		authentication: sync.OnceValue(func() authenticationcel.Compiler { return authenticationcel.NewCompiler(base()) }),
		authorization:  sync.OnceValue(func() authorizationcel.Compiler { return authorizationcel.NewCompiler(base()) }),
		admission: &Admission{base: base, room: lrucache.New(most),
			devices: sync.OnceValues(func() (*devices, error) { return newDevices(base()) })},
	}
}

// Authentication compiles expressions over the claims of a token and over a user.
func (c *Compilers) Authentication() authenticationcel.Compiler {
	return lazyAuthentication(c.authentication)
}

// Authorization compiles expressions over a SubjectAccessReview.
func (c *Compilers) Authorization() authorizationcel.Compiler {
	return lazyAuthorization(c.authorization)
}

type lazyAuthentication func() authenticationcel.Compiler

func (l lazyAuthentication) CompileClaimsExpression(e authenticationcel.ExpressionAccessor) (authenticationcel.CompilationResult, error) {
	return l().CompileClaimsExpression(e)
}

func (l lazyAuthentication) CompileUserExpression(e authenticationcel.ExpressionAccessor) (authenticationcel.CompilationResult, error) {
	return l().CompileUserExpression(e)
}

type lazyAuthorization func() authorizationcel.Compiler

func (l lazyAuthorization) CompileCELExpression(e authorizationcel.ExpressionAccessor) (authorizationcel.CompilationResult, error) {
	return l().CompileCELExpression(e)
}
