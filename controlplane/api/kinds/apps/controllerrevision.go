package apps

import (
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// ControllerRevisionKind returns the definition of the kind ControllerRevision.
func ControllerRevisionKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: appsv1.SchemeGroupVersion, Kind: "ControllerRevision", Plural: "controllerrevisions",
		Singular: "controllerrevision",
	}, func(l *appsv1.ControllerRevisionList) *[]appsv1.ControllerRevision { return &l.Items })
	builder.AddValidation(k, func(r *appsv1.ControllerRevision) field.ErrorList {
		var errs field.ErrorList
		if r.Data.Raw == nil && r.Data.Object == nil {
			errs = append(errs, field.Required(field.NewPath("data"), "data is mandatory"))
		}
		return append(errs, fieldrules.ValidateNonNegative(r.Revision, field.NewPath("revision"))...)
	})
	builder.AddUpdateValidation(k, func(obj, old *appsv1.ControllerRevision) field.ErrorList {
		return fieldrules.ValidateUnchanged(obj.Data, old.Data, field.NewPath("data"))
	})
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.StringColumn("Controller"),
		builder.StringColumn("Revision"), builder.AgeColumn)
	k.Lists.Row = builder.Row(func(r *appsv1.ControllerRevision, now time.Time) []any {
		controller := builder.None
		if ref := metav1.GetControllerOf(r); ref != nil {
			gv, _ := schema.ParseGroupVersion(ref.APIVersion)
			controller = strings.ToLower(gv.WithKind(ref.Kind).GroupKind().String()) + "/" + ref.Name
		}
		return []any{r.Name, controller, r.Revision, builder.Age(r, now)}
	})
	return k
}
