package kinds

import (
	"strconv"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
)

func daemonSetKind() *api.Kind {
	k := newKind(names{
		gv: appsv1.SchemeGroupVersion, kind: "DaemonSet", plural: "daemonsets", singular: "daemonset",
		short: []string{"ds"}, all: true,
	}, func(l *appsv1.DaemonSetList) *[]appsv1.DaemonSet { return &l.Items })
	k.Default = defaults(defaultDaemonSet)
	specAndStatus(k, func(d *appsv1.DaemonSet) *appsv1.DaemonSetSpec { return &d.Spec },
		func(d *appsv1.DaemonSet) *appsv1.DaemonSetStatus { return &d.Status })
	prepare(k, func(d *appsv1.DaemonSet) { setTemplateGeneration(d, 1) })
	before := k.PrepareUpdate
	k.PrepareUpdate = func(obj, old api.Object) {
		before(obj, old)
		keepTemplateGeneration(obj.(*appsv1.DaemonSet), old.(*appsv1.DaemonSet))
	}
	check(k, func(d *appsv1.DaemonSet) field.ErrorList {
		return append(validateDaemonSetSpec(&d.Spec, field.NewPath("spec")), switches(d, api.RestartAnnotation)...)
	})
	checkUpdate(k, func(obj, old *appsv1.DaemonSet) field.ErrorList {
		return sameOr(obj.Spec.Selector, old.Spec.Selector, field.NewPath("spec", "selector"))
	})
	validateMeta := k.Subresources["status"].ValidateUpdate
	k.Subresources["status"].ValidateUpdate = func(obj, old api.Object) field.ErrorList {
		now, was := &obj.(*appsv1.DaemonSet).Status, &old.(*appsv1.DaemonSet).Status
		return append(validateMeta(obj, old), validateDaemonSetStatus(now, was, field.NewPath("status"))...)
	}
	k.Columns = columns(nameCol, numCol("Desired"), numCol("Current"), numCol("Ready"), numCol("Up-to-date"), numCol("Available"),
		col("Node Selector"), ageCol, wide("Containers"), wide("Images"), wide("Selector"))
	k.Row = row(func(d *appsv1.DaemonSet, now time.Time) []any {
		s := &d.Status
		containers, images := containersAndImages(&d.Spec.Template.Spec)
		return []any{d.Name, int64(s.DesiredNumberScheduled), int64(s.CurrentNumberScheduled), int64(s.NumberReady),
			int64(s.UpdatedNumberScheduled), int64(s.NumberAvailable), labels.FormatLabels(d.Spec.Template.Spec.NodeSelector), age(d, now),
			containers, images, metav1.FormatLabelSelector(d.Spec.Selector)}
	})
	return k
}

func defaultDaemonSet(d *appsv1.DaemonSet) {
	u := &d.Spec.UpdateStrategy
	setDefault(&u.Type, appsv1.RollingUpdateDaemonSetStrategyType)
	if u.Type == appsv1.RollingUpdateDaemonSetStrategyType {
		setDefaultPtr(&u.RollingUpdate, appsv1.RollingUpdateDaemonSet{})
		setDefaultPtr(&u.RollingUpdate.MaxUnavailable, intstr.FromInt32(1))
		setDefaultPtr(&u.RollingUpdate.MaxSurge, intstr.FromInt32(0))
	}
	setDefaultPtr(&d.Spec.RevisionHistoryLimit, 10)
	DefaultPodTemplate(&d.Spec.Template)
}

// The generation of a template was once a field and is an annotation since: it counts the changes of the template, and
// is the server's to count.
func setTemplateGeneration(d *appsv1.DaemonSet, n int64) {
	all := make(map[string]string, len(d.Annotations)+1)
	for k, v := range d.Annotations {
		all[k] = v
	}
	all[appsv1.DeprecatedTemplateGeneration] = strconv.FormatInt(n, 10)
	d.Annotations = all
}

func keepTemplateGeneration(obj, old *appsv1.DaemonSet) {
	n, _ := strconv.ParseInt(old.Annotations[appsv1.DeprecatedTemplateGeneration], 10, 64)
	if !semanticEqual(obj.Spec.Template, old.Spec.Template) {
		n++
	}
	setTemplateGeneration(obj, max(n, 1))
}

func validateDaemonSetSpec(s *appsv1.DaemonSetSpec, at *field.Path) field.ErrorList {
	errs := validateSelected("DaemonSet", s.Selector, &s.Template, at)
	errs = append(errs, nonNegative(s.MinReadySeconds, at.Child("minReadySeconds"))...)
	errs = append(errs, validateDaemonSetStrategy(&s.UpdateStrategy, at.Child("updateStrategy"))...)
	return append(errs, nonNegative(val(s.RevisionHistoryLimit), at.Child("revisionHistoryLimit"))...)
}

