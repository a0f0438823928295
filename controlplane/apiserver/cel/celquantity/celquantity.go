// Package celquantity limits the cost of the CEL functions quantity and isQuantity in all CEL
// expressions of this process. This includes the rules of custom resources, because the validator
// of custom resources does not accept another CEL environment. CEL assumes that the cost of these
// functions is linear in the length of the text. In fact, parsing time grows with the square of the
// length and with the exponent. Other parsing functions (semver, ip, cidr, url, regular
// expressions) take time proportional to their cost.
package celquantity

import (
	"github.com/google/cel-go/cel"
	"github.com/google/cel-go/common/types"
	"github.com/google/cel-go/common/types/ref"
	"github.com/google/cel-go/interpreter"
	"k8s.io/apimachinery/pkg/api/resource"
	apiservercel "k8s.io/apiserver/pkg/cel"
	"k8s.io/apiserver/pkg/cel/environment"

	"keelson.dev/keelson/internal/quantitytext"
)

// init replaces the first program option of StrictCostOpt by that option followed by replaceCalls.
// It changes the option list in place, because the base environment refers to the same list. The
// base environment reads the list when it is first used, which is after init.
func init() {
	list := environment.StrictCostOpt.ProgramOptions
	list[0] = chainOptions(list[0], cel.CustomDecoratorV2(replaceCalls))
}

// chainOptions returns an option that applies first and then second.
func chainOptions[P any](first, second func(P) (P, error)) func(P) (P, error) {
	return func(p P) (P, error) {
		p, err := first(p)
		if err != nil {
			return p, err
		}
		return second(p)
	}
}

// replaceCalls replaces calls of quantity and isQuantity by calls of toQuantity and isQuantity of
// this package.
func replaceCalls(node interpreter.InterpretableV2) (interpreter.InterpretableV2, error) {
	call, ok := node.(interpreter.InterpretableCall)
	if !ok {
		return node, nil
	}
	impl := toQuantity
	switch call.OverloadID() {
	case "string_to_quantity":
	case "is_quantity_string":
		impl = isQuantity
	default:
		return node, nil
	}
	return interpreter.NewCall(call.ID(), call.Function(), call.OverloadID(), call.Args(), impl), nil
}

// toQuantity parses a quantity within the limits of quantitytext. An error is returned as a CEL
// error value.
func toQuantity(args ...ref.Val) ref.Val {
	q, err := parseQuantity(args)
	if err != nil {
		return err
	}
	return apiservercel.Quantity{Quantity: &q}
}

// isQuantity reports whether toQuantity accepts the text.
func isQuantity(args ...ref.Val) ref.Val {
	if _, ok := args[0].Value().(string); !ok {
		return types.MaybeNoSuchOverloadErr(args[0])
	}
	_, err := parseQuantity(args)
	return types.Bool(err == nil)
}

// parseQuantity parses the text in args as a quantity. The second result is a CEL error value; nil
// if the text is valid.
func parseQuantity(args []ref.Val) (resource.Quantity, ref.Val) {
	text, ok := args[0].Value().(string)
	if !ok {
		return resource.Quantity{}, types.MaybeNoSuchOverloadErr(args[0])
	}
	if err := quantitytext.Check(text); err != nil {
		return resource.Quantity{}, types.WrapErr(err)
	}
	q, err := resource.ParseQuantity(text)
	if err != nil {
		return q, types.WrapErr(err)
	}
	return q, nil
}
