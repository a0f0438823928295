// Package expressions declares the CEL expressions that objects contain, and the compiler that validates them.
package expressions

import (
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// Use is what an expression is for, which says what it may refer to and what it must evaluate to.
type Use int

// The uses.
const (
	MatchCondition  Use = iota // a bool: whether a webhook or a policy has to do with a request
	Variable                   // anything; the expressions after it may use it as variables.<Name>
	Validation                 // a bool
	Message                    // a string; it may not ask the authorizer
	AuditAnnotation            // a string or null
	ApplyMutation              // an Object
	PatchMutation              // a list of JSONPatch
	DeviceSelector             // a bool about a device
	DerivedValue               // an attribute of a device
)

// Expression is a CEL expression of an object.
type Expression struct {
	Use    Use
	Name   string // of a variable
	Text   string
	Params bool // params may be used
	At     *field.Path
}

// Compile says what is wrong with the expressions of one object, which are in the order in which they may refer to each
// other. An environment for CEL takes megabytes, and lies where expressions are evaluated: All is told of it by
// Compiling. Without it expressions are judged as text only.
type Compile func([]Expression) field.ErrorList

// Options has the settings of kinds.All that the packages of the API groups use.
type Options struct{ Compile Compile }

// Collector collects those of one object.
type Collector struct {
	InAllCategory []Expression
	Params        bool
}

func (e *Collector) Add(use Use, text string, at *field.Path) {
	e.InAllCategory = append(e.InAllCategory, Expression{Use: use, Text: text, Params: e.Params, At: at})
}

// Compiled is what is wrong with what was collected, when there is who can tell.
func (o *Options) Compiled(e *Collector) field.ErrorList {
	if o.Compile == nil || len(e.InAllCategory) == 0 {
		return nil
	}
	return o.Compile(e.InAllCategory)
}
