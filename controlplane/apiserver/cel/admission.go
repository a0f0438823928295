package cel

import (
	"fmt"
	"sync"

	"github.com/google/cel-go/cel"
	celast "github.com/google/cel-go/common/ast"
	"k8s.io/apimachinery/pkg/util/version"
	celconfig "k8s.io/apiserver/pkg/apis/cel"
	apiservercel "k8s.io/apiserver/pkg/cel"
	"k8s.io/apiserver/pkg/cel/common"
	"k8s.io/apiserver/pkg/cel/environment"
	"k8s.io/apiserver/pkg/cel/library"
	"k8s.io/apiserver/pkg/cel/mutation"

	"keelson.dev/keelson/internal/lrucache"
)

// Declared selects the optional variables and types that an admission expression may use, in
// addition to object, oldObject, request and namespaceObject.
type Declared struct {
	Params     bool // variable params
	Authorizer bool // variables authorizer and authorizer.requestResource
	Patches    bool // types Object and JSONPatch

	typedObject, typedParams bool // the variables object and params have the types in the Scope
}

// Admission compiles the expressions of match conditions and admission policies. CEL environments
// are created when the first expression needs them. Safe for concurrent use.
type Admission struct {
	base    func() *environment.EnvSet
	devices func() (*deviceEnv, error)
	budget  *lrucache.Budget // cache of compiled expressions

	mu   sync.Mutex
	envs map[Declared]*cel.Env
}

// Admission returns the compiler of expressions in match conditions and admission policies.
func (c *Compilers) Admission() *Admission { return c.admission }

// Variable is a named expression. Other expressions in its scope read its value as variables.NAME.
type Variable struct {
	Name, Expression string
}

// Program is a compiled expression.
type Program struct {
	Expression string
	Output     *cel.Type
	program    cel.Program
}

// Scope compiles expressions that share variables, such as all expressions of one policy.
type Scope struct {
	admission *Admission
	declared  Declared
	object    *apiservercel.DeclType // type of the object; nil = dynamic
	params    *apiservercel.DeclType
	variables *apiservercel.DeclType // type of variables; nil = there are no variables
	programs  map[string]*variable
	envs      map[Declared]*cel.Env // with the variables and types of the scope
	size      int64                 // estimated size of the programs in bytes
}

type variable struct {
	program *Program
	err     error
}

// NewScope compiles the variables and returns their scope; each variable may use the previous ones.
// If a variable does not compile, expressions that use it fail when they are evaluated.
func (a *Admission) NewScope(d Declared, variables []Variable) *Scope {
	s := &Scope{admission: a, declared: d, programs: make(map[string]*variable, len(variables))}
	s.addVariables(variables, true)
	return s
}

func (s *Scope) addVariables(variables []Variable, programs bool) {
	if len(variables) == 0 {
		return
	}
	s.variables = apiservercel.NewObjectType("kubernetes.variables", map[string]*apiservercel.DeclField{})
	for _, v := range variables {
		p, err := s.compileProgram(v.Expression, s.declared, programs)
		s.programs[v.Name] = &variable{p, err}
		out := apiservercel.DynType
		if err == nil {
			out = declType(p.Output)
		}
		s.variables.Fields[v.Name] = apiservercel.NewDeclField(v.Name, out, true, nil, nil)
	}
}

// Compile compiles an expression. The result of the expression must have one of the types in
// results. Without results, any type is allowed.
func (s *Scope) Compile(text string, results ...*cel.Type) (*Program, error) {
	return s.CompileProgram(text, s.declared, results...)
}

// CompileProgram is like Compile, but the expression may use the optional variables in d instead of
// those of the scope.
func (s *Scope) CompileProgram(text string, d Declared, results ...*cel.Type) (*Program, error) {
	return s.compileProgram(text, d, true, results...)
}

func (s *Scope) compileProgram(text string, d Declared, program bool, results ...*cel.Type) (*Program, error) {
	env, err := s.environmentFor(d)
	if err != nil {
		return nil, fmt.Errorf("unexpected error loading CEL environment: %w", err)
	}
	ast, issues := env.Compile(text)
	if issues != nil {
		return nil, fmt.Errorf("compilation failed: %s", issues)
	}
	if err := oneOf(ast.OutputType(), results); err != nil {
		return nil, err
	}
	p := &Program{Expression: text, Output: ast.OutputType()}
	if !program {
		return p, nil
	}
	if p.program, err = env.Program(ast, cel.InterruptCheckFrequency(celconfig.CheckFrequency)); err != nil {
		return nil, fmt.Errorf("program instantiation failed: %w", err)
	}
	s.size += programBytes + nodeBytes*celast.MaxID(ast.NativeRep())
	return p, nil
}

