package matching

import (
	"context"
	"errors"
	"fmt"

	"github.com/google/cel-go/cel"
	"github.com/google/cel-go/common/types"
	arv1 "k8s.io/api/admissionregistration/v1"

	"keelson.dev/keelson/controlplane/apiserver/expression"
)

// Conditions are expressions that all must be true for somebody to be asked.
type Conditions struct {
	list     []arv1.MatchCondition
	scope    *expression.Scope
	programs []*expression.Program
	faults   []error
}

// NewConditions compiles conditions in a scope.
func NewConditions(list []arv1.MatchCondition, scope *expression.Scope) *Conditions {
	c := &Conditions{
		list: list, scope: scope, programs: make([]*expression.Program, len(list)), faults: make([]error, len(list)),
	}
	for i, condition := range list {
		p, err := scope.Compile(condition.Expression, cel.BoolType)
		if err != nil {
			err = errors.New("compilation error: " + err.Error())
		}
		c.programs[i], c.faults[i] = p, err
	}
	return c
}

// Met says whether all are true. One that is false decides, whatever the others are; otherwise those that cannot be
// evaluated are an error.
func (c *Conditions) Met(ctx context.Context, in *expression.Input) (bool, error) {
	if len(c.list) == 0 {
		return true, nil
	}
	e := c.scope.Evaluate(ctx, in, expression.ConditionBudget)
	var faults []error
	for i, p := range c.programs {
		if p == nil {
			faults = append(faults, fmt.Errorf("%w (match condition %s)", c.faults[i], c.list[i].Name))
			continue
		}
		out, err := e.Eval(ctx, p)
		switch {
		case errors.Is(err, expression.ErrBudget):
			return false, err
		case err != nil:
			faults = append(faults, fmt.Errorf("%w (match condition %s)", err, c.list[i].Name))
		case out == types.False:
			return false, nil
		}
	}
	return len(faults) == 0, errors.Join(faults...)
}
