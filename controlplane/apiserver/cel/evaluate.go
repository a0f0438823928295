package cel

import (
	"context"
	"errors"
	"fmt"
	"math"

	"github.com/google/cel-go/common/types"
	"github.com/google/cel-go/common/types/ref"
	"github.com/google/cel-go/interpreter"
	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	celconfig "k8s.io/apiserver/pkg/apis/cel"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/cel/common"
	"k8s.io/apiserver/pkg/cel/lazy"
	"k8s.io/apiserver/pkg/cel/library"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/custom"
)

// Cost budgets of evaluations, with the values of Kubernetes: about 1 s, and 0.25 s for match
// conditions.
const (
	Budget          = celconfig.RuntimeCELCostBudget
	ConditionBudget = celconfig.RuntimeCELCostBudgetMatchConditions
)

// ErrBudget is the error if an evaluation exceeds its cost budget. Nothing more is evaluated.
var ErrBudget = errors.New("validation failed due to running out of cost budget, no further validation " +
	"rules will be run")

// Input contains the values of the variables of admission expressions. The evaluation does not
// modify the objects.
type Input struct {
	Object, Old any // nil becomes null
	Params      any // nil becomes null
	Request     *admissionv1.AdmissionRequest
	Namespace   *corev1.Namespace // nil becomes null
	User        api.User
	Authorizer  authorizer.UnconditionalAuthorizer // nil = expressions have no authorizer
}

// Evaluation evaluates expressions of a scope for one input. All of its expressions share a cost
// budget. It is not safe for concurrent use.
type Evaluation struct {
	scope  *Scope
	left   int64
	spent  int64 // cost of variables in the current Eval
	values map[string]any
}

// Evaluate returns an Evaluation for the input. budget is the maximum cost of all of its
// expressions together.
func (s *Scope) Evaluate(ctx context.Context, input *Input, budget int64) *Evaluation {
	e := &Evaluation{scope: s, left: budget, values: map[string]any{
		"object": celValue(input.Object), "oldObject": celValue(input.Old), "params": celValue(input.Params),
		"request": common.SchemalessTypedToVal(input.Request), "namespaceObject": namespaceValue(input.Namespace),
	}}
	if input.Authorizer != nil {
		info := &user.DefaultInfo{Name: input.User.Name, UID: input.User.UID, Groups: input.User.Groups,
			Extra: input.User.Extra}
		e.values["authorizer"] = library.NewAuthorizerVal(info, input.Authorizer)
		e.values["authorizer.requestResource"] = library.NewResourceAuthorizerVal(info, input.Authorizer,
			resource{input.Request})
	}
	if s.variables != nil {
		vars := lazy.NewMapValue(s.variables)
		for name, v := range s.programs {
			vars.Append(name, func(*lazy.MapValue) ref.Val { return e.evaluateVariable(ctx, name, v) })
		}
		e.values["variables"] = vars
	}
	return e
}

// RemainingBudget returns the remaining cost budget, which can be the budget of a further
// Evaluation.
func (e *Evaluation) RemainingBudget() int64 { return e.left }

// ResolveName returns the value of a variable. It implements interpreter.Activation.
func (e *Evaluation) ResolveName(name string) (any, bool) {
	v, ok := e.values[name]
	return v, ok
}

// Parent returns nil. It implements interpreter.Activation.
func (e *Evaluation) Parent() interpreter.Activation { return nil }

// Eval evaluates an expression. It returns ErrBudget if the cost budget is exceeded; every later
// call then fails too. Any other error is an error of the expression.
func (e *Evaluation) Eval(ctx context.Context, program *Program) (ref.Val, error) {
	if e.left < 0 {
		return nil, ErrBudget
	}
	out, details, err := program.program.ContextEval(ctx, e)
	cost := e.spent
	e.spent = 0
	if details == nil || details.ActualCost() == nil {
		e.left = -1
		return nil,
			fmt.Errorf("runtime cost could not be calculated for expression: %v, no further expression will be run",
				program.Expression)
	}
	cost = addCost(cost, *details.ActualCost())
	if cost > e.left {
		e.left = -1
		return nil, ErrBudget
	}
	e.left -= cost
	if err != nil {
		return nil, fmt.Errorf("expression '%v' resulted in error: %w", program.Expression, err)
	}
	return out, nil
}

func addCost(a int64, b uint64) int64 {
	if b > math.MaxInt64-uint64(a) {
		return math.MaxInt64
	}
	return a + int64(b)
}

func (e *Evaluation) evaluateVariable(ctx context.Context, name string, v *variable) ref.Val {
	if e.spent > e.left {
		return types.WrapErr(ErrBudget)
	}
	if v.err != nil {
		return types.NewErr("composited variable %q fails to compile: %v", name, v.err)
	}
	out, details, err := v.program.program.ContextEval(ctx, e)
	if details == nil || details.ActualCost() == nil {
		return types.NewErr("unable to calculate cost of variable %q", name)
	}
	e.spent = addCost(e.spent, *details.ActualCost())
	if err != nil {
		return types.NewErr("composited variable %q fails to evaluate: %v", name, err)
	}
	return out
}

// celValue returns an object as a CEL value with the structure of its JSON.
func celValue(obj any) ref.Val {
	o, ok := obj.(*custom.Object)
	if !ok || o == nil {
		return common.SchemalessTypedToVal(obj)
	}
	plain := make(map[string]any, len(o.Content)+3)
	for name, v := range o.Content {
		plain[name] = v
	}
	plain["apiVersion"], plain["kind"], plain["metadata"] = o.APIVersion, o.Kind, &o.ObjectMeta
	return common.SchemalessTypedToVal(plain)
}

// namespaceValue returns a Namespace as a CEL value. It has only the fields of the type that
// namespaceType declares.
func namespaceValue(ns *corev1.Namespace) ref.Val {
	if ns == nil {
		return types.NullValue
	}
	shown := &corev1.Namespace{Spec: ns.Spec, Status: ns.Status, ObjectMeta: metav1.ObjectMeta{
		Name: ns.Name, GenerateName: ns.GenerateName, Namespace: ns.Namespace, UID: ns.UID,
		ResourceVersion: ns.ResourceVersion, Generation: ns.Generation, CreationTimestamp: ns.CreationTimestamp,
		DeletionTimestamp: ns.DeletionTimestamp, DeletionGracePeriodSeconds: ns.DeletionGracePeriodSeconds,
		Labels: ns.Labels, Annotations: ns.Annotations, Finalizers: ns.Finalizers,
	}}
	return common.SchemalessTypedToVal(shown)
}

// resource is the requested resource, for the CEL variable authorizer.requestResource.
type resource struct{ r *admissionv1.AdmissionRequest }

func (r resource) GetName() string        { return r.r.Name }
func (r resource) GetNamespace() string   { return r.r.Namespace }
func (r resource) GetSubresource() string { return r.r.RequestSubResource }
func (r resource) GetResource() schema.GroupVersionResource {
	return schema.GroupVersionResource(*r.r.RequestResource)
}
