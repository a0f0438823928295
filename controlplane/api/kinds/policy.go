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
	k := newKind[schedulingv1.PriorityClass, schedulingv1.PriorityClassList](names{
		gv: schedulingv1.SchemeGroupVersion, kind: "PriorityClass", plural: "priorityclasses", singular: "priorityclass",
		short: []string{"pc"}, global: true,
	})
	k.Default = defaults(func(c *schedulingv1.PriorityClass) {
		setDefaultPtr(&c.PreemptionPolicy, corev1.PreemptLowerPriority)
	})
	check(k, func(c *schedulingv1.PriorityClass) field.ErrorList {
		var errs field.ErrorList
		if strings.HasPrefix(c.Name, systemPrefix) {
			if want, ok := SystemPriorities[c.Name]; !ok || want != c.Value {
				errs = append(errs, field.Forbidden(field.NewPath("metadata", "name"),
					"priority class names with '"+systemPrefix+"' prefix are reserved for system use only"))
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
	k.Columns = columns(nameCol, numCol("Value"), col("Global-Default"), ageCol, col("PreemptionPolicy"))
	k.Row = row(func(c *schedulingv1.PriorityClass, now time.Time) []any {
		return []any{c.Name, int64(c.Value), c.GlobalDefault, age(c, now), string(val(c.PreemptionPolicy))}
	})
	return k
}

func podDisruptionBudgetKind() *api.Kind {
	k := newKind[policyv1.PodDisruptionBudget, policyv1.PodDisruptionBudgetList](names{
		gv: policyv1.SchemeGroupVersion, kind: "PodDisruptionBudget", plural: "poddisruptionbudgets",
		singular: "poddisruptionbudget", short: []string{"pdb"},
	})
	hasStatus(k, halves[*policyv1.PodDisruptionBudget]{
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
		if v := b.Spec.MinAvailable; v != nil {
			errs = append(errs, validateIntOrPercent(*v, spec.Child("minAvailable"))...)
		}
		if v := b.Spec.MaxUnavailable; v != nil {
			errs = append(errs, validateIntOrPercent(*v, spec.Child("maxUnavailable"))...)
		}
		if b.Spec.Selector != nil {
			errs = append(errs, metavalidation.ValidateLabelSelector(b.Spec.Selector, metavalidation.LabelSelectorValidationOptions{}, spec.Child("selector"))...)
		}
		return errs
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

// DesiredHealthy is how many of the pods that there should be a budget wants healthy.
func DesiredHealthy(b *policyv1.PodDisruptionBudget, expected int) (int, error) {
	switch {
	case b.Spec.MinAvailable != nil:
		return intstr.GetScaledValueFromIntOrPercent(b.Spec.MinAvailable, expected, true)
	case b.Spec.MaxUnavailable != nil:
		away, err := intstr.GetScaledValueFromIntOrPercent(b.Spec.MaxUnavailable, expected, true)
		return max(0, expected-away), err
	}
	return 0, nil
}
