// Package apps describes the kinds of the API group apps.
package apps

import (
	"fmt"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
	"keelson.dev/keelson/controlplane/api/kinds/core/podspec"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// DeploymentKind returns the definition of the kind Deployment.
func DeploymentKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: appsv1.SchemeGroupVersion, Kind: "Deployment", Plural: "deployments", Singular: "deployment",
		Short: []string{"deploy"}, InAllCategory: true,
	}, func(l *appsv1.DeploymentList) *[]appsv1.Deployment { return &l.Items })
	k.Writes.Default = builder.Default(defaultDeployment)
	builder.SeparateStatus(k, func(o *appsv1.Deployment) *appsv1.DeploymentStatus { return &o.Status },
		builder.Accessors[*appsv1.Deployment]{
			Spec: func(d *appsv1.Deployment) any { return d.Spec },
			CopySpec: func(obj, old *appsv1.Deployment) {
				obj.Spec = *old.Spec.DeepCopy()
				obj.Labels = old.Labels
			},
			Status: func(obj, old *appsv1.Deployment) {
				obj.Status = appsv1.DeploymentStatus{}
				if old != nil {
					obj.Status = *old.Status.DeepCopy()
				}
			},
		})
	builder.AddValidation(k, func(d *appsv1.Deployment) field.ErrorList {
		errs := validateDeploymentSpec(&d.Spec, field.NewPath("spec"))
		return append(errs, validateBoolAnnotations(d, api.RollbackAnnotation, api.RestartAnnotation,
			api.RebalanceAnnotation)...)
	})
	builder.AddUpdateValidation(k, func(obj, old *appsv1.Deployment) field.ErrorList {
		return fieldrules.ValidateUnchanged(obj.Spec.Selector, old.Spec.Selector, field.NewPath("spec", "selector"))
	})
	status := k.Subresources["status"]
	validateMeta := status.ValidateUpdate
	status.ValidateUpdate = func(obj, old api.Object) field.ErrorList {
		return append(validateMeta(obj, old), validateDeploymentStatus(&obj.(*appsv1.Deployment).Status,
			field.NewPath("status"))...)
	}
	builder.AddScale(k, builder.ScaleAccessors{
		Replicas: func(o api.Object) **int32 { return &o.(*appsv1.Deployment).Spec.Replicas },
		Current:  func(o api.Object) int32 { return o.(*appsv1.Deployment).Status.Replicas },
		Selector: func(o api.Object) *metav1.LabelSelector { return o.(*appsv1.Deployment).Spec.Selector },
	})
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.StringColumn("Ready"),
		builder.StringColumn("Up-to-date"),
		builder.StringColumn("Available"), builder.AgeColumn,
		builder.WideColumn("Containers"), builder.WideColumn("Images"), builder.WideColumn("Selector"))
	k.Lists.Row = builder.Row(func(d *appsv1.Deployment, now time.Time) []any {
		containers, images := podspec.ContainersAndImages(&d.Spec.Template.Spec)
		return []any{d.Name, fmt.Sprintf("%d/%d", d.Status.ReadyReplicas, ptr.Deref(d.Spec.Replicas, 0)),
			int64(d.Status.UpdatedReplicas),
			int64(d.Status.AvailableReplicas), builder.Age(d,
				now), containers, images, metav1.FormatLabelSelector(d.Spec.Selector)}
	})
	return k
}

func defaultDeployment(d *appsv1.Deployment) {
	s := &d.Spec
	builder.SetDefaultPtr(&s.Replicas, 1)
	builder.SetDefault(&s.Strategy.Type, appsv1.RollingUpdateDeploymentStrategyType)
	if s.Strategy.Type == appsv1.RollingUpdateDeploymentStrategyType {
		builder.SetDefaultPtr(&s.Strategy.RollingUpdate, appsv1.RollingUpdateDeployment{})
		builder.SetDefaultPtr(&s.Strategy.RollingUpdate.MaxUnavailable, intstr.FromString("25%"))
		builder.SetDefaultPtr(&s.Strategy.RollingUpdate.MaxSurge, intstr.FromString("25%"))
	}
	builder.SetDefaultPtr(&s.RevisionHistoryLimit, 10)
	builder.SetDefaultPtr(&s.ProgressDeadlineSeconds, 600)
	podspec.DefaultPodTemplate(&s.Template)
}

func validateDeploymentSpec(s *appsv1.DeploymentSpec, fldPath *field.Path) field.ErrorList {
	errs := fieldrules.ValidateNonNegative(ptr.Deref(s.Replicas, 0), fldPath.Child("replicas"))
	errs = append(errs, validateWorkload(s.Selector, &s.Template, fldPath)...)
	errs = append(errs, validateStrategy(&s.Strategy, fldPath.Child("strategy"))...)
	errs = append(errs, fieldrules.ValidateNonNegative(s.MinReadySeconds, fldPath.Child("minReadySeconds"))...)
	errs = append(errs, fieldrules.ValidateNonNegative(ptr.Deref(s.RevisionHistoryLimit, 0),
		fldPath.Child("revisionHistoryLimit"))...)
	if p := s.ProgressDeadlineSeconds; p != nil {
		errs = append(errs, fieldrules.ValidateNonNegative(*p, fldPath.Child("progressDeadlineSeconds"))...)
		if *p <= s.MinReadySeconds {
			errs = append(errs, field.Invalid(fldPath.Child("progressDeadlineSeconds"), *p,
				"must be greater than minReadySeconds"))
		}
	}
	return errs
}

