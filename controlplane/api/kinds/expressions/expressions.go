// Package expressions declares the types of CEL expressions in API objects, and the compiler that
// validates them.
package expressions

import (
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// Use is the purpose of an expression. It determines the variables of the expression and the type
// of its result.
type Use int

// The uses of expressions. Each comment states the type of the result.
const (
	MatchCondition Use = iota // bool: whether a webhook or a policy applies to a request
	// any type; later expressions refer to the result as variables.<Name>
	Variable
	Validation      // bool: whether the request is valid
	Message         // string; the authorizer is not available
	AuditAnnotation // string or null
	ApplyMutation   // Object
	PatchMutation   // list of JSONPatch
	DeviceSelector  // bool, for a device
	DerivedValue    // the value of an attribute of a device
)

// Expression is a CEL expression in an object.
type Expression struct {
	Use    Use
	Name   string // name of the variable, for the use Variable
	Text   string
	Params bool // the expression may use the variable params
	At     *field.Path
}

// Compile returns the errors in the expressions of one object. An expression may refer to earlier
// variables in the list. A CEL environment takes megabytes, so only the packages that evaluate
// expressions contain one. They provide the compiler with kinds.WithCompiler. Without a compiler,
// only the text of expressions is validated.
type Compile func([]Expression) field.ErrorList

// Options contains the options of kinds.All for the packages of the API groups.
type Options struct{ Compile Compile }

// Collector collects the expressions of one object.
type Collector struct {
	All    []Expression
	Params bool
}

// Add appends an expression with its use and the path of its field.
func (e *Collector) Add(use Use, text string, fldPath *field.Path) {
	e.All = append(e.All, Expression{Use: use, Text: text, Params: e.Params, At: fldPath})
}

// CompileAll returns the errors of the collected expressions. Without a compiler it returns none.
func (o *Options) CompileAll(e *Collector) field.ErrorList {
	if o.Compile == nil || len(e.All) == 0 {
		return nil
	}
	return o.Compile(e.All)
}
