package matching

import (
	"context"
	"errors"
	"fmt"

	celgo "github.com/google/cel-go/cel"
	"github.com/google/cel-go/common/types"
	arv1 "k8s.io/api/admissionregistration/v1"

	"keelson.dev/keelson/controlplane/apiserver/cel"
)

// Conditions are the compiled match conditions of a webhook or policy, which applies only if all
// are true.
type Conditions struct {
	list     []arv1.MatchCondition
	scope    *cel.Scope
	programs []*cel.Program
	faults   []error
}

// NewConditions compiles match conditions in a scope. If a condition does not compile, AreMet
// returns the error.
func NewConditions(list []arv1.MatchCondition, scope *cel.Scope) *Conditions {
	c := &Conditions{
		list: list, scope: scope, programs: make([]*cel.Program, len(list)), faults: make([]error, len(list)),
	}
	for i, condition := range list {
		p, err := scope.Compile(condition.Expression, celgo.BoolType)
		if err != nil {
			err = errors.New("compilation error: " + err.Error())
		}
		c.programs[i], c.faults[i] = p, err
	}
	return c
}

// AreMet reports whether all conditions are true. If any condition is false, the result is false,
// even if others fail. Otherwise, AreMet returns the errors of conditions that cannot be evaluated.
func (c *Conditions) AreMet(ctx context.Context, input *cel.Input) (bool, error) {
	if len(c.list) == 0 {
		return true, nil
	}
	e := c.scope.Evaluate(ctx, input, cel.ConditionBudget)
	var faults []error
	for i, p := range c.programs {
		if p == nil {
			faults = append(faults, fmt.Errorf("%w (match condition %s)", c.faults[i], c.list[i].Name))
			continue
		}
		out, err := e.Eval(ctx, p)
		switch {
		case errors.Is(err, cel.ErrBudget):
			return false, err
		case err != nil:
			faults = append(faults, fmt.Errorf("%w (match condition %s)", err, c.list[i].Name))
		case out == types.False:
			return false, nil
		}
	}
	return len(faults) == 0, errors.Join(faults...)
}
