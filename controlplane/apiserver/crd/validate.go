package crd

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/validation"
	structural "k8s.io/apiextensions-apiserver/pkg/apiserver/schema"
	formats "k8s.io/apiextensions-apiserver/pkg/apiserver/validation"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/validation/field"
	utilversion "k8s.io/apimachinery/pkg/util/version"
	"k8s.io/kube-openapi/pkg/validation/spec"

	"keelson.dev/keelson/controlplane/api"
)

// Definitions is the admission plugin for CustomResourceDefinitions. It also rejects the creation
// of custom resources while their definition is being deleted.
type Definitions struct {
	// Definition returns a definition from this replica's cache, or from the store.
	Definition func(ctx context.Context, name string) (*apiextensionsv1.CustomResourceDefinition, bool)
	// Kinds contains the kind CustomResourceDefinition.
	Kinds *api.Kinds
}

// Admit validates a written definition. It rejects creating a custom resource if its definition is
// being deleted.
func (d Definitions) Admit(ctx context.Context, a *api.Attempt) error {
	if c, ok := a.Whole.(*apiextensionsv1.CustomResourceDefinition); ok {
		return validateDefinition(ctx, a, c)
	}
	if a.Kind.Serving.Definition == "" || !a.CreatesObject() {
		return nil
	}
	c, ok := d.Definition(ctx, a.Kind.Serving.Definition)
	if !ok {
		return nil // the commit fails because of its condition on the kind
	}
	if c.DeletionTimestamp != nil {
		return apierrors.NewForbidden(a.Kind.GroupResource(), a.Whole.GetName(),
			errors.New("create not allowed while custom resource definition is terminating"))
	}
	// The deletion must not start before the commit, since it lists the objects to delete
	// afterwards.
	a.Require(api.Check{Ref: api.Ref{Kind: definitionsKind(d.Kinds), Name: c.Name}, Seen: c})
	return nil
}

func validateDefinition(ctx context.Context, a *api.Attempt, c *apiextensionsv1.CustomResourceDefinition) error {
	old, changed := a.Stored.(*apiextensionsv1.CustomResourceDefinition)
	if changed && a.Facet == "status" {
		// A status update does not need the validation of large schemas.
		c, old = withoutVersions(c), withoutVersions(old)
	}
	now, err := toInternal(c)
	if err != nil {
		return apierrors.NewBadRequest(err.Error())
	}
	var errs field.ErrorList
	withoutBlindSelection(now)
	if !changed {
		if errs := validatePatterns(now, nil); len(errs) > 0 {
			// first, because the validation libraries compile patterns
			return apierrors.NewInvalid(a.Kind.GVK.GroupKind(), c.Name, errs)
		}
		errs = validation.ValidateCustomResourceDefinition(ctx, now)
		warnOfSchemas(ctx, now, nil)
	} else {
		was, err := toInternal(old)
		if err != nil {
			return apierrors.NewInternalError(err)
		}
		if a.Facet == "status" {
			errs = validation.ValidateUpdateCustomResourceDefinitionStatus(ctx, now, was)
		} else {
			if errs := validatePatterns(now, was); len(errs) > 0 {
				return apierrors.NewInvalid(a.Kind.GVK.GroupKind(), c.Name, errs)
			}
			errs = validation.ValidateCustomResourceDefinitionUpdate(ctx, now, was)
			warnOfSchemas(ctx, now, was)
		}
	}
	errs = slices.DeleteFunc(errs, func(e *field.Error) bool { return e.Field == "metadata.resourceVersion" })
	if len(errs) > 0 {
		return apierrors.NewInvalid(a.Kind.GVK.GroupKind(), c.Name, errs)
	}
	return nil
}

// withoutVersions returns a shallow copy of a definition without its versions. It is sufficient for
// the validation of the metadata and status.
func withoutVersions(c *apiextensionsv1.CustomResourceDefinition) *apiextensionsv1.CustomResourceDefinition {
	out := *c
	out.Spec.Versions = nil
	return &out
}

// toInternal converts a definition to the type that the validation libraries need. The result
// shares data with c and must not be modified.
func toInternal(c *apiextensionsv1.CustomResourceDefinition) (*apiextensions.CustomResourceDefinition, error) {
	out := &apiextensions.CustomResourceDefinition{}
	if err := apiextensionsv1.Convert_v1_CustomResourceDefinition_To_apiextensions_CustomResourceDefinition(c, out,
		nil); err != nil {
		return nil, err
	}
	return out, nil
}

// withoutBlindSelection removes the selectable fields from a definition with an invalid schema. The
// validation libraries reject such a schema, but would fail when they look up the fields in it.
func withoutBlindSelection(c *apiextensions.CustomResourceDefinition) {
	selecting := len(c.Spec.SelectableFields) > 0
	for i := range c.Spec.Versions {
		selecting = selecting || len(c.Spec.Versions[i].SelectableFields) > 0
	}
	if !selecting {
		return
	}
	readable := func(v *apiextensions.CustomResourceValidation) bool {
		if v == nil || v.OpenAPIV3Schema == nil {
			return true
		}
		_, err := structural.NewStructural(v.OpenAPIV3Schema)
		return err == nil
	}
	all := readable(c.Spec.Validation)
	if !all {
		c.Spec.SelectableFields = nil
	}
	for i := range c.Spec.Versions {
		if v := &c.Spec.Versions[i]; !all || !readable(v.Schema) {
			v.SelectableFields = nil
		}
	}
}

// warnOfSchemas warns the client of unknown formats and unsupported list types in the schemas of a
// definition, if they are not in old. old may be nil.
func warnOfSchemas(ctx context.Context, definition, old *apiextensions.CustomResourceDefinition) {
	known := map[string]bool{}
	for _, w := range schemaWarnings(old) {
		known[w] = true
	}
	for _, w := range schemaWarnings(definition) {
		if !known[w] {
			known[w] = true
			api.Warn(ctx, w)
		}
	}
}

// formatVersion is the Kubernetes release that defines the known string formats.
var formatVersion = utilversion.MajorMinor(1, 37)

func schemaWarnings(c *apiextensions.CustomResourceDefinition) (out []string) {
	if c == nil {
		return nil
	}
	look := func(s *apiextensions.JSONSchemaProps) bool {
		if f := s.Format; f != "" {
			schema := &spec.Schema{SchemaProps: spec.SchemaProps{Format: f, Type: []string{s.Type}}}
			if len(formats.GetUnrecognizedFormats(schema, formatVersion)) > 0 {
				out = append(out, fmt.Sprintf("unrecognized format %q", f))
			}
		}
		if s.XListType != nil && *s.XListType == "set" && s.Items != nil && s.Items.Schema != nil {
			if t := s.Items.Schema.Type; t == "object" || t == "array" {
				out = append(out,
					fmt.Sprintf("x-kubernetes-list-type: set for items of type %q is not supported by server-side "+
						"apply or CEL validation rules", t))
			}
		}
		return false
	}
	if c.Spec.Validation != nil && c.Spec.Validation.OpenAPIV3Schema != nil {
		validation.SchemaHas(c.Spec.Validation.OpenAPIV3Schema, look)
	}
	for _, v := range c.Spec.Versions {
		if v.Schema != nil && v.Schema.OpenAPIV3Schema != nil {
			validation.SchemaHas(v.Schema.OpenAPIV3Schema, look)
		}
	}
	return out
}
