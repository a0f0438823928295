package apps

import (
	"strconv"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
	"keelson.dev/keelson/controlplane/api/kinds/core/podspec"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// ReplicaSetKind returns the definition of the kind ReplicaSet.
func ReplicaSetKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: appsv1.SchemeGroupVersion, Kind: "ReplicaSet", Plural: "replicasets", Singular: "replicaset",
		Short: []string{"rs"}, InAllCategory: true,
	}, func(l *appsv1.ReplicaSetList) *[]appsv1.ReplicaSet { return &l.Items })
	k.Serving.ShowsTrace = true
	k.Writes.Default = builder.Default(func(r *appsv1.ReplicaSet) {
		builder.SetDefaultPtr(&r.Spec.Replicas, 1)
		podspec.DefaultPodTemplate(&r.Spec.Template)
	})
	builder.SeparateStatus(k, func(o *appsv1.ReplicaSet) *appsv1.ReplicaSetStatus { return &o.Status },
		builder.Accessors[*appsv1.ReplicaSet]{
			Spec:     func(r *appsv1.ReplicaSet) any { return r.Spec },
			CopySpec: func(obj, old *appsv1.ReplicaSet) { obj.Spec = *old.Spec.DeepCopy() },
			Status: func(obj, old *appsv1.ReplicaSet) {
				obj.Status = appsv1.ReplicaSetStatus{}
				if old != nil {
					obj.Status = *old.Status.DeepCopy()
				}
			},
		})
	builder.AddValidation(k, func(r *appsv1.ReplicaSet) field.ErrorList {
		fldPath := field.NewPath("spec")
		errs := fieldrules.ValidateNonNegative(ptr.Deref(r.Spec.Replicas, 0), fldPath.Child("replicas"))
		errs = append(errs, fieldrules.ValidateNonNegative(r.Spec.MinReadySeconds, fldPath.Child("minReadySeconds"))...)
		errs = append(errs, validateWorkload(r.Spec.Selector, &r.Spec.Template, fldPath)...)
		return append(errs, validateBoolAnnotations(r, api.RebalanceAnnotation)...)
	})
	builder.AddUpdateValidation(k, func(obj, old *appsv1.ReplicaSet) field.ErrorList {
		return fieldrules.ValidateUnchanged(obj.Spec.Selector, old.Spec.Selector, field.NewPath("spec", "selector"))
	})
	builder.AddScale(k, builder.ScaleAccessors{
		Replicas: func(o api.Object) **int32 { return &o.(*appsv1.ReplicaSet).Spec.Replicas },
		Current:  func(o api.Object) int32 { return o.(*appsv1.ReplicaSet).Status.Replicas },
		Selector: func(o api.Object) *metav1.LabelSelector { return o.(*appsv1.ReplicaSet).Spec.Selector },
	})
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.NumberColumn("Desired"),
		builder.NumberColumn("Current"),
		builder.NumberColumn("Ready"), builder.AgeColumn,
		builder.WideColumn("Containers"), builder.WideColumn("Images"), builder.WideColumn("Selector"))
	k.Lists.Row = builder.Row(func(r *appsv1.ReplicaSet, now time.Time) []any {
		containers, images := podspec.ContainersAndImages(&r.Spec.Template.Spec)
		return []any{r.Name, int64(ptr.Deref(r.Spec.Replicas, 0)), int64(r.Status.Replicas),
			int64(r.Status.ReadyReplicas), builder.Age(r, now),
			containers, images, metav1.FormatLabelSelector(r.Spec.Selector)}
	})
	k.Lists.Fields = builder.Fields(func(r *appsv1.ReplicaSet) fields.Set {
		return fields.Set{"status.replicas": strconv.Itoa(int(r.Status.Replicas))}
	})
	return k
}
