// Package coordination describes the kinds of the API group coordination.k8s.io.
package coordination

import (
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
)

// LeaseKind returns the definition of the kind Lease.
func LeaseKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: coordinationv1.SchemeGroupVersion, Kind: "Lease", Conditional: true, CreateOnUpdate: true,
		Plural: "leases", Singular: "lease",
	}, func(l *coordinationv1.LeaseList) *[]coordinationv1.Lease { return &l.Items })
	builder.AddValidation(k, func(l *coordinationv1.Lease) field.ErrorList {
		var errs field.ErrorList
		spec := field.NewPath("spec")
		if d := l.Spec.LeaseDurationSeconds; d != nil && *d <= 0 {
			errs = append(errs, field.Invalid(spec.Child("leaseDurationSeconds"), *d, "must be greater than 0"))
		}
		if n := l.Spec.LeaseTransitions; n != nil && *n < 0 {
			errs = append(errs, field.Invalid(spec.Child("leaseTransitions"), *n, "must be greater than or equal to 0"))
		}
		return errs
	})
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.StringColumn("Holder"), builder.AgeColumn)
	k.Lists.Row = builder.Row(func(l *coordinationv1.Lease, now time.Time) []any {
		holder := ptr.Deref(l.Spec.HolderIdentity, "")
		return []any{l.Name, holder, builder.Age(l, now)}
	})
	return k
}
