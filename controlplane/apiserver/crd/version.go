// Package crd makes kinds of custom resource definitions: it judges the definitions, follows those of its replica's
// watch cache and registers, exchanges and drops the kinds that they describe.
//
// What a schema says of objects (pruning, defaults, rules in CEL) is done by the schema libraries of
// k8s.io/apiextensions-apiserver. A schema is compiled when an object needs it, and kept while there is room.
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
	_ "keelson.dev/keelson/controlplane/apiserver/cel/celquantity" // bounds quantities in the rules of schemas
	"keelson.dev/keelson/internal/lrucache"
)

// version is one version of a definition. It never changes; what is compiled of it is made when it is asked for, and kept
// while there is room.
type version struct {
	gvk  schema.GroupVersionKind
	spec *apiextensionsv1.CustomResourceDefinitionVersion
	// keep says that fields which the schema does not know stay: definitions of the first days of Kubernetes.
	keep bool

	structural func() (*structural.Structural, error)
	rules      func() (*rules, error)
}

// What is compiled takes so many times what the schema takes in protobuf, and so much for each rule in CEL.
const (
	structuralTimes = 12
	rulesTimes      = 16
	ruleBytes       = 4 << 10
	// leastBytes is what the smallest takes.
	leastBytes = 4 << 10
)

// rules are what whole objects, and their status, are judged by.
type rules struct {
	whole, status validation.SchemaValidator
	cel           *cel.Validator // nil where the schema has no rules of its own
}

// roomForSchemas bounds what is kept of all definitions, by estimate.
const roomForSchemas = 32 << 20

// schemas is the room of this process. What is compiled of schemas takes many times what they do, and most definitions are
// seldom used: it is made again for others when an object needs it.
var schemas = lrucache.New(roomForSchemas)

func newVersion(c *apiextensionsv1.CustomResourceDefinition, i int, in *lrucache.Budget) *version {
	v := &version{
		gvk:  schema.GroupVersionKind{Group: c.Spec.Group, Version: c.Spec.Versions[i].Name, Kind: c.Status.AcceptedNames.Kind},
		spec: &c.Spec.Versions[i], keep: c.Spec.PreserveUnknownFields,
	}
	var long int64
	if s := v.spec.Schema; s != nil && s.OpenAPIV3Schema != nil {
		long = int64(s.OpenAPIV3Schema.Size())
	}
	v.structural = lrucache.Memoize(in, func() (*structural.Structural, int64, error) {
		props, err := v.props()
		if err != nil || props == nil {
			return nil, leastBytes, err
		}
		s, err := structural.NewStructural(props)
		return s, leastBytes + structuralTimes*long, err
	})
	v.rules = lrucache.Memoize(in, func() (*rules, int64, error) {
		r, n, err := v.compile()
		return r, leastBytes + rulesTimes*long + int64(n)*ruleBytes, err
	})
	return v
}

// props is the schema in the form that the libraries take; nil when none exists.
func (v *version) props() (*apiextensions.JSONSchemaProps, error) {
	s, err := custom.SchemaOf(v.spec)
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

// compile makes the rules, and says how many of them are in CEL.
func (v *version) compile() (_ *rules, inCEL int, err error) {
	props, err := v.props()
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

func (v *version) scale() *apiextensionsv1.CustomResourceSubresourceScale {
	if v.spec.Subresources == nil {
		return nil
	}
	return v.spec.Subresources.Scale
}

var _ custom.Shape = (*version)(nil)

// Declared implements policies.Declarer.
func (v *version) Declared() *apiservercel.DeclType {
	s, err := v.structural()
	if err != nil || s == nil {
		return nil
	}
	return model.SchemaDeclType(s, true).MaybeAssignTypeName(v.gvk.Kind)
}

// Fit implements custom.Shape.
func (v *version) Fit(o *custom.Object, tell bool) (dropped []string, err error) {
	s, err := v.structural()
	if err != nil {
		return nil, err
	}
	if o.Content == nil {
		o.Content = map[string]any{}
	}
	if !v.keep {
		dropped = pruning.PruneWithOptions(o.Content, s, true, structural.UnknownFieldPathOptions{TrackUnknownFieldPaths: tell})
		defaulting.PruneNonNullableNullsWithoutDefaults(o.Content, s)
	}
	wrong, more := objectmeta.CoerceWithOptions(nil, o.Content, s, false, objectmeta.CoerceOptions{ReturnUnknownFieldPaths: tell})
	if wrong != nil {
		return nil, wrong
	}
	defaulting.Default(o.Content, s)
	return append(dropped, more...), nil
}
