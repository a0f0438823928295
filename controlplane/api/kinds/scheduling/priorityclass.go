package scheduling

import (
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

const (
	// MaxUserPriority is the highest value of a user-defined priority class.
	MaxUserPriority = int32(1000000000)
	systemPrefix    = "system-"
)

// SystemPriorities maps the names of the priority classes that every cluster has to their values.
var SystemPriorities = map[string]int32{
	"system-cluster-critical": 2 * MaxUserPriority,
	"system-node-critical":    2*MaxUserPriority + 1000,
}

// PriorityClassKind returns the definition of the kind PriorityClass.
func PriorityClassKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: schedulingv1.SchemeGroupVersion, Kind: "PriorityClass", Plural: "priorityclasses",
		Singular: "priorityclass",
		Short:    []string{"pc"}, ClusterScoped: true,
	}, func(l *schedulingv1.PriorityClassList) *[]schedulingv1.PriorityClass { return &l.Items })
	k.Writes.Default = builder.Default(func(c *schedulingv1.PriorityClass) {
		builder.SetDefaultPtr(&c.PreemptionPolicy, corev1.PreemptLowerPriority)
	})
	builder.AddValidation(k, func(c *schedulingv1.PriorityClass) field.ErrorList {
		var errs field.ErrorList
		if strings.HasPrefix(c.Name, systemPrefix) {
			if why := whyNoSystemClass(c); why != "" {
				errs = append(errs, field.Forbidden(field.NewPath("metadata", "name"),
					"priority class names with '"+systemPrefix+"' prefix are reserved for system use only. error: "+
						why))
			}
		} else if c.Value > MaxUserPriority {
			errs = append(errs, field.Forbidden(field.NewPath("value"),
				fmt.Sprintf("maximum allowed value of a user defined priority is %v", MaxUserPriority)))
		}
		return append(errs, fieldrules.ValidateOneOf(ptr.Deref(c.PreemptionPolicy, ""),
			field.NewPath("preemptionPolicy"),
			corev1.PreemptLowerPriority, corev1.PreemptNever)...)
	})
	builder.AddUpdateValidation(k, func(obj, old *schedulingv1.PriorityClass) field.ErrorList {
		var errs field.ErrorList
		if obj.Value != old.Value {
			errs = append(errs, field.Forbidden(field.NewPath("value"), "may not be changed in an update."))
		}
		return append(errs, fieldrules.ValidateUnchanged(obj.PreemptionPolicy, old.PreemptionPolicy,
			field.NewPath("preemptionPolicy"))...)
	})
	k.Writes.PrepareCreate = builder.Default(func(c *schedulingv1.PriorityClass) { c.Generation = 1 })
	k.Writes.Uncounted = true
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.NumberColumn("Value"),
		builder.BoolColumn("Global-Default"),
		builder.AgeColumn, builder.StringColumn("PreemptionPolicy"))
	k.Lists.Row = builder.Row(func(c *schedulingv1.PriorityClass, now time.Time) []any {
		return []any{c.Name, int64(c.Value), c.GlobalDefault, builder.Age(c, now),
			string(ptr.Deref(c.PreemptionPolicy, ""))}
	})
	return k
}

// whyNoSystemClass returns the first difference between a class and the system class with the same
// name. It returns "" if they are equal.
func whyNoSystemClass(class *schedulingv1.PriorityClass) string {
	want, ok := SystemPriorities[class.Name]
	switch {
	case !ok:
		return class.Name + " is not a known system priority class"
	case class.Value != want:
		return fmt.Sprintf("value of %v PriorityClass must be %v", class.Name, want)
	case class.GlobalDefault:
		return fmt.Sprintf("globalDefault of %v PriorityClass must be false", class.Name)
	}
	return ""
}
