package kinds

import (
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
)

func controllerRevisionKind() *api.Kind {
	k := newKind(names{
		gv: appsv1.SchemeGroupVersion, kind: "ControllerRevision", plural: "controllerrevisions", singular: "controllerrevision",
	}, func(l *appsv1.ControllerRevisionList) *[]appsv1.ControllerRevision { return &l.Items })
	check(k, func(r *appsv1.ControllerRevision) field.ErrorList {
		var errs field.ErrorList
		if r.Data.Raw == nil && r.Data.Object == nil {
			errs = append(errs, field.Required(field.NewPath("data"), "data is mandatory"))
		}
		return append(errs, nonNegative(r.Revision, field.NewPath("revision"))...)
	})
	checkUpdate(k, func(obj, old *appsv1.ControllerRevision) field.ErrorList {
		return sameOr(obj.Data, old.Data, field.NewPath("data"))
	})
	k.Columns = columns(nameCol, col("Controller"), col("Revision"), ageCol)
	k.Row = row(func(r *appsv1.ControllerRevision, now time.Time) []any {
		controller := none
		if ref := metav1.GetControllerOf(r); ref != nil {
			gv, _ := schema.ParseGroupVersion(ref.APIVersion)
			controller = strings.ToLower(gv.WithKind(ref.Kind).GroupKind().String()) + "/" + ref.Name
		}
		return []any{r.Name, controller, r.Revision, age(r, now)}
	})
	return k
}
