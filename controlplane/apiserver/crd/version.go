// Package crd serves custom resources. It validates CustomResourceDefinitions. It follows the
// definitions in the replica's watch cache, and registers, replaces and removes the kinds that they
// define.
//
// Pruning, defaulting and validation by schema, including CEL rules, use the schema libraries of
// k8s.io/apiextensions-apiserver. A schema is compiled when an object needs it and cached within a
// memory budget.
package crd

import (
	"fmt"

	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	crdvalidation "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/validation"
	structural "k8s.io/apiextensions-apiserver/pkg/apiserver/schema"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/cel"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/cel/model"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/defaulting"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/objectmeta"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/pruning"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/validation"
	"k8s.io/apimachinery/pkg/runtime/schema"
	celconfig "k8s.io/apiserver/pkg/apis/cel"
	apiservercel "k8s.io/apiserver/pkg/cel"

	"keelson.dev/keelson/controlplane/api/custom"
	_ "keelson.dev/keelson/controlplane/apiserver/cel/celquantity" // limits the cost of quantities in CEL rules
	"keelson.dev/keelson/internal/lrucache"
)

// version is one version of a definition. It is immutable. Its schema is compiled on use and cached
// within a memory budget.
type version struct {
	gvk  schema.GroupVersionKind
	spec *apiextensionsv1.CustomResourceDefinitionVersion
	// keep is true if fields unknown to the schema are preserved, as spec.preserveUnknownFields of
	// a definition without a structural schema requires.
	keep bool

	structural func() (*structural.Structural, error)
	rules      func() (*rules, error)
}

// Estimated memory of a compiled schema, as multiples of the schema's size in protobuf, and
// estimated memory of each CEL rule.
const (
	structuralTimes = 12
	rulesTimes      = 16
	ruleBytes       = 4 << 10
	// minBytes is the minimum of the estimated size of a compiled schema.
	minBytes = 4 << 10
)

// rules are the compiled validators of a version: for whole objects and for their status.
type rules struct {
	whole, status validation.SchemaValidator
	cel           *cel.Validator // nil if the schema has no rules
}

// schemaBudget is the memory budget, in estimated bytes, for the compiled schemas of all
// definitions.
const schemaBudget = 32 << 20

// schemas is the cache of compiled schemas of this process. Compiled schemas are many times larger
// than their source, and most are rarely used. The least recently used schemas are therefore
// evicted and compiled again on use.
var schemas = lrucache.New(schemaBudget)

func newVersion(c *apiextensionsv1.CustomResourceDefinition, i int, budget *lrucache.Budget) *version {
	v := &version{
		gvk: schema.GroupVersionKind{Group: c.Spec.Group, Version: c.Spec.Versions[i].Name,
			Kind: c.Status.AcceptedNames.Kind},
		spec: &c.Spec.Versions[i], keep: c.Spec.PreserveUnknownFields,
	}
	var long int64
	if s := v.spec.Schema; s != nil && s.OpenAPIV3Schema != nil {
		long = int64(s.OpenAPIV3Schema.Size())
	}
	v.structural = lrucache.Memoize(budget, func() (*structural.Structural, int64, error) {
		props, err := v.schemaProps()
		if err != nil || props == nil {
			return nil, minBytes, err
		}
		s, err := structural.NewStructural(props)
		return s, minBytes + structuralTimes*long, err
	})
	v.rules = lrucache.Memoize(budget, func() (*rules, int64, error) {
		r, n, err := v.compileRules()
		return r, minBytes + rulesTimes*long + int64(n)*ruleBytes, err
	})
	return v
}

// schemaProps returns the schema as the internal type that the validation libraries need; nil if
// the version has no schema.
func (v *version) schemaProps() (*apiextensions.JSONSchemaProps, error) {
	s, err := custom.UnpackSchema(v.spec)
	if err == nil && s == nil {
		return nil, nil
	}
	out := &apiextensions.JSONSchemaProps{}
	if err == nil {
		err = apiextensionsv1.Convert_v1_JSONSchemaProps_To_apiextensions_JSONSchemaProps(s, out, nil)
	}
	if err != nil {
		return nil, fmt.Errorf("the schema of %s: %w", v.gvk, err)
	}
	return out, nil
}

// compileRules returns the validators of the version and the number of its CEL rules.
func (v *version) compileRules() (_ *rules, inCEL int, err error) {
	props, err := v.schemaProps()
	if err != nil {
		return nil, 0, err
	}
	s, err := v.structural()
	if err != nil {
		return nil, 0, err
	}
	if props != nil {
		crdvalidation.SchemaHas(props, func(s *apiextensions.JSONSchemaProps) bool {
			inCEL += len(s.XValidations)
			return false
		})
	}
	r := &rules{}
	if r.whole, _, err = validation.NewSchemaValidator(props); err != nil {
		return nil, 0, fmt.Errorf("the schema of %s: %w", v.gvk, err)
	}
	if props != nil && v.hasStatus() {
		if status, ok := props.Properties["status"]; ok {
			if r.status, _, err = validation.NewSchemaValidator(&status); err != nil {
				return nil, 0, fmt.Errorf("the schema of the status of %s: %w", v.gvk, err)
			}
		}
	}
	r.cel = cel.NewValidator(s, true, celconfig.PerCallLimit)
	return r, inCEL, nil
}

func (v *version) hasStatus() bool {
	return v.spec.Subresources != nil && v.spec.Subresources.Status != nil
}

func (v *version) scaleSubresource() *apiextensionsv1.CustomResourceSubresourceScale {
	if v.spec.Subresources == nil {
		return nil
	}
	return v.spec.Subresources.Scale
}

var _ custom.Shape = (*version)(nil)

// Declared returns the CEL type of the version's objects; nil if the version has no schema. It
// implements policies.Declarer.
func (v *version) Declared() *apiservercel.DeclType {
	s, err := v.structural()
	if err != nil || s == nil {
		return nil
	}
	return model.SchemaDeclType(s, true).MaybeAssignTypeName(v.gvk.Kind)
}

// Fit removes the fields of an object that the schema does not specify, and sets its defaults. If
// wantDropped is true, it returns the paths of the removed fields. It implements custom.Shape.
func (v *version) Fit(o *custom.Object, wantDropped bool) (dropped []string, err error) {
	s, err := v.structural()
	if err != nil {
		return nil, err
	}
	if o.Content == nil {
		o.Content = map[string]any{}
	}
	if !v.keep {
		dropped = pruning.PruneWithOptions(o.Content, s, true,
			structural.UnknownFieldPathOptions{TrackUnknownFieldPaths: wantDropped})
		defaulting.PruneNonNullableNullsWithoutDefaults(o.Content, s)
	}
	wrong, more := objectmeta.CoerceWithOptions(nil, o.Content, s, false,
		objectmeta.CoerceOptions{ReturnUnknownFieldPaths: wantDropped})
	if wrong != nil {
		return nil, wrong
	}
	defaulting.Default(o.Content, s)
	return append(dropped, more...), nil
}
