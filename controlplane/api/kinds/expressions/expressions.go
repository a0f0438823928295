// Package expressions declares the CEL expressions that objects contain, and the compiler that
// validates them.
package expressions

import (
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// Use is the purpose of an expression. It determines the variables of the expression and the type
// of its result.
type Use int

// The uses of expressions, with the type of the result.
const (
	MatchCondition Use = iota // bool: whether a webhook or a policy applies to a request
	// any type; later expressions refer to the result as variables.<Name>
	Variable
	Validation      // bool
	Message         // string; the authorizer is not available
	AuditAnnotation // string or null
	ApplyMutation   // Object
	PatchMutation   // list of JSONPatch
	DeviceSelector  // bool, for a device
	DerivedValue    // an attribute of a device
)

// Expression is a CEL expression of an object.
type Expression struct {
	Use    Use
	Name   string // name of a variable
	Text   string
	Params bool // the expression may use params
	At     *field.Path
}

// Compile returns the errors in the expressions of one object. An expression may refer to earlier
// variables in the list. A CEL environment takes megabytes and belongs to the packages that
// evaluate expressions. So the compiler is passed to kinds.All with kinds.Compiling. Without a
// compiler only the text of expressions is validated.
type Compile func([]Expression) field.ErrorList

// Options has the settings of kinds.All that the packages of the API groups use.
type Options struct{ Compile Compile }

// Collector collects the expressions of one object.
type Collector struct {
	All    []Expression
	Params bool
}

// Add appends an expression at a path.
func (e *Collector) Add(use Use, text string, at *field.Path) {
	e.All = append(e.All, Expression{Use: use, Text: text, Params: e.Params, At: at})
}

// Compiled returns the errors of the collected expressions. Without a compiler it returns none.
func (o *Options) Compiled(e *Collector) field.ErrorList {
	if o.Compile == nil || len(e.All) == 0 {
		return nil
	}
	return o.Compile(e.All)
}
