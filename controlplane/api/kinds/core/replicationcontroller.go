package core

import (
	"maps"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
	"keelson.dev/keelson/controlplane/api/kinds/core/podspec"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// ReplicationControllerKind returns the definition of the kind ReplicationController.
func ReplicationControllerKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: corev1.SchemeGroupVersion, Kind: "ReplicationController", Plural: "replicationcontrollers",
		Singular: "replicationcontroller", Short: []string{"rc"}, InAllCategory: true, Rule: builder.DNSSubdomain,
	}, func(l *corev1.ReplicationControllerList) *[]corev1.ReplicationController { return &l.Items })
	k.Writes.Default = builder.Default(defaultReplicationController)
	// the default since before garbage collection existed
	k.Deletion.Propagation = metav1.DeletePropagationOrphan
	builder.SeparateSpecAndStatus(k, func(r *corev1.ReplicationController) *corev1.ReplicationControllerSpec {
		return &r.Spec
	},
		func(r *corev1.ReplicationController) *corev1.ReplicationControllerStatus { return &r.Status })
	builder.AddValidation(k, func(r *corev1.ReplicationController) field.ErrorList {
		return validateReplicationController(&r.Spec, field.NewPath("spec"))
	})
	validateMeta := k.Subresources["status"].ValidateUpdate
	k.Subresources["status"].ValidateUpdate = func(obj, old api.Object) field.ErrorList {
		return append(validateMeta(obj, old),
			validateReplicationControllerStatus(&obj.(*corev1.ReplicationController).Status,
				field.NewPath("status"))...)
	}
	builder.AddScale(k, builder.ScaleAccessors{
		Replicas: func(o api.Object) **int32 { return &o.(*corev1.ReplicationController).Spec.Replicas },
		Current:  func(o api.Object) int32 { return o.(*corev1.ReplicationController).Status.Replicas },
		Selector: func(o api.Object) *metav1.LabelSelector {
			return &metav1.LabelSelector{MatchLabels: o.(*corev1.ReplicationController).Spec.Selector}
		},
	})
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.NumberColumn("Desired"),
		builder.NumberColumn("Current"),
		builder.NumberColumn("Ready"), builder.AgeColumn,
		builder.WideColumn("Containers"), builder.WideColumn("Images"), builder.WideColumn("Selector"))
	k.Lists.Row = builder.Row(func(r *corev1.ReplicationController, now time.Time) []any {
		containers, images := "", ""
		if r.Spec.Template != nil {
			containers, images = podspec.ContainersAndImages(&r.Spec.Template.Spec)
		}
		return []any{r.Name, int64(ptr.Deref(r.Spec.Replicas, 0)), int64(r.Status.Replicas),
			int64(r.Status.ReadyReplicas), builder.Age(r, now),
			containers, images, labels.FormatLabels(r.Spec.Selector)}
	})
	k.Lists.Fields = builder.Fields(func(r *corev1.ReplicationController) fields.Set {
		return fields.Set{"status.replicas": strconv.Itoa(int(r.Status.Replicas))}
	})
	return k
}

// defaultReplicationController sets an empty selector and empty labels to the labels of the
// template. It also sets the template's defaults.
func defaultReplicationController(r *corev1.ReplicationController) {
	if t := r.Spec.Template; t != nil {
		if len(t.Labels) > 0 {
			if len(r.Spec.Selector) == 0 {
				r.Spec.Selector = maps.Clone(t.Labels)
			}
			if len(r.Labels) == 0 {
				r.Labels = maps.Clone(t.Labels)
			}
		}
		podspec.DefaultPodTemplate(t)
	}
	builder.SetDefaultPtr(&r.Spec.Replicas, 1)
}

func validateReplicationController(s *corev1.ReplicationControllerSpec, fldPath *field.Path) field.ErrorList {
	errs := fieldrules.ValidateNonNegative(s.MinReadySeconds, fldPath.Child("minReadySeconds"))
	if len(s.Selector) == 0 {
		errs = append(errs, field.Required(fldPath.Child("selector"), ""))
	}
	errs = append(errs, fieldrules.ValidateNonNegative(ptr.Deref(s.Replicas, 0), fldPath.Child("replicas"))...)
	fldPath = fldPath.Child("template")
	if s.Template == nil {
		return append(errs, field.Required(fldPath, ""))
	}
	if len(s.Selector) > 0 && !labels.SelectorFromSet(s.Selector).Matches(labels.Set(s.Template.Labels)) {
		errs = append(errs, field.Invalid(fldPath.Child("metadata", "labels"), s.Template.Labels,
			"`selector` does not match template `labels`"))
	}
	return append(errs, podspec.ValidateLastingTemplate("ReplicationController", s.Template, fldPath)...)
}

func validateReplicationControllerStatus(s *corev1.ReplicationControllerStatus, fldPath *field.Path) field.ErrorList {
	errs := fieldrules.ValidateNonNegative(s.Replicas, fldPath.Child("replicas"))
	errs = append(errs, fieldrules.ValidateNonNegative(s.ObservedGeneration, fldPath.Child("observedGeneration"))...)
	errs = append(errs, fieldrules.ValidateReplicaParts(s.Replicas, fldPath, map[string]int32{
		"fullyLabeledReplicas": s.FullyLabeledReplicas, "readyReplicas": s.ReadyReplicas,
		"availableReplicas": s.AvailableReplicas,
	})...)
	if s.AvailableReplicas > s.ReadyReplicas {
		errs = append(errs, field.Invalid(fldPath.Child("availableReplicas"), s.AvailableReplicas,
			"cannot be greater than readyReplicas"))
	}
	return errs
}

// PodTemplateKind returns the definition of the kind PodTemplate.
func PodTemplateKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: corev1.SchemeGroupVersion, Kind: "PodTemplate", Plural: "podtemplates", Singular: "podtemplate",
	}, func(l *corev1.PodTemplateList) *[]corev1.PodTemplate { return &l.Items })
	k.Deletion.ReturnsDeleted = true
	k.Writes.Default = builder.Default(func(t *corev1.PodTemplate) { podspec.DefaultPodTemplate(&t.Template) })
	k.Writes.PrepareCreate = func(o api.Object) { o.SetGeneration(1) }
	k.Writes.PrepareUpdate = func(obj, old api.Object) {
		k.Writes.Default(obj)
		obj.SetGeneration(old.GetGeneration())
		if !fieldrules.SemanticEqual(obj.(*corev1.PodTemplate).Template, old.(*corev1.PodTemplate).Template) {
			obj.SetGeneration(old.GetGeneration() + 1)
		}
	}
	builder.AddValidation(k, func(t *corev1.PodTemplate) field.ErrorList {
		return podspec.ValidatePodTemplate(&t.Template, field.NewPath("template"))
	})
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.StringColumn("Containers"),
		builder.StringColumn("Images"),
		builder.StringColumn("Pod Labels"))
	k.Lists.Row = builder.Row(func(t *corev1.PodTemplate, _ time.Time) []any {
		containers, images := podspec.ContainersAndImages(&t.Template.Spec)
		return []any{t.Name, containers, images, labels.FormatLabels(t.Template.Labels)}
	})
	return k
}
