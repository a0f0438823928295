package kinds

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
)

func deploymentKind() *api.Kind {
	k := newKind(names{
		gv: appsv1.SchemeGroupVersion, kind: "Deployment", plural: "deployments", singular: "deployment", short: []string{"deploy"}, all: true,
	}, func(l *appsv1.DeploymentList) *[]appsv1.Deployment { return &l.Items })
	k.Default = defaults(defaultDeployment)
	hasStatus(k, func(o *appsv1.Deployment) *appsv1.DeploymentStatus { return &o.Status }, halves[*appsv1.Deployment]{
		spec: func(d *appsv1.Deployment) any { return d.Spec },
		keep: func(obj, old *appsv1.Deployment) {
			obj.Spec = *old.Spec.DeepCopy()
			obj.Labels = old.Labels
		},
		status: func(obj, old *appsv1.Deployment) {
			obj.Status = appsv1.DeploymentStatus{}
			if old != nil {
				obj.Status = *old.Status.DeepCopy()
			}
		},
	})
	check(k, func(d *appsv1.Deployment) field.ErrorList {
		errs := validateDeploymentSpec(&d.Spec, field.NewPath("spec"))
		return append(errs, switches(d, api.RollbackAnnotation, api.RestartAnnotation, api.RebalanceAnnotation)...)
	})
	checkUpdate(k, func(obj, old *appsv1.Deployment) field.ErrorList {
		return sameOr(obj.Spec.Selector, old.Spec.Selector, field.NewPath("spec", "selector"))
	})
	status := k.Subresources["status"]
	validateMeta := status.ValidateUpdate
	status.ValidateUpdate = func(obj, old api.Object) field.ErrorList {
		return append(validateMeta(obj, old), validateDeploymentStatus(&obj.(*appsv1.Deployment).Status, field.NewPath("status"))...)
	}
	addScale(k, scaled{
		replicas: func(o api.Object) **int32 { return &o.(*appsv1.Deployment).Spec.Replicas },
		current:  func(o api.Object) int32 { return o.(*appsv1.Deployment).Status.Replicas },
		selector: func(o api.Object) *metav1.LabelSelector { return o.(*appsv1.Deployment).Spec.Selector },
	})
	k.Columns = columns(nameCol, col("Ready"), col("Up-to-date"), col("Available"), ageCol,
		wide("Containers"), wide("Images"), wide("Selector"))
	k.Row = row(func(d *appsv1.Deployment, now time.Time) []any {
		containers, images := containersAndImages(&d.Spec.Template.Spec)
		return []any{d.Name, fmt.Sprintf("%d/%d", d.Status.ReadyReplicas, val(d.Spec.Replicas)), int64(d.Status.UpdatedReplicas),
			int64(d.Status.AvailableReplicas), age(d, now), containers, images, metav1.FormatLabelSelector(d.Spec.Selector)}
	})
	return k
}

func defaultDeployment(d *appsv1.Deployment) {
	s := &d.Spec
	setDefaultPtr(&s.Replicas, 1)
	setDefault(&s.Strategy.Type, appsv1.RollingUpdateDeploymentStrategyType)
	if s.Strategy.Type == appsv1.RollingUpdateDeploymentStrategyType {
		setDefaultPtr(&s.Strategy.RollingUpdate, appsv1.RollingUpdateDeployment{})
		setDefaultPtr(&s.Strategy.RollingUpdate.MaxUnavailable, intstr.FromString("25%"))
		setDefaultPtr(&s.Strategy.RollingUpdate.MaxSurge, intstr.FromString("25%"))
	}
	setDefaultPtr(&s.RevisionHistoryLimit, 10)
	setDefaultPtr(&s.ProgressDeadlineSeconds, 600)
	DefaultPodTemplate(&s.Template)
}

func validateDeploymentSpec(s *appsv1.DeploymentSpec, at *field.Path) field.ErrorList {
	errs := nonNegative(val(s.Replicas), at.Child("replicas"))
	errs = append(errs, validateWorkload(s.Selector, &s.Template, at)...)
	errs = append(errs, validateStrategy(&s.Strategy, at.Child("strategy"))...)
	errs = append(errs, nonNegative(s.MinReadySeconds, at.Child("minReadySeconds"))...)
	errs = append(errs, nonNegative(val(s.RevisionHistoryLimit), at.Child("revisionHistoryLimit"))...)
	if p := s.ProgressDeadlineSeconds; p != nil {
		errs = append(errs, nonNegative(*p, at.Child("progressDeadlineSeconds"))...)
		if *p <= s.MinReadySeconds {
			errs = append(errs, field.Invalid(at.Child("progressDeadlineSeconds"), *p, "must be greater than minReadySeconds"))
		}
	}
	return errs
}

