package kinds

import (
	"maps"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
)

func replicationControllerKind() *api.Kind {
	k := newKind(names{
		gv: corev1.SchemeGroupVersion, kind: "ReplicationController", plural: "replicationcontrollers",
		singular: "replicationcontroller", short: []string{"rc"}, all: true, rule: longName,
	}, func(l *corev1.ReplicationControllerList) *[]corev1.ReplicationController { return &l.Items })
	k.Default = defaults(defaultReplicationController)
	k.Propagation = metav1.DeletePropagationOrphan // as it was before there was a garbage collector
	specAndStatus(k, func(r *corev1.ReplicationController) *corev1.ReplicationControllerSpec { return &r.Spec },
		func(r *corev1.ReplicationController) *corev1.ReplicationControllerStatus { return &r.Status })
	check(k, func(r *corev1.ReplicationController) field.ErrorList {
		return validateReplicationController(&r.Spec, field.NewPath("spec"))
	})
	validateMeta := k.Subresources["status"].ValidateUpdate
	k.Subresources["status"].ValidateUpdate = func(obj, old api.Object) field.ErrorList {
		return append(validateMeta(obj, old), validateReplicationControllerStatus(&obj.(*corev1.ReplicationController).Status, field.NewPath("status"))...)
	}
	addScale(k, scaled{
		replicas: func(o api.Object) **int32 { return &o.(*corev1.ReplicationController).Spec.Replicas },
		current:  func(o api.Object) int32 { return o.(*corev1.ReplicationController).Status.Replicas },
		selector: func(o api.Object) *metav1.LabelSelector {
			return &metav1.LabelSelector{MatchLabels: o.(*corev1.ReplicationController).Spec.Selector}
		},
	})
	k.Columns = columns(nameCol, numCol("Desired"), numCol("Current"), numCol("Ready"), ageCol,
		wide("Containers"), wide("Images"), wide("Selector"))
	k.Row = row(func(r *corev1.ReplicationController, now time.Time) []any {
		containers, images := "", ""
		if r.Spec.Template != nil {
			containers, images = containersAndImages(&r.Spec.Template.Spec)
		}
		return []any{r.Name, int64(val(r.Spec.Replicas)), int64(r.Status.Replicas), int64(r.Status.ReadyReplicas), age(r, now),
			containers, images, labels.FormatLabels(r.Spec.Selector)}
	})
	k.Fields = fieldsOf(func(r *corev1.ReplicationController) fields.Set {
		return fields.Set{"status.replicas": strconv.Itoa(int(r.Status.Replicas))}
	})
	return k
}

// defaultReplicationController selects and labels by the labels of the template, where nothing else is said.
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
		DefaultPodTemplate(t)
	}
	setDefaultPtr(&r.Spec.Replicas, 1)
}

func validateReplicationController(s *corev1.ReplicationControllerSpec, at *field.Path) field.ErrorList {
	errs := nonNegative(s.MinReadySeconds, at.Child("minReadySeconds"))
	if len(s.Selector) == 0 {
		errs = append(errs, field.Required(at.Child("selector"), ""))
	}
	errs = append(errs, nonNegative(val(s.Replicas), at.Child("replicas"))...)
	at = at.Child("template")
	if s.Template == nil {
		return append(errs, field.Required(at, ""))
	}
	if len(s.Selector) > 0 && !labels.SelectorFromSet(s.Selector).Matches(labels.Set(s.Template.Labels)) {
		errs = append(errs, field.Invalid(at.Child("metadata", "labels"), s.Template.Labels, "`selector` does not match template `labels`"))
	}
	return append(errs, validateLastingTemplate("ReplicationController", s.Template, at)...)
}

func validateReplicationControllerStatus(s *corev1.ReplicationControllerStatus, at *field.Path) field.ErrorList {
	errs := nonNegative(s.Replicas, at.Child("replicas"))
	errs = append(errs, nonNegative(s.ObservedGeneration, at.Child("observedGeneration"))...)
	errs = append(errs, parts(s.Replicas, at, map[string]int32{
		"fullyLabeledReplicas": s.FullyLabeledReplicas, "readyReplicas": s.ReadyReplicas, "availableReplicas": s.AvailableReplicas,
	})...)
	if s.AvailableReplicas > s.ReadyReplicas {
		errs = append(errs, field.Invalid(at.Child("availableReplicas"), s.AvailableReplicas, "cannot be greater than readyReplicas"))
	}
	return errs
}

func podTemplateKind() *api.Kind {
	k := newKind(names{
		gv: corev1.SchemeGroupVersion, kind: "PodTemplate", plural: "podtemplates", singular: "podtemplate",
	}, func(l *corev1.PodTemplateList) *[]corev1.PodTemplate { return &l.Items })
	k.ReturnsDeleted = true
	k.Default = defaults(func(t *corev1.PodTemplate) { DefaultPodTemplate(&t.Template) })
	k.PrepareCreate = func(o api.Object) { o.SetGeneration(1) }
	k.PrepareUpdate = func(obj, old api.Object) {
		k.Default(obj)
		obj.SetGeneration(old.GetGeneration())
		if !semanticEqual(obj.(*corev1.PodTemplate).Template, old.(*corev1.PodTemplate).Template) {
			obj.SetGeneration(old.GetGeneration() + 1)
		}
	}
	check(k, func(t *corev1.PodTemplate) field.ErrorList {
		return ValidatePodTemplate(&t.Template, field.NewPath("template"))
	})
	k.Columns = columns(nameCol, col("Containers"), col("Images"), col("Pod Labels"))
	k.Row = row(func(t *corev1.PodTemplate, _ time.Time) []any {
		containers, images := containersAndImages(&t.Template.Spec)
		return []any{t.Name, containers, images, labels.FormatLabels(t.Template.Labels)}
	})
	return k
}
