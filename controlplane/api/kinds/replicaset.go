package kinds

import (
	"strconv"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
)

func replicaSetKind() *api.Kind {
	k := newKind(names{
		gv: appsv1.SchemeGroupVersion, kind: "ReplicaSet", plural: "replicasets", singular: "replicaset", short: []string{"rs"}, all: true,
	}, func(l *appsv1.ReplicaSetList) *[]appsv1.ReplicaSet { return &l.Items })
	k.ShowsTrace = true
	k.Default = defaults(func(r *appsv1.ReplicaSet) {
		setDefaultPtr(&r.Spec.Replicas, 1)
		DefaultPodTemplate(&r.Spec.Template)
	})
	hasStatus(k, func(o *appsv1.ReplicaSet) *appsv1.ReplicaSetStatus { return &o.Status }, halves[*appsv1.ReplicaSet]{
		spec: func(r *appsv1.ReplicaSet) any { return r.Spec },
		keep: func(obj, old *appsv1.ReplicaSet) { obj.Spec = *old.Spec.DeepCopy() },
		status: func(obj, old *appsv1.ReplicaSet) {
			obj.Status = appsv1.ReplicaSetStatus{}
			if old != nil {
				obj.Status = *old.Status.DeepCopy()
			}
		},
	})
	check(k, func(r *appsv1.ReplicaSet) field.ErrorList {
		at := field.NewPath("spec")
		errs := nonNegative(val(r.Spec.Replicas), at.Child("replicas"))
		errs = append(errs, nonNegative(r.Spec.MinReadySeconds, at.Child("minReadySeconds"))...)
		errs = append(errs, validateWorkload(r.Spec.Selector, &r.Spec.Template, at)...)
		return append(errs, switches(r, api.RebalanceAnnotation)...)
	})
	checkUpdate(k, func(obj, old *appsv1.ReplicaSet) field.ErrorList {
		return sameOr(obj.Spec.Selector, old.Spec.Selector, field.NewPath("spec", "selector"))
	})
	addScale(k, scaled{
		replicas: func(o api.Object) **int32 { return &o.(*appsv1.ReplicaSet).Spec.Replicas },
		current:  func(o api.Object) int32 { return o.(*appsv1.ReplicaSet).Status.Replicas },
		selector: func(o api.Object) *metav1.LabelSelector { return o.(*appsv1.ReplicaSet).Spec.Selector },
	})
	k.Columns = columns(nameCol, numCol("Desired"), numCol("Current"), numCol("Ready"), ageCol,
		wide("Containers"), wide("Images"), wide("Selector"))
	k.Row = row(func(r *appsv1.ReplicaSet, now time.Time) []any {
		containers, images := containersAndImages(&r.Spec.Template.Spec)
		return []any{r.Name, int64(val(r.Spec.Replicas)), int64(r.Status.Replicas), int64(r.Status.ReadyReplicas), age(r, now),
			containers, images, metav1.FormatLabelSelector(r.Spec.Selector)}
	})
	k.Fields = fieldsOf(func(r *appsv1.ReplicaSet) fields.Set {
		return fields.Set{"status.replicas": strconv.Itoa(int(r.Status.Replicas))}
	})
	return k
}
