package crd

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/cel"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/cel/model"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/listtype"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/objectmeta"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	contentvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	celconfig "k8s.io/apiserver/pkg/apis/cel"
	"k8s.io/apiserver/pkg/cel/common"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/custom"
)

// validator validates the objects of one version of a custom resource. Its method validateFacet is
// used as api.Kind.Validation.Check. whole and changed validate the metadata of a new and of an
// updated object.
type validator struct {
	version *version
	whole   func(api.Object) field.ErrorList
	changed func(obj, old api.Object) field.ErrorList
}

func (j *validator) validateFacet(ctx context.Context, facet string, obj, old api.Object) field.ErrorList {
	refuse := func(err error) field.ErrorList { return field.ErrorList{field.InternalError(nil, err)} }
	s, err := j.version.structural()
	if err != nil {
		return refuse(err)
	}
	r, err := j.version.rules()
	if err != nil {
		return refuse(err)
	}
	now, err := obj.(*custom.Object).Map()
	if err != nil {
		return refuse(err)
	}
	c := validatedObject{version: j.version, rules: r, content: now}
	if facet != "status" {
		warnOfFinalizers(ctx, obj, old)
	}
	if old == nil {
		errs := append(j.whole(obj), validation.ValidateCustomResource(nil, now, r.whole)...)
		errs = append(errs, c.validateReplicas()...)
		errs = append(errs, c.scaleStatus()...)
		errs = append(errs, objectmeta.Validate(ctx, nil, now, s, false)...)
		errs = append(errs, listtype.ValidateListSetsAndMaps(nil, s, now)...)
		return append(errs, c.celErrors(errs, func() field.ErrorList {
			broken, _ := r.cel.Validate(ctx, nil, s, now, nil, celconfig.RuntimeCELCostBudget)
			return broken
		})...)
	}
	before, err := old.(*custom.Object).Map()
	if err != nil {
		return refuse(err)
	}
	// Values that were invalid before and are unchanged are not reported (ratcheting).
	pair := common.NewCorrelatedObject(now, before, &model.Structural{Structural: s})
	errs := j.changed(obj, old)
	if facet == "status" {
		if status, ok := now["status"]; ok && r.status != nil {
			errs = append(errs, validation.ValidateCustomResourceUpdate(field.NewPath("status"), status,
				before["status"], r.status,
				validation.WithRatcheting(pair.Key("status")))...)
		}
	} else {
		errs = append(errs, validation.ValidateCustomResourceUpdate(nil, now, before, r.whole,
			validation.WithRatcheting(pair))...)
		errs = append(errs, c.validateReplicas()...)
	}
	errs = append(errs, c.scaleStatus()...)
	if facet != "status" {
		errs = append(errs, objectmeta.Validate(ctx, nil, now, s, false)...)
	}
	if len(listtype.ValidateListSetsAndMaps(nil, s, before)) == 0 {
		errs = append(errs, listtype.ValidateListSetsAndMaps(nil, s, now)...)
	}
	return append(errs, c.celErrors(errs, func() field.ErrorList {
		broken, _ := r.cel.Validate(ctx, nil, s, now, before, celconfig.RuntimeCELCostBudget, cel.WithRatcheting(pair))
		return broken
	})...)
}

// validatedObject is a custom resource that is validated, with the validators of its version.
type validatedObject struct {
	*version
	rules   *rules
	content map[string]any
}

// celErrors returns the errors of the CEL rules, which evaluate computes. If an error in errs could
// make the rules fail, it returns an error that the rules were not checked.
func (c *validatedObject) celErrors(errs field.ErrorList, evaluate func() field.ErrorList) field.ErrorList {
	if c.rules.cel == nil {
		return nil
	}
	blocking := []field.ErrorType{field.ErrorTypeNotSupported, field.ErrorTypeRequired, field.ErrorTypeTooLong,
		field.ErrorTypeTooMany, field.ErrorTypeTypeInvalid}
	for _, e := range errs {
		if slices.Contains(blocking, e.Type) {
			return field.ErrorList{field.Invalid(nil, nil,
				"some validation rules were not checked because the object was invalid; correct the existing errors "+
					"to complete validation")}
		}
	}
	return evaluate()
}

// validateReplicas returns an error if the field to which the scale subresource writes the replicas
// does not contain a valid number of replicas.
func (c *validatedObject) validateReplicas() field.ErrorList {
	if c.scaleSubresource() == nil {
		return nil
	}
	return validateCount(c.content, c.scaleSubresource().SpecReplicasPath)
}

// scaleStatus returns errors for invalid values in the status fields that the scale subresource
// reads.
func (c *validatedObject) scaleStatus() field.ErrorList {
	s := c.scaleSubresource()
	if s == nil {
		return nil
	}
	errs := validateCount(c.content, s.StatusReplicasPath)
	if s.LabelSelectorPath != nil {
		selector, _, err := unstructured.NestedString(c.content, splitPath(*s.LabelSelectorPath)...)
		if err != nil {
			errs = append(errs, field.Invalid(field.NewPath(*s.LabelSelectorPath), selector, err.Error()))
		}
	}
	return errs
}

func validateCount(content map[string]any, path string) field.ErrorList {
	at := field.NewPath(path)
	switch n, _, err := unstructured.NestedInt64(content, splitPath(path)...); {
	case err != nil:
		return field.ErrorList{field.Invalid(at, n, err.Error())}
	case n < 0:
		return field.ErrorList{field.Invalid(at, n, "should be a non-negative integer")}
	case n > math.MaxInt32:
		return field.ErrorList{field.Invalid(at, n, fmt.Sprintf("should be less than or equal to %v", math.MaxInt32))}
	}
	return nil
}

// splitPath splits a simple path such as ".spec.replicas" into field names.
func splitPath(path string) []string { return strings.Split(strings.TrimPrefix(path, "."), ".") }

// warnOfFinalizers warns the client of new finalizers without a domain-qualified name, because
// other writers could use the same names.
func warnOfFinalizers(ctx context.Context, obj, old api.Object) {
	for _, f := range obj.GetFinalizers() {
		if old != nil && slices.Contains(old.GetFinalizers(), f) {
			continue
		}
		const at = "metadata.finalizers"
		for _, msg := range contentvalidation.IsQualifiedName(f) {
			api.Warn(ctx, fmt.Sprintf("%s: %q: %s", at, f, msg))
		}
		standard := []string{metav1.FinalizerOrphanDependents, metav1.FinalizerDeleteDependents,
			string(corev1.FinalizerKubernetes)}
		if strings.Contains(f, "/") || slices.Contains(standard, f) {
			continue
		}
		how := "prefer a domain-qualified finalizer name to avoid accidental conflicts with other finalizer writers"
		if strings.Contains(f, ".") {
			how = "prefer a domain-qualified finalizer name including a path (/) to avoid accidental conflicts with " +
				"other finalizer writers"
		}
		api.Warn(ctx, fmt.Sprintf("%s: %q: %s", at, f, how))
	}
}
