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

// judge validates the objects of one version of a custom resource; check is api.Kind.Check. whole
// and changed validate the metadata of a new and of an updated object.
type judge struct {
	of      *version
	whole   func(api.Object) field.ErrorList
	changed func(obj, old api.Object) field.ErrorList
}

func (j *judge) check(ctx context.Context, facet string, obj, old api.Object) field.ErrorList {
	refuse := func(err error) field.ErrorList { return field.ErrorList{field.InternalError(nil, err)} }
	s, err := j.of.structural()
	if err != nil {
		return refuse(err)
	}
	r, err := j.of.rules()
	if err != nil {
		return refuse(err)
	}
	now, err := obj.(*custom.Object).Map()
	if err != nil {
		return refuse(err)
	}
	c := checked{version: j.of, rules: r, now: now}
	if facet != "status" {
		warnOfFinalizers(ctx, obj, old)
	}
	if old == nil {
		errs := append(j.whole(obj), validation.ValidateCustomResource(nil, now, r.whole)...)
		errs = append(errs, c.replicas()...)
		errs = append(errs, c.scaleStatus()...)
		errs = append(errs, objectmeta.Validate(ctx, nil, now, s, false)...)
		errs = append(errs, listtype.ValidateListSetsAndMaps(nil, s, now)...)
		return append(errs, c.ruled(errs, func() field.ErrorList {
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
			errs = append(errs, validation.ValidateCustomResourceUpdate(field.NewPath("status"), status, before["status"], r.status,
				validation.WithRatcheting(pair.Key("status")))...)
		}
	} else {
		errs = append(errs, validation.ValidateCustomResourceUpdate(nil, now, before, r.whole, validation.WithRatcheting(pair))...)
		errs = append(errs, c.replicas()...)
	}
	errs = append(errs, c.scaleStatus()...)
	if facet != "status" {
		errs = append(errs, objectmeta.Validate(ctx, nil, now, s, false)...)
	}
	if len(listtype.ValidateListSetsAndMaps(nil, s, before)) == 0 {
		errs = append(errs, listtype.ValidateListSetsAndMaps(nil, s, now)...)
	}
	return append(errs, c.ruled(errs, func() field.ErrorList {
		broken, _ := r.cel.Validate(ctx, nil, s, now, before, celconfig.RuntimeCELCostBudget, cel.WithRatcheting(pair))
		return broken
	})...)
}

// checked is an object under validation.
type checked struct {
	*version
	rules *rules
	now   map[string]any
}

// ruled returns the errors of the CEL rules, unless an error in found could be the cause of their
// failure.
func (c *checked) ruled(found field.ErrorList, ask func() field.ErrorList) field.ErrorList {
	if c.rules.cel == nil {
		return nil
	}
	blocking := []field.ErrorType{field.ErrorTypeNotSupported, field.ErrorTypeRequired, field.ErrorTypeTooLong,
		field.ErrorTypeTooMany, field.ErrorTypeTypeInvalid}
	for _, e := range found {
		if slices.Contains(blocking, e.Type) {
			return field.ErrorList{field.Invalid(nil, nil,
				"some validation rules were not checked because the object was invalid; correct the existing errors to complete validation")}
		}
	}
	return ask()
}

// replicas returns errors for the replica count that the scale subresource writes.
func (c *checked) replicas() field.ErrorList {
	if c.scale() == nil {
		return nil
	}
	return count(c.now, c.scale().SpecReplicasPath)
}

// scaleStatus returns errors for the status fields that the scale subresource reads.
func (c *checked) scaleStatus() field.ErrorList {
	s := c.scale()
	if s == nil {
		return nil
	}
	errs := count(c.now, s.StatusReplicasPath)
	if s.LabelSelectorPath != nil {
		selector, _, err := unstructured.NestedString(c.now, parts(*s.LabelSelectorPath)...)
		if err != nil {
			errs = append(errs, field.Invalid(field.NewPath(*s.LabelSelectorPath), selector, err.Error()))
		}
	}
	return errs
}

func count(in map[string]any, path string) field.ErrorList {
	at := field.NewPath(path)
	switch n, _, err := unstructured.NestedInt64(in, parts(path)...); {
	case err != nil:
		return field.ErrorList{field.Invalid(at, n, err.Error())}
	case n < 0:
		return field.ErrorList{field.Invalid(at, n, "should be a non-negative integer")}
	case n > math.MaxInt32:
		return field.ErrorList{field.Invalid(at, n, fmt.Sprintf("should be less than or equal to %v", math.MaxInt32))}
	}
	return nil
}

// parts splits a simple path such as ".spec.replicas" into field names.
func parts(path string) []string { return strings.Split(strings.TrimPrefix(path, "."), ".") }

// warnOfFinalizers warns the client of new finalizers without a domain-qualified name, which other
// writers could use too.
func warnOfFinalizers(ctx context.Context, obj, old api.Object) {
	for _, f := range obj.GetFinalizers() {
		if old != nil && slices.Contains(old.GetFinalizers(), f) {
			continue
		}
		const at = "metadata.finalizers"
		for _, msg := range contentvalidation.IsQualifiedName(f) {
			api.Warn(ctx, fmt.Sprintf("%s: %q: %s", at, f, msg))
		}
		standard := []string{metav1.FinalizerOrphanDependents, metav1.FinalizerDeleteDependents, string(corev1.FinalizerKubernetes)}
		if strings.Contains(f, "/") || slices.Contains(standard, f) {
			continue
		}
		how := "prefer a domain-qualified finalizer name to avoid accidental conflicts with other finalizer writers"
		if strings.Contains(f, ".") {
			how = "prefer a domain-qualified finalizer name including a path (/) to avoid accidental conflicts with other finalizer writers"
		}
		api.Warn(ctx, fmt.Sprintf("%s: %q: %s", at, f, how))
	}
}
