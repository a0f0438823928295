package apps

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
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
	"keelson.dev/keelson/controlplane/api/kinds/core/podspec"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// DaemonSetKind returns the definition of the kind DaemonSet.
func DaemonSetKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: appsv1.SchemeGroupVersion, Kind: "DaemonSet", Plural: "daemonsets", Singular: "daemonset",
		Short: []string{"ds"}, InAllCategory: true,
	}, func(l *appsv1.DaemonSetList) *[]appsv1.DaemonSet { return &l.Items })
	k.Writes.Default = builder.Default(defaultDaemonSet)
	builder.SeparateSpecAndStatus(k, func(d *appsv1.DaemonSet) *appsv1.DaemonSetSpec { return &d.Spec },
		func(d *appsv1.DaemonSet) *appsv1.DaemonSetStatus { return &d.Status })
	builder.PrepareCreate(k, func(d *appsv1.DaemonSet) { setTemplateGeneration(d, 1) })
	before := k.Writes.PrepareUpdate
	k.Writes.PrepareUpdate = func(obj, old api.Object) {
		before(obj, old)
		keepTemplateGeneration(obj.(*appsv1.DaemonSet), old.(*appsv1.DaemonSet))
	}
	builder.AddValidation(k, func(d *appsv1.DaemonSet) field.ErrorList {
		return append(validateDaemonSetSpec(&d.Spec, field.NewPath("spec")),
			validateBoolAnnotations(d, api.RestartAnnotation)...)
	})
	builder.AddUpdateValidation(k, func(obj, old *appsv1.DaemonSet) field.ErrorList {
		return fieldrules.ValidateUnchanged(obj.Spec.Selector, old.Spec.Selector, field.NewPath("spec", "selector"))
	})
	validateMeta := k.Subresources["status"].ValidateUpdate
	k.Subresources["status"].ValidateUpdate = func(obj, old api.Object) field.ErrorList {
		updated, previous := &obj.(*appsv1.DaemonSet).Status, &old.(*appsv1.DaemonSet).Status
		return append(validateMeta(obj, old), validateDaemonSetStatus(updated, previous, field.NewPath("status"))...)
	}
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.NumberColumn("Desired"),
		builder.NumberColumn("Current"),
		builder.NumberColumn("Ready"), builder.NumberColumn("Up-to-date"), builder.NumberColumn("Available"),
		builder.StringColumn("Node Selector"), builder.AgeColumn, builder.WideColumn("Containers"),
		builder.WideColumn("Images"), builder.WideColumn("Selector"))
	k.Lists.Row = builder.Row(func(d *appsv1.DaemonSet, now time.Time) []any {
		s := &d.Status
		containers, images := podspec.ContainersAndImages(&d.Spec.Template.Spec)
		return []any{d.Name, int64(s.DesiredNumberScheduled), int64(s.CurrentNumberScheduled), int64(s.NumberReady),
			int64(s.UpdatedNumberScheduled), int64(s.NumberAvailable),
			labels.FormatLabels(d.Spec.Template.Spec.NodeSelector), builder.Age(d, now),
			containers, images, metav1.FormatLabelSelector(d.Spec.Selector)}
	})
	return k
}

func defaultDaemonSet(d *appsv1.DaemonSet) {
	u := &d.Spec.UpdateStrategy
	builder.SetDefault(&u.Type, appsv1.RollingUpdateDaemonSetStrategyType)
	if u.Type == appsv1.RollingUpdateDaemonSetStrategyType {
		builder.SetDefaultPtr(&u.RollingUpdate, appsv1.RollingUpdateDaemonSet{})
		builder.SetDefaultPtr(&u.RollingUpdate.MaxUnavailable, intstr.FromInt32(1))
		builder.SetDefaultPtr(&u.RollingUpdate.MaxSurge, intstr.FromInt32(0))
	}
	builder.SetDefaultPtr(&d.Spec.RevisionHistoryLimit, 10)
	podspec.DefaultPodTemplate(&d.Spec.Template)
}

// setTemplateGeneration sets the annotation that counts the changes of the pod template. The
// annotation replaces a removed field of the spec. Only the server changes it.
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
	if !fieldrules.SemanticEqual(obj.Spec.Template, old.Spec.Template) {
		n++
	}
	setTemplateGeneration(obj, max(n, 1))
}

