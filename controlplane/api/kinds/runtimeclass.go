package kinds

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
)

func runtimeClassKind() *api.Kind {
	k := newKind(names{
		gv: nodev1.SchemeGroupVersion, kind: "RuntimeClass", conditional: true, putCreates: true, plural: "runtimeclasses", singular: "runtimeclass", global: true,
	}, func(l *nodev1.RuntimeClassList) *[]nodev1.RuntimeClass { return &l.Items })
	check(k, func(c *nodev1.RuntimeClass) field.ErrorList {
		at := field.NewPath("handler")
		if c.Handler == "" {
			return append(field.ErrorList{field.Required(at, "")}, validateRuntimeClass(c)...)
		}
		return append(invalid(at, c.Handler, validation.IsDNS1123Label(c.Handler)), validateRuntimeClass(c)...)
	})
	checkUpdate(k, func(obj, old *nodev1.RuntimeClass) field.ErrorList {
		return sameOr(obj.Handler, old.Handler, field.NewPath("handler"))
	})
	k.Columns = columns(nameCol, col("Handler"), ageCol)
	k.Row = row(func(c *nodev1.RuntimeClass, now time.Time) []any { return []any{c.Name, c.Handler, age(c, now)} })
	return k
}

// validateRuntimeClass judges what a class adds to its pods: resources, and where they run.
func validateRuntimeClass(c *nodev1.RuntimeClass) field.ErrorList {
	var errs field.ErrorList
	if c.Overhead != nil {
		errs = append(errs, validateResources(&corev1.ResourceRequirements{Limits: c.Overhead.PodFixed}, field.NewPath("overhead"))...)
	}
	if s := c.Scheduling; s != nil {
		at := field.NewPath("scheduling")
		errs = append(errs, metavalidation.ValidateLabels(s.NodeSelector, at.Child("nodeSelector"))...)
		errs = append(errs, validateTolerations(s.Tolerations, at.Child("tolerations"))...)
		type identity struct {
			key, value string
			operator   corev1.TolerationOperator
			effect     corev1.TaintEffect
		}
		seen := map[identity]bool{}
		for i, t := range s.Tolerations {
			id := identity{t.Key, t.Value, t.Operator, t.Effect}
			if seen[id] {
				errs = append(errs, field.Duplicate(at.Child("tolerations").Index(i), t))
			}
			seen[id] = true
		}
	}
	return errs
}