func validateStrategy(s *appsv1.DeploymentStrategy, at *field.Path) field.ErrorList {
	switch s.Type {
	case appsv1.RecreateDeploymentStrategyType:
		if s.RollingUpdate != nil {
			return field.ErrorList{field.Forbidden(at.Child("rollingUpdate"), "may not be specified when strategy `type` is 'Recreate'")}
		}
		return nil
	case appsv1.RollingUpdateDeploymentStrategyType:
	default:
		return oneOf(s.Type, at, appsv1.RecreateDeploymentStrategyType, appsv1.RollingUpdateDeploymentStrategyType)
	}
	at = at.Child("rollingUpdate")
	if s.RollingUpdate == nil {
		return field.ErrorList{field.Required(at, "this should be defaulted and never be nil")}
	}
	unavailable, surge := val(s.RollingUpdate.MaxUnavailable), val(s.RollingUpdate.MaxSurge)
	errs := validateIntOrPercent(unavailable, at.Child("maxUnavailable"))
	errs = append(errs, validateIntOrPercent(surge, at.Child("maxSurge"))...)
	if n, ok := percentOf(unavailable); ok && n > 100 {
		errs = append(errs, field.Invalid(at.Child("maxUnavailable"), unavailable.String(), "must not be greater than 100%"))
	}
	if isZero(unavailable) && isZero(surge) {
		errs = append(errs, field.Invalid(at.Child("maxUnavailable"), unavailable.String(), "may not be 0 when `maxSurge` is 0"))
	}
	return errs
}

func validateDeploymentStatus(s *appsv1.DeploymentStatus, at *field.Path) field.ErrorList {
	errs := nonNegative(s.ObservedGeneration, at.Child("observedGeneration"))
	errs = append(errs, nonNegative(s.Replicas, at.Child("replicas"))...)
	parts := map[string]int32{"updatedReplicas": s.UpdatedReplicas, "readyReplicas": s.ReadyReplicas, "availableReplicas": s.AvailableReplicas}
	for _, name := range sorted(parts) {
		n := parts[name]
		errs = append(errs, nonNegative(n, at.Child(name))...)
		if n > s.Replicas {
			errs = append(errs, field.Invalid(at.Child(name), n, "cannot be greater than status.replicas"))
		}
	}
	errs = append(errs, nonNegative(s.UnavailableReplicas, at.Child("unavailableReplicas"))...)
	if s.AvailableReplicas > s.ReadyReplicas {
		errs = append(errs, field.Invalid(at.Child("availableReplicas"), s.AvailableReplicas, "cannot be greater than readyReplicas"))
	}
	return errs
}

// validateWorkload judges what every controller of pods has: a selector and a template that it selects.
func validateWorkload(selector *metav1.LabelSelector, t *corev1.PodTemplateSpec, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	if selector == nil {
		errs = append(errs, field.Required(at.Child("selector"), ""))
	} else {
		errs = append(errs, metavalidation.ValidateLabelSelector(selector, metavalidation.LabelSelectorValidationOptions{}, at.Child("selector"))...)
		if len(selector.MatchLabels)+len(selector.MatchExpressions) == 0 {
			errs = append(errs, field.Invalid(at.Child("selector"), selector, "empty selector is invalid"))
		}
	}
	if s, err := metav1.LabelSelectorAsSelector(selector); err != nil {
		errs = append(errs, field.Invalid(at.Child("selector"), selector, "invalid label selector"))
	} else if !s.Empty() && !s.Matches(labels.Set(t.Labels)) {
		errs = append(errs, field.Invalid(at.Child("template", "metadata", "labels"), t.Labels, "`selector` does not match template `labels`"))
	}
	errs = append(errs, ValidatePodTemplate(t, at.Child("template"))...)
	if p := t.Spec.RestartPolicy; p != corev1.RestartPolicyAlways && p != "" {
		errs = append(errs, field.NotSupported(at.Child("template", "spec", "restartPolicy"), p, []corev1.RestartPolicy{corev1.RestartPolicyAlways}))
	}
	if t.Spec.ActiveDeadlineSeconds != nil {
		errs = append(errs, field.Forbidden(at.Child("template", "spec", "activeDeadlineSeconds"), "activeDeadlineSeconds in ReplicaSet is not Supported"))
	}
	return errs
}

// validateIntOrPercent accepts 0, 5 and "25%".
func validateIntOrPercent(v intstr.IntOrString, at *field.Path) field.ErrorList {
	if v.Type == intstr.Int {
		return nonNegative(v.IntVal, at)
	}
	return invalid(at, v.StrVal, validation.IsValidPercent(v.StrVal))
}

// percentOf is the number of a percentage: the largest that there is for one beyond all numbers.
func percentOf(v intstr.IntOrString) (int, bool) {
	digits, ok := strings.CutSuffix(v.StrVal, "%")
	if v.Type != intstr.String || !ok {
		return 0, false
	}
	n, err := strconv.Atoi(digits)
	return n, err == nil || errors.Is(err, strconv.ErrRange)
}

func isZero(v intstr.IntOrString) bool {
	if v.Type == intstr.Int {
		return v.IntVal == 0
	}
	n, ok := percentOf(v)
	return ok && n == 0
}

func containersAndImages(s *corev1.PodSpec) (containers, images string) {
	var c, i []string
	for _, x := range s.Containers {
		c, i = append(c, x.Name), append(i, x.Image)
	}
	return strings.Join(c, ","), strings.Join(i, ",")
}

// switches refuses values of annotations by which something is asked for, other than yes and no.
func switches(o api.Object, names ...string) (errs field.ErrorList) {
	for _, name := range names {
		if v, ok := o.GetAnnotations()[name]; ok && v != "true" && v != "false" {
			errs = append(errs, field.NotSupported(field.NewPath("metadata", "annotations").Key(name), v, []string{"true", "false"}))
		}
	}
	return errs
}