func validateDaemonSetStrategy(u *appsv1.DaemonSetUpdateStrategy, at *field.Path) field.ErrorList {
	switch u.Type {
	case appsv1.OnDeleteDaemonSetStrategyType:
		return nil
	case appsv1.RollingUpdateDaemonSetStrategyType:
	default:
		return field.ErrorList{field.NotSupported(at.Child("type"), u.Type, []appsv1.DaemonSetUpdateStrategyType{
			appsv1.RollingUpdateDaemonSetStrategyType, appsv1.OnDeleteDaemonSetStrategyType,
		})}
	}
	at = at.Child("rollingUpdate")
	if u.RollingUpdate == nil {
		return field.ErrorList{field.Required(at, "")}
	}
	unavailable, surge := val(u.RollingUpdate.MaxUnavailable), val(u.RollingUpdate.MaxSurge)
	errs := validateIntOrPercent(unavailable, at.Child("maxUnavailable"))
	errs = append(errs, validateIntOrPercent(surge, at.Child("maxSurge"))...)
	errs = append(errs, atMostAll(unavailable, at.Child("maxUnavailable"))...)
	errs = append(errs, atMostAll(surge, at.Child("maxSurge"))...)
	switch {
	case !isZero(unavailable) && !isZero(surge):
		errs = append(errs, field.Invalid(at.Child("maxSurge"), surge.String(), "may not be set when maxUnavailable is non-zero"))
	case isZero(unavailable) && isZero(surge):
		errs = append(errs, field.Required(at.Child("maxUnavailable"), "cannot be 0 when maxSurge is 0"))
	}
	return errs
}

func validateDaemonSetStatus(s, old *appsv1.DaemonSetStatus, at *field.Path) field.ErrorList {
	errs := nonNegative(s.ObservedGeneration, at.Child("observedGeneration"))
	counts := map[string]int32{
		"currentNumberScheduled": s.CurrentNumberScheduled, "numberMisscheduled": s.NumberMisscheduled,
		"desiredNumberScheduled": s.DesiredNumberScheduled, "numberReady": s.NumberReady,
		"updatedNumberScheduled": s.UpdatedNumberScheduled, "numberAvailable": s.NumberAvailable,
		"numberUnavailable": s.NumberUnavailable,
	}
	for _, name := range sorted(counts) {
		errs = append(errs, nonNegative(counts[name], at.Child(name))...)
	}
	return append(errs, collisions(s.CollisionCount, old.CollisionCount, at)...)
}

// validateSelected judges the selector of a controller of pods, of a kind that says its name, and the template that
// it has to select.
func validateSelected(kind string, selector *metav1.LabelSelector, t *corev1.PodTemplateSpec, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	if selector == nil {
		if kind != "DaemonSet" { // of which Kubernetes says only that no selector selects nothing
			errs = append(errs, field.Required(at.Child("selector"), ""))
		}
	} else {
		errs = append(errs, metavalidation.ValidateLabelSelector(selector, metavalidation.LabelSelectorValidationOptions{}, at.Child("selector"))...)
		if len(selector.MatchLabels)+len(selector.MatchExpressions) == 0 {
			errs = append(errs, field.Invalid(at.Child("selector"), selector, "empty selector is invalid for "+strings.ToLower(kind)))
		}
	}
	if s, err := metav1.LabelSelectorAsSelector(selector); err == nil && !s.Empty() && !s.Matches(labels.Set(t.Labels)) {
		errs = append(errs, field.Invalid(at.Child("template", "metadata", "labels"), t.Labels, "`selector` does not match template `labels`"))
	}
	return append(errs, validateLastingTemplate(kind, t, at.Child("template"))...)
}

// validateLastingTemplate judges the template of pods that are to run for ever.
func validateLastingTemplate(kind string, t *corev1.PodTemplateSpec, at *field.Path) field.ErrorList {
	errs := ValidatePodTemplate(t, at)
	if p := t.Spec.RestartPolicy; p != corev1.RestartPolicyAlways && p != "" {
		errs = append(errs, field.NotSupported(at.Child("spec", "restartPolicy"), p, []corev1.RestartPolicy{corev1.RestartPolicyAlways}))
	}
	if t.Spec.ActiveDeadlineSeconds != nil {
		errs = append(errs, field.Forbidden(at.Child("spec", "activeDeadlineSeconds"), "activeDeadlineSeconds in "+kind+" is not Supported"))
	}
	return errs
}