func validateStrategy(s *appsv1.DeploymentStrategy, fldPath *field.Path) field.ErrorList {
	switch s.Type {
	case appsv1.RecreateDeploymentStrategyType:
		if s.RollingUpdate != nil {
			return field.ErrorList{field.Forbidden(fldPath.Child("rollingUpdate"),
				"may not be specified when strategy `type` is 'Recreate'")}
		}
		return nil
	case appsv1.RollingUpdateDeploymentStrategyType:
	default:
		return fieldrules.ValidateOneOf(s.Type, fldPath, appsv1.RecreateDeploymentStrategyType,
			appsv1.RollingUpdateDeploymentStrategyType)
	}
	fldPath = fldPath.Child("rollingUpdate")
	if s.RollingUpdate == nil {
		return field.ErrorList{field.Required(fldPath, "this should be defaulted and never be nil")}
	}
	unavailable, surge := ptr.Deref(s.RollingUpdate.MaxUnavailable, intstr.IntOrString{}),
		ptr.Deref(s.RollingUpdate.MaxSurge, intstr.IntOrString{})
	errs := fieldrules.ValidateIntOrPercent(unavailable, fldPath.Child("maxUnavailable"))
	errs = append(errs, fieldrules.ValidateIntOrPercent(surge, fldPath.Child("maxSurge"))...)
	if n, ok := fieldrules.PercentOf(unavailable); ok && n > 100 {
		errs = append(errs, field.Invalid(fldPath.Child("maxUnavailable"), unavailable.String(),
			"must not be greater than 100%"))
	}
	if fieldrules.IsZero(unavailable) && fieldrules.IsZero(surge) {
		errs = append(errs, field.Invalid(fldPath.Child("maxUnavailable"), unavailable.String(),
			"may not be 0 when `maxSurge` is 0"))
	}
	return errs
}

func validateDeploymentStatus(s *appsv1.DeploymentStatus, fldPath *field.Path) field.ErrorList {
	errs := fieldrules.ValidateNonNegative(s.ObservedGeneration, fldPath.Child("observedGeneration"))
	errs = append(errs, fieldrules.ValidateNonNegative(s.Replicas, fldPath.Child("replicas"))...)
	parts := map[string]int32{"updatedReplicas": s.UpdatedReplicas, "readyReplicas": s.ReadyReplicas,
		"availableReplicas": s.AvailableReplicas}
	for _, name := range fieldrules.SortedKeys(parts) {
		n := parts[name]
		errs = append(errs, fieldrules.ValidateNonNegative(n, fldPath.Child(name))...)
		if n > s.Replicas {
			errs = append(errs, field.Invalid(fldPath.Child(name), n, "cannot be greater than status.replicas"))
		}
	}
	errs = append(errs, fieldrules.ValidateNonNegative(s.UnavailableReplicas, fldPath.Child("unavailableReplicas"))...)
	if s.AvailableReplicas > s.ReadyReplicas {
		errs = append(errs, field.Invalid(fldPath.Child("availableReplicas"), s.AvailableReplicas,
			"cannot be greater than readyReplicas"))
	}
	return errs
}

// validateWorkload validates the fields that every controller of pods has: the selector and the pod
// template. The selector must match the labels of the pod template.
func validateWorkload(selector *metav1.LabelSelector, t *corev1.PodTemplateSpec, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	if selector == nil {
		errs = append(errs, field.Required(fldPath.Child("selector"), ""))
	} else {
		errs = append(errs, metavalidation.ValidateLabelSelector(selector,
			metavalidation.LabelSelectorValidationOptions{}, fldPath.Child("selector"))...)
		if len(selector.MatchLabels)+len(selector.MatchExpressions) == 0 {
			errs = append(errs, field.Invalid(fldPath.Child("selector"), selector, "empty selector is invalid"))
		}
	}
	if s, err := metav1.LabelSelectorAsSelector(selector); err != nil {
		errs = append(errs, field.Invalid(fldPath.Child("selector"), selector, "invalid label selector"))
	} else if !s.Empty() && !s.Matches(labels.Set(t.Labels)) {
		errs = append(errs, field.Invalid(fldPath.Child("template", "metadata", "labels"), t.Labels,
			"`selector` does not match template `labels`"))
	}
	// Kubernetes also uses the kind ReplicaSet in the errors of a Deployment.
	return append(errs, podspec.ValidateLastingTemplate("ReplicaSet", t, fldPath.Child("template"))...)
}

// validateBoolAnnotations returns an error for each of the given annotations that is set to a value
// other than "true" or "false".
func validateBoolAnnotations(o api.Object, names ...string) (errs field.ErrorList) {
	for _, name := range names {
		if v, ok := o.GetAnnotations()[name]; ok && v != "true" && v != "false" {
			errs = append(errs, field.NotSupported(field.NewPath("metadata", "annotations").Key(name), v,
				[]string{"true", "false"}))
		}
	}
	return errs
}
