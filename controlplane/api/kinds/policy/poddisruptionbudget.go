// Package policy describes the kinds of the API group policy, and computes the number of pods that
// a PodDisruptionBudget requires.
package policy

import (
	"time"

	policyv1 "k8s.io/api/policy/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// PodDisruptionBudgetKind returns the definition of the kind PodDisruptionBudget.
func PodDisruptionBudgetKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: policyv1.SchemeGroupVersion, Kind: "PodDisruptionBudget", Conditional: true,
		Plural:   "poddisruptionbudgets",
		Singular: "poddisruptionbudget", Short: []string{"pdb"},
	}, func(l *policyv1.PodDisruptionBudgetList) *[]policyv1.PodDisruptionBudget { return &l.Items })
	builder.SeparateStatus(k, func(o *policyv1.PodDisruptionBudget) *policyv1.PodDisruptionBudgetStatus {
		return &o.Status
	}, builder.Accessors[*policyv1.PodDisruptionBudget]{
		Spec:     func(b *policyv1.PodDisruptionBudget) any { return b.Spec },
		CopySpec: func(obj, old *policyv1.PodDisruptionBudget) { obj.Spec = *old.Spec.DeepCopy() },
		Status: func(obj, old *policyv1.PodDisruptionBudget) {
			obj.Status = policyv1.PodDisruptionBudgetStatus{}
			if old != nil {
				obj.Status = *old.Status.DeepCopy()
			}
		},
	})
	builder.AddValidation(k, func(b *policyv1.PodDisruptionBudget) field.ErrorList {
		spec := field.NewPath("spec")
		var errs field.ErrorList
		if b.Spec.MinAvailable != nil && b.Spec.MaxUnavailable != nil {
			errs = append(errs, field.Invalid(spec, b.Spec, "minAvailable and maxUnavailable cannot be both set"))
		}
		errs = append(errs, validateBound(b.Spec.MinAvailable, spec.Child("minAvailable"))...)
		errs = append(errs, validateBound(b.Spec.MaxUnavailable, spec.Child("maxUnavailable"))...)
		if b.Spec.Selector != nil {
			errs = append(errs, metavalidation.ValidateLabelSelector(b.Spec.Selector,
				metavalidation.LabelSelectorValidationOptions{}, spec.Child("selector"))...)
		}
		if p := b.Spec.UnhealthyPodEvictionPolicy; p != nil {
			errs = append(errs, fieldrules.ValidateSupported(*p, spec.Child("unhealthyPodEvictionPolicy"),
				policyv1.AlwaysAllow,
				policyv1.IfHealthyBudget)...)
		}
		return errs
	})
	builder.AddStatusValidation(k, func(obj, _ *policyv1.PodDisruptionBudget) field.ErrorList {
		fldPath, s := field.NewPath("status"), &obj.Status
		errs := metavalidation.ValidateConditions(s.Conditions, fldPath.Child("conditions"))
		errs = append(errs, fieldrules.ValidateNonNegative(s.DisruptionsAllowed,
			fldPath.Child("disruptionsAllowed"))...)
		errs = append(errs, fieldrules.ValidateNonNegative(s.CurrentHealthy, fldPath.Child("currentHealthy"))...)
		errs = append(errs, fieldrules.ValidateNonNegative(s.DesiredHealthy, fldPath.Child("desiredHealthy"))...)
		return append(errs, fieldrules.ValidateNonNegative(s.ExpectedPods, fldPath.Child("expectedPods"))...)
	})
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.StringColumn("Min Available"),
		builder.StringColumn("Max Unavailable"), builder.NumberColumn("Allowed Disruptions"), builder.AgeColumn)
	k.Lists.Row = builder.Row(func(b *policyv1.PodDisruptionBudget, now time.Time) []any {
		show := func(v *intstr.IntOrString) string {
			if v == nil {
				return "N/A"
			}
			return v.String()
		}
		return []any{b.Name, show(b.Spec.MinAvailable), show(b.Spec.MaxUnavailable), int64(b.Status.DisruptionsAllowed),
			builder.Age(b, now)}
	})
	return k
}

// validateBound validates minAvailable or maxUnavailable: a number or a percentage. nil is valid.
func validateBound(bound *intstr.IntOrString, fldPath *field.Path) field.ErrorList {
	if bound == nil {
		return nil
	}
	errs := fieldrules.ValidateIntOrPercent(*bound, fldPath)
	if n, ok := fieldrules.PercentOf(*bound); ok && n > 100 {
		errs = append(errs, field.Invalid(fldPath, bound.String(), "must not be greater than 100%"))
	}
	return errs
}