func oneOf(t *cel.Type, types []*cel.Type) error {
	if len(types) == 0 {
		return nil
	}
	for _, w := range types {
		if t.IsExactType(w) {
			return nil
		}
	}
	if len(types) == 1 {
		return fmt.Errorf("must evaluate to %v but got %v", types[0], t)
	}
	return fmt.Errorf("must evaluate to one of %v but got %v", types, t)
}

func (s *Scope) environmentFor(d Declared) (*cel.Env, error) {
	d.typedObject, d.typedParams = s.object != nil, s.params != nil
	if env := s.envs[d]; env != nil {
		return env, nil
	}
	env, err := s.admission.environmentFor(d)
	if err != nil || s.variables == nil && s.object == nil && s.params == nil {
		return env, err
	}
	var types []*apiservercel.DeclType
	var options []cel.EnvOption
	for name, t := range map[string]*apiservercel.DeclType{
		"variables": s.variables, "object": s.object, "params": s.params,
	} {
		if t == nil {
			continue
		}
		types = append(types, t)
		options = append(options, cel.Variable(name, t.CelType()))
		if name == "object" {
			options = append(options, cel.Variable("oldObject", t.CelType()))
		}
	}
	provided, err := apiservercel.NewDeclTypeProvider(types...).EnvOptions(env.CELTypeProvider())
	if err != nil {
		return nil, err
	}
	if env, err = env.Extend(append(provided, options...)...); err != nil {
		return nil, err
	}
	if s.envs == nil {
		s.envs = make(map[Declared]*cel.Env, 2)
	}
	s.envs[d] = env
	return env, nil
}

// environmentFor returns the CEL environment with the optional variables and types in d. It creates
// each environment once.
func (a *Admission) environmentFor(d Declared) (*cel.Env, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if env := a.envs[d]; env != nil {
		return env, nil
	}
	request, namespace := requestType(), namespaceType()
	options := []cel.EnvOption{
		cel.Variable("namespaceObject", namespace.CelType()), cel.Variable("request", request.CelType()),
	}
	if !d.typedObject {
		options = append(options, cel.Variable("object", cel.DynType), cel.Variable("oldObject", cel.DynType))
	}
	if d.Params && !d.typedParams {
		options = append(options, cel.Variable("params", cel.DynType))
	}
	if d.Authorizer {
		options = append(options, cel.Variable("authorizer", library.AuthorizerType),
			cel.Variable("authorizer.requestResource", library.ResourceCheckType))
	}
	set, err := a.base().Extend(environment.VersionedOptions{
		IntroducedVersion: version.MajorMinor(1, 0), EnvOptions: options,
		DeclTypes: []*apiservercel.DeclType{namespace, request},
	}, environment.StrictCostOpt)
	if err == nil && d.Patches { // added last, because the provider of the declared types would hide these types
		set, err = set.Extend(environment.VersionedOptions{
			IntroducedVersion: version.MajorMinor(1, 0), EnvOptions: []cel.EnvOption{
				common.ResolverEnvOption(&mutation.DynamicTypeResolver{}),
				environment.UnversionedLib(library.JSONPatch),
			},
		})
	}
	if err != nil {
		return nil, err
	}
	if a.envs == nil {
		a.envs = make(map[Declared]*cel.Env)
	}
	a.envs[d] = set.StoredExpressionsEnv()
	return a.envs[d], nil
}

// Check returns the errors of the CEL compiler for an expression; "" if the expression is valid.
// object and params are the types of these variables (nil = dynamic). The variables are compiled
// with the same types. Nothing is cached.
func (a *Admission) Check(text string, d Declared, variables []Variable, object, params *apiservercel.DeclType) (
	string, error,
) {
	s := &Scope{admission: a, declared: d, object: object, params: params, programs: map[string]*variable{}}
	s.addVariables(variables, false)
	env, err := s.environmentFor(d)
	if err != nil {
		return "", err
	}
	if _, issues := env.Compile(text); issues != nil {
		return issues.String(), nil
	}
	return "", nil
}
