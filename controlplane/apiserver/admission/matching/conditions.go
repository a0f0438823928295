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

// NewConditions compiles the conditions in a scope. A condition that does not compile is an error
// of Met.
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

// Met reports whether all conditions are true. If any is false, the result is false, even if others
// fail. Otherwise conditions that cannot be evaluated are an error.
func (c *Conditions) Met(ctx context.Context, in *cel.Input) (bool, error) {
	if len(c.list) == 0 {
		return true, nil
	}
	e := c.scope.Evaluate(ctx, in, cel.ConditionBudget)
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
