package cel

import (
	"errors"
	"fmt"

	"github.com/google/cel-go/cel"
	"github.com/google/cel-go/common/types"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api/kinds/expressions"
)

// Judge returns the compilation errors of the expressions in an object that a client writes. It is
// the expressions.Compile function for policies, webhooks, device classes and resource claims.
func (a *Admission) Judge(list []expressions.Expression) field.ErrorList {
	var errs field.ErrorList
	wrong := func(e expressions.Expression, err error) {
		switch {
		case errors.Is(err, errTooComplex):
			errs = append(errs, field.Forbidden(e.At, err.Error()))
		case err != nil:
			errs = append(errs, field.Invalid(e.At, e.Text, err.Error()))
		}
	}
	d := Declared{Params: len(list) > 0 && list[0].Params, Authorizer: true}
	var variables []Variable
	for _, e := range list {
		if e.Use == expressions.Variable {
			variables = append(variables, Variable{Name: e.Name, Expression: e.Text})
		}
	}
	plain, scope := a.NewScope(d, nil), a.NewScope(d, variables)
	device := deviceChecker{admission: a}
	patches, silent := d, d
	patches.Patches, silent.Authorizer = true, false
	for _, e := range list {
		var err error
		switch e.Use {
		case expressions.Variable:
			err = scope.programs[e.Name].err
		case expressions.MatchCondition:
			_, err = plain.Compile(e.Text, cel.BoolType)
		case expressions.Validation:
			_, err = scope.Compile(e.Text, cel.BoolType)
		case expressions.Message:
			_, err = scope.CompileProgram(e.Text, silent, cel.StringType)
		case expressions.AuditAnnotation:
			_, err = scope.Compile(e.Text, cel.StringType, cel.NullType)
		case expressions.ApplyMutation:
			_, err = scope.CompileProgram(e.Text, patches, types.NewObjectType("Object"))
		case expressions.PatchMutation:
			_, err = scope.CompileProgram(e.Text, patches, cel.ListType(types.NewObjectType("JSONPatch")))
		case expressions.DeviceSelector, expressions.DerivedValue:
			err = device.checkExpression(e)
		}
		wrong(e, err)
	}
	return errs
}

// deviceChecker checks the CEL expressions about devices in one object, such as a ResourceClaim.
type deviceChecker struct {
	admission *Admission
	derived   uint64 // total cost of the expressions for derived attributes
}

// checkExpression returns an error if the expression does not compile or costs too much. The cost
// of each selector is limited. The total cost of all derived attributes is limited; the error is
// returned only for the first expression that exceeds the total.
func (j *deviceChecker) checkExpression(e expressions.Expression) error {
	d, err := j.admission.devices()
	if err != nil {
		return fmt.Errorf("unexpected error loading CEL environment: %w", err)
	}
	cost, err := d.estimateCost(e.Text, e.Use == expressions.DeviceSelector)
	if err != nil {
		return err
	}
	if e.Use == expressions.DeviceSelector {
		if cost > resourcev1.CELSelectorExpressionMaxCost {
			return errTooComplex
		}
		return nil
	}
	const most = resourcev1.DeviceClaimDerivedAttributeCELMaxCost
	before := j.derived
	j.derived += min(cost, most+1)
	if before <= most && j.derived > most {
		return errTooComplex
	}
	return nil
}
