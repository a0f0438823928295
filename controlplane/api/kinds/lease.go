package kinds

import (
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
)

func leaseKind() *api.Kind {
	k := newKind(names{
		gv: coordinationv1.SchemeGroupVersion, kind: "Lease", conditional: true, putCreates: true, plural: "leases", singular: "lease",
	}, func(l *coordinationv1.LeaseList) *[]coordinationv1.Lease { return &l.Items })
	check(k, func(l *coordinationv1.Lease) field.ErrorList {
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
	k.Columns = columns(nameCol, col("Holder"), ageCol)
	k.Row = row(func(l *coordinationv1.Lease, now time.Time) []any {
		holder := ""
		if l.Spec.HolderIdentity != nil {
			holder = *l.Spec.HolderIdentity
		}
		return []any{l.Name, holder, age(l, now)}
	})
	return k
}
