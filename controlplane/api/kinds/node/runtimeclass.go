// Package node describes the kinds of the API group node.k8s.io.
package node

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
	"keelson.dev/keelson/controlplane/api/kinds/core/podspec"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// RuntimeClassKind returns the definition of the kind RuntimeClass.
func RuntimeClassKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: nodev1.SchemeGroupVersion, Kind: "RuntimeClass", Conditional: true, CreateOnUpdate: true,
		Plural: "runtimeclasses", Singular: "runtimeclass", ClusterScoped: true,
	}, func(l *nodev1.RuntimeClassList) *[]nodev1.RuntimeClass { return &l.Items })
	builder.AddValidation(k, func(c *nodev1.RuntimeClass) field.ErrorList {
		fldPath := field.NewPath("handler")
		if c.Handler == "" {
			return append(field.ErrorList{field.Required(fldPath, "")}, validateRuntimeClass(c)...)
		}
		return append(fieldrules.InvalidErrors(fldPath, c.Handler, validation.IsDNS1123Label(c.Handler)),
			validateRuntimeClass(c)...)
	})
	builder.AddUpdateValidation(k, func(obj, old *nodev1.RuntimeClass) field.ErrorList {
		return fieldrules.ValidateUnchanged(obj.Handler, old.Handler, field.NewPath("handler"))
	})
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.StringColumn("Handler"), builder.AgeColumn)
	k.Lists.Row = builder.Row(func(c *nodev1.RuntimeClass, now time.Time) []any {
		return []any{c.Name, c.Handler, builder.Age(c, now)}
	})
	return k
}

// validateRuntimeClass validates the resources and the scheduling constraints that a class adds to
// its pods.
func validateRuntimeClass(c *nodev1.RuntimeClass) field.ErrorList {
	var errs field.ErrorList
	if c.Overhead != nil {
		errs = append(errs, podspec.ValidateResources(&corev1.ResourceRequirements{Limits: c.Overhead.PodFixed},
			field.NewPath("overhead"))...)
	}
	if s := c.Scheduling; s != nil {
		fldPath := field.NewPath("scheduling")
		errs = append(errs, metavalidation.ValidateLabels(s.NodeSelector, fldPath.Child("nodeSelector"))...)
		errs = append(errs, podspec.ValidateTolerations(s.Tolerations, fldPath.Child("tolerations"))...)
		type identity struct {
			key, value string
			operator   corev1.TolerationOperator
			effect     corev1.TaintEffect
		}
		seen := map[identity]bool{}
		for i, t := range s.Tolerations {
			id := identity{t.Key, t.Value, t.Operator, t.Effect}
			if seen[id] {
				errs = append(errs, field.Duplicate(fldPath.Child("tolerations").Index(i), t))
			}
			seen[id] = true
		}
	}
	return errs
}
