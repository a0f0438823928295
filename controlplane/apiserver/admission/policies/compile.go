package policies

import (
	"errors"

	celgo "github.com/google/cel-go/cel"
	"github.com/google/cel-go/common/types"
	arv1 "k8s.io/api/admissionregistration/v1"

	"keelson.dev/keelson/controlplane/apiserver/admission/matching"
	"keelson.dev/keelson/controlplane/apiserver/cel"
)

// source contains the fields of a ValidatingAdmissionPolicy or MutatingAdmissionPolicy that the
// evaluation uses.
type source struct {
	name        string
	param       *arv1.ParamKind
	variables   []arv1.Variable
	conditions  []arv1.MatchCondition
	failure     *arv1.FailurePolicyType
	validations []arv1.Validation
	annotations []arv1.AuditAnnotation
	mutations   []arv1.Mutation
	reinvoke    bool // reinvocation policy IfNeeded
}

// policy is a policy with its compiled expressions. They are compiled at the first evaluation and
// cached within a memory budget.
type policy struct {
	source
	engine   *Policies
	criteria matching.Criteria
	compiled func() *programs
}

// programs are the compiled expressions of a policy, which share one CEL scope. They are immutable.
type programs struct {
	scope      *cel.Scope
	conditions *matching.Conditions
	main       []compiled // one for each validation or mutation
	messages   []compiled // one for each validation; empty without a messageExpression
	published  []compiled // one for each audit annotation
}

// compiled is a compiled expression, or the error of its compilation.
type compiled struct {
	program *cel.Program
	err     error
}

func (p *Policies) newPolicy(s source, m *arv1.MatchResources) *policy {
	out := &policy{source: s, engine: p, criteria: matching.OfPolicy(m)}
	out.compiled = cel.Memoize(p.cfg.Expressions, func() (*programs, *cel.Scope) {
		c := out.compilePrograms()
		return c, c.scope
	})
	return out
}

func (p *policy) ignoresFailure() bool { return p.failure != nil && *p.failure == arv1.Ignore }

// declaredVariables returns the variables that expressions of the policy may use.
func (p *policy) declaredVariables() cel.Declared {
	return cel.Declared{Params: p.param != nil, Authorizer: true}
}

func celVariables(declarations []arv1.Variable) []cel.Variable {
	out := make([]cel.Variable, len(declarations))
	for i, v := range declarations {
		out[i] = cel.Variable{Name: v.Name, Expression: v.Expression}
	}
	return out
}

// CEL types of the results of mutation expressions.
var (
	applyType = types.NewObjectType("Object")
	patchType = celgo.ListType(types.NewObjectType("JSONPatch"))
)

func (p *policy) compilePrograms() *programs {
	d := p.declaredVariables()
	out := &programs{scope: p.engine.cfg.Expressions.NewScope(d, celVariables(p.variables))}
	out.conditions = matching.NewConditions(p.conditions, out.scope)
	compile := func(text string, d cel.Declared, results ...*celgo.Type) compiled {
		program, err := out.scope.CompileProgram(text, d, results...)
		if err != nil {
			err = errors.New("compilation error: " + err.Error())
		}
		return compiled{program, err}
	}
	said := d
	said.Authorizer = false
	for _, v := range p.validations {
		out.main = append(out.main, compile(v.Expression, d, celgo.BoolType))
		message := compiled{}
		if v.MessageExpression != "" {
			message = compile(v.MessageExpression, said, celgo.StringType)
		}
		out.messages = append(out.messages, message)
	}
	for _, a := range p.annotations {
		out.published = append(out.published, compile(a.ValueExpression, d, celgo.StringType, celgo.NullType))
	}
	d.Patches = true
	for _, m := range p.mutations {
		switch {
		case m.JSONPatch != nil:
			out.main = append(out.main, compile(m.JSONPatch.Expression, d, patchType))
		case m.ApplyConfiguration != nil:
			out.main = append(out.main, compile(m.ApplyConfiguration.Expression, d, applyType))
		default:
			out.main = append(out.main, compiled{err: errors.New("the mutation has no expression")})
		}
	}
	return out
}