func validateDaemonSetSpec(s *appsv1.DaemonSetSpec, fldPath *field.Path) field.ErrorList {
	errs := validateSelected("DaemonSet", s.Selector, &s.Template, fldPath)
	errs = append(errs, fieldrules.ValidateNonNegative(s.MinReadySeconds, fldPath.Child("minReadySeconds"))...)
	errs = append(errs, validateDaemonSetStrategy(&s.UpdateStrategy, fldPath.Child("updateStrategy"))...)
	return append(errs, fieldrules.ValidateNonNegative(ptr.Deref(s.RevisionHistoryLimit, 0),
		fldPath.Child("revisionHistoryLimit"))...)
}

func validateDaemonSetStrategy(u *appsv1.DaemonSetUpdateStrategy, fldPath *field.Path) field.ErrorList {
	switch u.Type {
	case appsv1.OnDeleteDaemonSetStrategyType:
		return nil
	case appsv1.RollingUpdateDaemonSetStrategyType:
	default:
		return field.ErrorList{field.NotSupported(fldPath.Child("type"), u.Type, []appsv1.DaemonSetUpdateStrategyType{
			appsv1.RollingUpdateDaemonSetStrategyType, appsv1.OnDeleteDaemonSetStrategyType,
		})}
	}
	fldPath = fldPath.Child("rollingUpdate")
	if u.RollingUpdate == nil {
		return field.ErrorList{field.Required(fldPath, "")}
	}
	unavailable, surge := ptr.Deref(u.RollingUpdate.MaxUnavailable, intstr.IntOrString{}),
		ptr.Deref(u.RollingUpdate.MaxSurge, intstr.IntOrString{})
	errs := fieldrules.ValidateIntOrPercent(unavailable, fldPath.Child("maxUnavailable"))
	errs = append(errs, fieldrules.ValidateIntOrPercent(surge, fldPath.Child("maxSurge"))...)
	errs = append(errs, validateMaxPercent(unavailable, fldPath.Child("maxUnavailable"))...)
	errs = append(errs, validateMaxPercent(surge, fldPath.Child("maxSurge"))...)
	switch {
	case !fieldrules.IsZero(unavailable) && !fieldrules.IsZero(surge):
		errs = append(errs, field.Invalid(fldPath.Child("maxSurge"), surge.String(),
			"may not be set when maxUnavailable is non-zero"))
	case fieldrules.IsZero(unavailable) && fieldrules.IsZero(surge):
		errs = append(errs, field.Required(fldPath.Child("maxUnavailable"), "cannot be 0 when maxSurge is 0"))
	}
	return errs
}

func validateDaemonSetStatus(s, old *appsv1.DaemonSetStatus, fldPath *field.Path) field.ErrorList {
	errs := fieldrules.ValidateNonNegative(s.ObservedGeneration, fldPath.Child("observedGeneration"))
	counts := map[string]int32{
		"currentNumberScheduled": s.CurrentNumberScheduled, "numberMisscheduled": s.NumberMisscheduled,
		"desiredNumberScheduled": s.DesiredNumberScheduled, "numberReady": s.NumberReady,
		"updatedNumberScheduled": s.UpdatedNumberScheduled, "numberAvailable": s.NumberAvailable,
		"numberUnavailable": s.NumberUnavailable,
	}
	for _, name := range fieldrules.SortedKeys(counts) {
		errs = append(errs, fieldrules.ValidateNonNegative(counts[name], fldPath.Child(name))...)
	}
	return append(errs, validateCollisionCount(s.CollisionCount, old.CollisionCount, fldPath)...)
}

// validateSelected validates the selector of a controller of pods, and that it matches the labels
// of the pod template. kind is used in errors; for "DaemonSet" some errors differ, as in
// Kubernetes.
func validateSelected(kind string, selector *metav1.LabelSelector, t *corev1.PodTemplateSpec,
	fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	if selector == nil {
		// For a DaemonSet, Kubernetes reports only that the selector does not match.
		if kind != "DaemonSet" {
			errs = append(errs, field.Required(fldPath.Child("selector"), ""))
		}
	} else {
		errs = append(errs, metavalidation.ValidateLabelSelector(selector,
			metavalidation.LabelSelectorValidationOptions{}, fldPath.Child("selector"))...)
		if len(selector.MatchLabels)+len(selector.MatchExpressions) == 0 {
			errs = append(errs, field.Invalid(fldPath.Child("selector"), selector,
				"empty selector is invalid for "+strings.ToLower(kind)))
		}
	}
	if s, err := metav1.LabelSelectorAsSelector(selector); err == nil && !s.Empty() &&
		!s.Matches(labels.Set(t.Labels)) {
		errs = append(errs, field.Invalid(fldPath.Child("template", "metadata", "labels"), t.Labels,
			"`selector` does not match template `labels`"))
	}
	return append(errs, podspec.ValidateLastingTemplate(kind, t, fldPath.Child("template"))...)
}
