package batch

import (
	"fmt"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/labels"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api/kinds/core/podspec"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// Limits of Jobs. They keep the index lists in a Job's status short.
const (
	maxIndexedParallelism = 100_000
	maxFailedIndexes      = 100_000
	manyCompletions       = 100_000
	maxOfMany             = 10_000 // maximum of parallelism and of failed indexes, for a Job with many completions
	maxManagedBy          = 63
)

func validateJob(j *batchv1.Job) field.ErrorList {
	spec := field.NewPath("spec")
	errs := validateGeneratedSelector(j)
	errs = append(errs, validateJobSpec(&j.Spec, spec)...)
	if s := j.Spec.Selector; s == nil {
		errs = append(errs, field.Required(spec.Child("selector"), ""))
	} else {
		errs = append(errs, metavalidation.ValidateLabelSelector(s, metavalidation.LabelSelectorValidationOptions{},
			spec.Child("selector"))...)
	}
	if s, err := metav1.LabelSelectorAsSelector(j.Spec.Selector); err == nil &&
		!s.Matches(labels.Set(j.Spec.Template.Labels)) {
		errs = append(errs, field.Invalid(spec.Child("template", "metadata", "labels"), j.Spec.Template.Labels,
			"`selector` does not match template `labels`"))
	}
	// Pod names are derived from the Job's name and the index.
	if n := ptr.Deref(j.Spec.Completions, 0); isIndexed(&j.Spec) && n > 0 {
		last := fmt.Sprintf("%s-%d", j.Name, n-1)
		if len(utilvalidation.IsDNS1123Label(last)) > 0 {
			errs = append(errs, field.Invalid(field.NewPath("metadata", "name"), j.Name,
				"will not able to create pod with invalid DNS label: "+last))
		}
	}
	return errs
}

func isIndexed(s *batchv1.JobSpec) bool {
	return ptr.Deref(s.CompletionMode, "") == batchv1.IndexedCompletion
}

// validateGeneratedSelector returns errors if the selector or the template's labels conflict with
// those that generateJobSelector sets.
func validateGeneratedSelector(j *batchv1.Job) field.ErrorList {
	if ptr.Deref(j.Spec.ManualSelector, false) || j.Spec.Selector == nil {
		return nil
	}
	var errs field.ErrorList
	if j.UID == "" {
		errs = append(errs, field.Required(field.NewPath("metadata", "uid"), ""))
	}
	want := map[string]string{}
	fldPath := field.NewPath("spec", "template", "metadata", "labels")
	for _, l := range []struct{ key, value string }{
		{legacyControllerUID, string(j.UID)}, {legacyJobName, j.Name},
		{batchv1.ControllerUidLabel, string(j.UID)}, {batchv1.JobNameLabel, j.Name},
	} {
		want[l.key] = l.value
		switch got, ok := j.Spec.Template.Labels[l.key]; {
		case !ok:
			errs = append(errs, field.Required(fldPath.Key(l.key), fmt.Sprintf("must be '%s'", l.value)))
		case got != l.value:
			errs = append(errs, field.Invalid(fldPath.Key(l.key), j.Spec.Template.Labels,
				fmt.Sprintf("must be '%s'", l.value)))
		}
	}
	if s, err := metav1.LabelSelectorAsSelector(j.Spec.Selector); err == nil && !s.Matches(labels.Set(want)) {
		errs = append(errs, field.Invalid(field.NewPath("spec", "selector"), j.Spec.Selector,
			"`selector` not auto-generated"))
	}
	return errs
}

// validateJobSpec validates the fields that Jobs and the job templates of CronJobs have in common.
func validateJobSpec(s *batchv1.JobSpec, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	for _, n := range []struct {
		name  string
		value *int32
	}{
		{"parallelism", s.Parallelism}, {"completions", s.Completions}, {"backoffLimit", s.BackoffLimit},
		{"ttlSecondsAfterFinished", s.TTLSecondsAfterFinished}, {"backoffLimitPerIndex", s.BackoffLimitPerIndex},
		{"maxFailedIndexes", s.MaxFailedIndexes},
	} {
		errs = append(errs, fieldrules.ValidateNonNegative(ptr.Deref(n.value, 0), fldPath.Child(n.name))...)
	}
	errs = append(errs, fieldrules.ValidateNonNegative(ptr.Deref(s.ActiveDeadlineSeconds, 0),
		fldPath.Child("activeDeadlineSeconds"))...)
	if s.MaxFailedIndexes != nil && s.BackoffLimitPerIndex == nil {
		errs = append(errs, field.Required(fldPath.Child("backoffLimitPerIndex"), "when maxFailedIndexes is specified"))
	}
	if m := s.ManagedBy; m != nil {
		errs = append(errs, utilvalidation.IsDomainPrefixedPath(fldPath.Child("managedBy"), *m)...)
		if len(*m) > maxManagedBy {
			errs = append(errs, field.TooLong(fldPath.Child("managedBy"), *m, maxManagedBy))
		}
	}
	errs = append(errs, validateCompletionMode(s, fldPath)...)
	if s.PodFailurePolicy != nil {
		errs = append(errs, validateFailurePolicy(s, fldPath.Child("podFailurePolicy"))...)
	}
	if s.SuccessPolicy != nil {
		if !isIndexed(s) {
			errs = append(errs, field.Invalid(fldPath.Child("successPolicy"), *s.SuccessPolicy,
				"requires indexed completion mode"))
		} else {
			errs = append(errs, validateSuccessPolicy(s, fldPath.Child("successPolicy"))...)
		}
	}
	if p := s.PodReplacementPolicy; p != nil {
		allowed := []batchv1.PodReplacementPolicy{batchv1.Failed}
		if s.PodFailurePolicy == nil {
			allowed = append(allowed, batchv1.TerminatingOrFailed)
		}
		if *p != allowed[0] && *p != allowed[len(allowed)-1] {
			errs = append(errs, field.NotSupported(fldPath.Child("podReplacementPolicy"), *p, allowed))
		}
	}
	return append(errs, validateJobTemplate(s, fldPath.Child("template"))...)
}

// validateJobTemplate validates the pod template of a Job. Its restart policy must allow the pods
// to complete.
func validateJobTemplate(s *batchv1.JobSpec, fldPath *field.Path) field.ErrorList {
	errs := podspec.ValidatePodTemplate(&s.Template, fldPath)
	fldPath = fldPath.Child("spec", "restartPolicy")
	switch p := s.Template.Spec.RestartPolicy; {
	case p == corev1.RestartPolicyAlways || p == "":
		errs = append(errs, field.Required(fldPath, fmt.Sprintf("valid values: %q, %q", corev1.RestartPolicyOnFailure,
			corev1.RestartPolicyNever)))
	case p != corev1.RestartPolicyOnFailure && p != corev1.RestartPolicyNever:
		errs = append(errs, field.NotSupported(fldPath, p,
			[]corev1.RestartPolicy{corev1.RestartPolicyOnFailure, corev1.RestartPolicyNever}))
	case s.PodFailurePolicy != nil && p != corev1.RestartPolicyNever:
		errs = append(errs, field.Invalid(fldPath, p,
			fmt.Sprintf("only %q is supported when podFailurePolicy is specified", corev1.RestartPolicyNever)))
	}
	return errs
}

func validateCompletionMode(s *batchv1.JobSpec, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	wrong := func(name string, n *int32, msg string, args ...any) {
		errs = append(errs, field.Invalid(fldPath.Child(name), *n, fmt.Sprintf(msg, args...)))
	}
	mode := ptr.Deref(s.CompletionMode, batchv1.NonIndexedCompletion)
	switch mode {
	case batchv1.IndexedCompletion:
	case batchv1.NonIndexedCompletion:
		if s.BackoffLimitPerIndex != nil {
			wrong("backoffLimitPerIndex", s.BackoffLimitPerIndex, "requires indexed completion mode")
		}
		if s.MaxFailedIndexes != nil {
			wrong("maxFailedIndexes", s.MaxFailedIndexes, "requires indexed completion mode")
		}
		return errs
	default:
		return field.ErrorList{field.NotSupported(fldPath.Child("completionMode"), mode,
			[]batchv1.CompletionMode{batchv1.NonIndexedCompletion, batchv1.IndexedCompletion})}
	}
	if s.Completions == nil {
		errs = append(errs, field.Required(fldPath.Child("completions"),
			fmt.Sprintf("when completion mode is %s", mode)))
	}
	if ptr.Deref(s.Parallelism, 0) > maxIndexedParallelism {
		wrong("parallelism", s.Parallelism, "must be less than or equal to %d when completion mode is %s",
			maxIndexedParallelism, mode)
	}
	failed := ptr.Deref(s.MaxFailedIndexes, 0)
	if s.Completions != nil && failed > *s.Completions {
		wrong("maxFailedIndexes", s.MaxFailedIndexes, "must be less than or equal to completions")
	}
	if failed > maxFailedIndexes {
		wrong("maxFailedIndexes", s.MaxFailedIndexes, "must be less than or equal to %d", maxFailedIndexes)
	}
	if ptr.Deref(s.Completions, 0) <= manyCompletions || s.BackoffLimitPerIndex == nil {
		return errs
	}
	const rule = "must be less than or equal to %d when completions are above %d and used with backoff limit per index"
	if s.MaxFailedIndexes == nil {
		errs = append(errs, field.Required(fldPath.Child("maxFailedIndexes"),
			fmt.Sprintf("must be specified when completions is above %d", manyCompletions)))
	}
	if ptr.Deref(s.Parallelism, 0) > maxOfMany {
		wrong("parallelism", s.Parallelism, rule, maxOfMany, manyCompletions)
	}
	if failed > maxOfMany {
		wrong("maxFailedIndexes", s.MaxFailedIndexes, rule, maxOfMany, manyCompletions)
	}
	return errs
}

// validateJobUpdate returns errors for changes of fields on which existing pods depend.
func validateJobUpdate(obj, old *batchv1.Job) field.ErrorList {
	spec := field.NewPath("spec")
	updated, previous := &obj.Spec, &old.Spec
	var errs field.ErrorList
	switch {
	case !isIndexed(updated):
		errs = append(errs, fieldrules.ValidateUnchanged(updated.Completions, previous.Completions,
			spec.Child("completions"))...)
	case updated.Completions == nil || fieldrules.SemanticEqual(updated.Completions, previous.Completions):
	case *updated.Completions != ptr.Deref(updated.Parallelism, 0):
		errs = append(errs, field.Invalid(spec.Child("completions"), *updated.Completions,
			"can only be modified in tandem with spec.parallelism"))
	}
	errs = append(errs, fieldrules.ValidateUnchanged(updated.Selector, previous.Selector, spec.Child("selector"))...)
	errs = append(errs, validateJobTemplateUpdate(obj, old, spec.Child("template"))...)
	errs = append(errs, fieldrules.ValidateUnchanged(updated.CompletionMode, previous.CompletionMode,
		spec.Child("completionMode"))...)
	errs = append(errs, fieldrules.ValidateUnchanged(updated.PodFailurePolicy, previous.PodFailurePolicy,
		spec.Child("podFailurePolicy"))...)
	errs = append(errs, fieldrules.ValidateUnchanged(updated.BackoffLimitPerIndex, previous.BackoffLimitPerIndex,
		spec.Child("backoffLimitPerIndex"))...)
	errs = append(errs, fieldrules.ValidateUnchanged(updated.ManagedBy, previous.ManagedBy, spec.Child("managedBy"))...)
	return append(errs, fieldrules.ValidateUnchanged(updated.SuccessPolicy, previous.SuccessPolicy,
		spec.Child("successPolicy"))...)
}

// validateJobTemplateUpdate returns an error if the pod template has changed. While the Job is
// suspended and has no pods, placement and resources may change: job queues set them to select
// nodes.
func validateJobTemplateUpdate(obj, old *batchv1.Job, fldPath *field.Path) field.ErrorList {
	updated, previous := &obj.Spec.Template, &old.Spec.Template
	begun := old.Status.StartTime != nil && !hasJobCondition(&old.Status, batchv1.JobSuspended) || old.Status.Active > 0
	if !ptr.Deref(old.Spec.Suspend, false) || begun {
		return fieldrules.ValidateUnchanged(updated, previous, fldPath)
	}
	previous = previous.DeepCopy()
	switch a := updated.Spec.Affinity; {
	case a == nil && previous.Spec.Affinity != nil:
		previous.Spec.Affinity.NodeAffinity = nil
		if *previous.Spec.Affinity == (corev1.Affinity{}) {
			previous.Spec.Affinity = nil
		}
	case a != nil && previous.Spec.Affinity == nil:
		previous.Spec.Affinity = &corev1.Affinity{NodeAffinity: a.NodeAffinity}
	case a != nil:
		previous.Spec.Affinity.NodeAffinity = a.NodeAffinity
	}
	previous.Spec.NodeSelector, previous.Spec.Tolerations, previous.Spec.SchedulingGates = updated.Spec.NodeSelector,
		updated.Spec.Tolerations, updated.Spec.SchedulingGates
	previous.Annotations, previous.Labels = updated.Annotations, updated.Labels
	sameResources(previous.Spec.Containers, updated.Spec.Containers)
	sameResources(previous.Spec.InitContainers, updated.Spec.InitContainers)
	return fieldrules.ValidateUnchanged(updated, previous, fldPath)
}

// sameResources copies the resources of the source containers to those containers that have the
// same name and position.
func sameResources(containers, source []corev1.Container) {
	for i := range min(len(containers), len(source)) {
		if containers[i].Name == source[i].Name {
			containers[i].Resources = source[i].Resources
		}
	}
}
