package kinds

import (
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
)

const (
	// MaxUserPriority is the highest value of a priority class that users make.
	MaxUserPriority = int32(1000000000)
	systemPrefix    = "system-"
)

// SystemPriorities are the classes that every cluster has.
var SystemPriorities = map[string]int32{
	"system-cluster-critical": 2 * MaxUserPriority,
	"system-node-critical":    2*MaxUserPriority + 1000,
}

func priorityClassKind() *api.Kind {
	k := newKind(names{
		gv: schedulingv1.SchemeGroupVersion, kind: "PriorityClass", plural: "priorityclasses", singular: "priorityclass",
		short: []string{"pc"}, global: true,
	}, func(l *schedulingv1.PriorityClassList) *[]schedulingv1.PriorityClass { return &l.Items })
	k.Default = defaults(func(c *schedulingv1.PriorityClass) {
		setDefaultPtr(&c.PreemptionPolicy, corev1.PreemptLowerPriority)
	})
	check(k, func(c *schedulingv1.PriorityClass) field.ErrorList {
		var errs field.ErrorList
		if strings.HasPrefix(c.Name, systemPrefix) {
			if why := notSystemClass(c); why != "" {
				errs = append(errs, field.Forbidden(field.NewPath("metadata", "name"),
					"priority class names with '"+systemPrefix+"' prefix are reserved for system use only. error: "+why))
			}
		} else if c.Value > MaxUserPriority {
			errs = append(errs, field.Forbidden(field.NewPath("value"),
				fmt.Sprintf("maximum allowed value of a user defined priority is %v", MaxUserPriority)))
		}
		return append(errs, oneOf(val(c.PreemptionPolicy), field.NewPath("preemptionPolicy"),
			corev1.PreemptLowerPriority, corev1.PreemptNever)...)
	})
	checkUpdate(k, func(obj, old *schedulingv1.PriorityClass) field.ErrorList {
		var errs field.ErrorList
		if obj.Value != old.Value {
			errs = append(errs, field.Forbidden(field.NewPath("value"), "may not be changed in an update."))
		}
		return append(errs, sameOr(obj.PreemptionPolicy, old.PreemptionPolicy, field.NewPath("preemptionPolicy"))...)
	})
	k.PrepareCreate = defaults(func(c *schedulingv1.PriorityClass) { c.Generation = 1 })
	k.Uncounted = true
	k.Columns = columns(nameCol, numCol("Value"), boolCol("Global-Default"), ageCol, col("PreemptionPolicy"))
	k.Row = row(func(c *schedulingv1.PriorityClass, now time.Time) []any {
		return []any{c.Name, int64(c.Value), c.GlobalDefault, age(c, now), string(val(c.PreemptionPolicy))}
	})
	return k
}

// notSystemClass says in what a class differs from the system's of its name; "" in nothing.
func notSystemClass(c *schedulingv1.PriorityClass) string {
	want, ok := SystemPriorities[c.Name]
	switch {
	case !ok:
		return c.Name + " is not a known system priority class"
	case c.Value != want:
		return fmt.Sprintf("value of %v PriorityClass must be %v", c.Name, want)
	case c.GlobalDefault:
		return fmt.Sprintf("globalDefault of %v PriorityClass must be false", c.Name)
	}
	return ""
}

func podDisruptionBudgetKind() *api.Kind {
	k := newKind(names{
		gv: policyv1.SchemeGroupVersion, kind: "PodDisruptionBudget", conditional: true, plural: "poddisruptionbudgets",
		singular: "poddisruptionbudget", short: []string{"pdb"},
	}, func(l *policyv1.PodDisruptionBudgetList) *[]policyv1.PodDisruptionBudget { return &l.Items })
	hasStatus(k, func(o *policyv1.PodDisruptionBudget) *policyv1.PodDisruptionBudgetStatus { return &o.Status }, halves[*policyv1.PodDisruptionBudget]{
		spec: func(b *policyv1.PodDisruptionBudget) any { return b.Spec },
		keep: func(obj, old *policyv1.PodDisruptionBudget) { obj.Spec = *old.Spec.DeepCopy() },
		status: func(obj, old *policyv1.PodDisruptionBudget) {
			obj.Status = policyv1.PodDisruptionBudgetStatus{}
			if old != nil {
				obj.Status = *old.Status.DeepCopy()
			}
		},
	})
	check(k, func(b *policyv1.PodDisruptionBudget) field.ErrorList {
		spec := field.NewPath("spec")
		var errs field.ErrorList
		if b.Spec.MinAvailable != nil && b.Spec.MaxUnavailable != nil {
			errs = append(errs, field.Invalid(spec, b.Spec, "minAvailable and maxUnavailable cannot be both set"))
		}
		errs = append(errs, validateBound(b.Spec.MinAvailable, spec.Child("minAvailable"))...)
		errs = append(errs, validateBound(b.Spec.MaxUnavailable, spec.Child("maxUnavailable"))...)
		if b.Spec.Selector != nil {
			errs = append(errs, metavalidation.ValidateLabelSelector(b.Spec.Selector, metavalidation.LabelSelectorValidationOptions{}, spec.Child("selector"))...)
		}
		if p := b.Spec.UnhealthyPodEvictionPolicy; p != nil {
			errs = append(errs, listed(*p, spec.Child("unhealthyPodEvictionPolicy"), policyv1.AlwaysAllow, policyv1.IfHealthyBudget)...)
		}
		return errs
	})
	checkStatus(k, func(obj, _ *policyv1.PodDisruptionBudget) field.ErrorList {
		at, s := field.NewPath("status"), &obj.Status
		errs := metavalidation.ValidateConditions(s.Conditions, at.Child("conditions"))
		errs = append(errs, nonNegative(s.DisruptionsAllowed, at.Child("disruptionsAllowed"))...)
		errs = append(errs, nonNegative(s.CurrentHealthy, at.Child("currentHealthy"))...)
		errs = append(errs, nonNegative(s.DesiredHealthy, at.Child("desiredHealthy"))...)
		return append(errs, nonNegative(s.ExpectedPods, at.Child("expectedPods"))...)
	})
	k.Columns = columns(nameCol, col("Min Available"), col("Max Unavailable"), numCol("Allowed Disruptions"), ageCol)
	k.Row = row(func(b *policyv1.PodDisruptionBudget, now time.Time) []any {
		show := func(v *intstr.IntOrString) string {
			if v == nil {
				return "N/A"
			}
			return v.String()
		}
		return []any{b.Name, show(b.Spec.MinAvailable), show(b.Spec.MaxUnavailable), int64(b.Status.DisruptionsAllowed), age(b, now)}
	})
	return k
}

// validateBound judges a number or a share of a budget's pods; nil is none.
func validateBound(v *intstr.IntOrString, at *field.Path) field.ErrorList {
	if v == nil {
		return nil
	}
	errs := validateIntOrPercent(*v, at)
	if n, ok := percentOf(*v); ok && n > 100 {
		errs = append(errs, field.Invalid(at, v.String(), "must not be greater than 100%"))
	}
	return errs
}
