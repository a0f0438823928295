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

	"keelson.dev/keelson/controlplane/api/kinds/core/podspec"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// Limits of Jobs. They keep the index lists in a Job's status short.
const (
	maxIndexedParallelism = 100_000
	maxFailedIndexes      = 100_000
	manyCompletions       = 100_000
	maxOfMany             = 10_000 // for parallelism and failed indexes, with many completions
	maxManagedBy          = 63
)

func validateJob(j *batchv1.Job) field.ErrorList {
	spec := field.NewPath("spec")
	errs := validateGeneratedSelector(j)
	errs = append(errs, validateJobSpec(&j.Spec, spec)...)
	if s := j.Spec.Selector; s == nil {
		errs = append(errs, field.Required(spec.Child("selector"), ""))
	} else {
		errs = append(errs, metavalidation.ValidateLabelSelector(s, metavalidation.LabelSelectorValidationOptions{}, spec.Child("selector"))...)
	}
	if s, err := metav1.LabelSelectorAsSelector(j.Spec.Selector); err == nil && !s.Matches(labels.Set(j.Spec.Template.Labels)) {
		errs = append(errs, field.Invalid(spec.Child("template", "metadata", "labels"), j.Spec.Template.Labels,
			"`selector` does not match template `labels`"))
	}
	// Pod names are derived from the Job's name and the index.
	if n := fieldrules.Deref(j.Spec.Completions); isIndexed(&j.Spec) && n > 0 {
		last := fmt.Sprintf("%s-%d", j.Name, n-1)
		if len(utilvalidation.IsDNS1123Label(last)) > 0 {
			errs = append(errs, field.Invalid(field.NewPath("metadata", "name"), j.Name,
				"will not able to create pod with invalid DNS label: "+last))
		}
	}
	return errs
}

func isIndexed(s *batchv1.JobSpec) bool {
	return fieldrules.Deref(s.CompletionMode) == batchv1.IndexedCompletion
}

// validateGeneratedSelector returns errors if the selector or the labels of the template conflict
// with the generated ones.
func validateGeneratedSelector(j *batchv1.Job) field.ErrorList {
	if fieldrules.IsTrue(j.Spec.ManualSelector) || j.Spec.Selector == nil {
		return nil
	}
	var errs field.ErrorList
	if j.UID == "" {
		errs = append(errs, field.Required(field.NewPath("metadata", "uid"), ""))
	}
	want := map[string]string{}
	at := field.NewPath("spec", "template", "metadata", "labels")
	for _, l := range []struct{ key, value string }{
		{legacyControllerUID, string(j.UID)}, {legacyJobName, j.Name},
		{batchv1.ControllerUidLabel, string(j.UID)}, {batchv1.JobNameLabel, j.Name},
	} {
		want[l.key] = l.value
		switch got, ok := j.Spec.Template.Labels[l.key]; {
		case !ok:
			errs = append(errs, field.Required(at.Key(l.key), fmt.Sprintf("must be '%s'", l.value)))
		case got != l.value:
			errs = append(errs, field.Invalid(at.Key(l.key), j.Spec.Template.Labels, fmt.Sprintf("must be '%s'", l.value)))
		}
	}
	if s, err := metav1.LabelSelectorAsSelector(j.Spec.Selector); err == nil && !s.Matches(labels.Set(want)) {
		errs = append(errs, field.Invalid(field.NewPath("spec", "selector"), j.Spec.Selector, "`selector` not auto-generated"))
	}
	return errs
}

// validateJobSpec validates the common fields of Jobs and of the templates of CronJobs.
func validateJobSpec(s *batchv1.JobSpec, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	for _, n := range []struct {
		name  string
		value *int32
	}{
		{"parallelism", s.Parallelism}, {"completions", s.Completions}, {"backoffLimit", s.BackoffLimit},
		{"ttlSecondsAfterFinished", s.TTLSecondsAfterFinished}, {"backoffLimitPerIndex", s.BackoffLimitPerIndex},
		{"maxFailedIndexes", s.MaxFailedIndexes},
	} {
		errs = append(errs, fieldrules.NonNegative(fieldrules.Deref(n.value), at.Child(n.name))...)
	}
	errs = append(errs, fieldrules.NonNegative(fieldrules.Deref(s.ActiveDeadlineSeconds),
		at.Child("activeDeadlineSeconds"))...)
	if s.MaxFailedIndexes != nil && s.BackoffLimitPerIndex == nil {
		errs = append(errs, field.Required(at.Child("backoffLimitPerIndex"), "when maxFailedIndexes is specified"))
	}
	if m := s.ManagedBy; m != nil {
		errs = append(errs, utilvalidation.IsDomainPrefixedPath(at.Child("managedBy"), *m)...)
		if len(*m) > maxManagedBy {
			errs = append(errs, field.TooLong(at.Child("managedBy"), *m, maxManagedBy))
		}
	}
	errs = append(errs, validateCompletionMode(s, at)...)
	if s.PodFailurePolicy != nil {
		errs = append(errs, validateFailurePolicy(s, at.Child("podFailurePolicy"))...)
	}
	if s.SuccessPolicy != nil {
		if !isIndexed(s) {
			errs = append(errs, field.Invalid(at.Child("successPolicy"), *s.SuccessPolicy, "requires indexed completion mode"))
		} else {
			errs = append(errs, validateSuccessPolicy(s, at.Child("successPolicy"))...)
		}
	}
	if p := s.PodReplacementPolicy; p != nil {
		allowed := []batchv1.PodReplacementPolicy{batchv1.Failed}
		if s.PodFailurePolicy == nil {
			allowed = append(allowed, batchv1.TerminatingOrFailed)
		}
		if *p != allowed[0] && *p != allowed[len(allowed)-1] {
			errs = append(errs, field.NotSupported(at.Child("podReplacementPolicy"), *p, allowed))
		}
	}
	return append(errs, validateJobTemplate(s, at.Child("template"))...)
}

// validateJobTemplate validates the pod template. Its pods must be able to complete.
func validateJobTemplate(s *batchv1.JobSpec, at *field.Path) field.ErrorList {
	errs := podspec.ValidatePodTemplate(&s.Template, at)
	at = at.Child("spec", "restartPolicy")
	switch p := s.Template.Spec.RestartPolicy; {
	case p == corev1.RestartPolicyAlways || p == "":
		errs = append(errs, field.Required(at, fmt.Sprintf("valid values: %q, %q", corev1.RestartPolicyOnFailure,
			corev1.RestartPolicyNever)))
	case p != corev1.RestartPolicyOnFailure && p != corev1.RestartPolicyNever:
		errs = append(errs, field.NotSupported(at, p,
			[]corev1.RestartPolicy{corev1.RestartPolicyOnFailure, corev1.RestartPolicyNever}))
	case s.PodFailurePolicy != nil && p != corev1.RestartPolicyNever:
		errs = append(errs, field.Invalid(at, p,
			fmt.Sprintf("only %q is supported when podFailurePolicy is specified", corev1.RestartPolicyNever)))
	}
	return errs
}

func validateCompletionMode(s *batchv1.JobSpec, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	wrong := func(name string, n *int32, msg string, args ...any) {
		errs = append(errs, field.Invalid(at.Child(name), *n, fmt.Sprintf(msg, args...)))
	}
	mode := batchv1.NonIndexedCompletion
	if s.CompletionMode != nil {
		mode = *s.CompletionMode
	}
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
		return field.ErrorList{field.NotSupported(at.Child("completionMode"), mode,
			[]batchv1.CompletionMode{batchv1.NonIndexedCompletion, batchv1.IndexedCompletion})}
	}
	if s.Completions == nil {
		errs = append(errs, field.Required(at.Child("completions"), fmt.Sprintf("when completion mode is %s", mode)))
	}
	if fieldrules.Deref(s.Parallelism) > maxIndexedParallelism {
		wrong("parallelism", s.Parallelism, "must be less than or equal to %d when completion mode is %s", maxIndexedParallelism, mode)
	}
	failed := fieldrules.Deref(s.MaxFailedIndexes)
	if s.Completions != nil && failed > *s.Completions {
		wrong("maxFailedIndexes", s.MaxFailedIndexes, "must be less than or equal to completions")
	}
	if failed > maxFailedIndexes {
		wrong("maxFailedIndexes", s.MaxFailedIndexes, "must be less than or equal to %d", maxFailedIndexes)
	}
	if fieldrules.Deref(s.Completions) <= manyCompletions || s.BackoffLimitPerIndex == nil {
		return errs
	}
	const rule = "must be less than or equal to %d when completions are above %d and used with backoff limit per index"
	if s.MaxFailedIndexes == nil {
		errs = append(errs, field.Required(at.Child("maxFailedIndexes"), fmt.Sprintf("must be specified when completions is above %d", manyCompletions)))
	}
	if fieldrules.Deref(s.Parallelism) > maxOfMany {
		wrong("parallelism", s.Parallelism, rule, maxOfMany, manyCompletions)
	}
	if failed > maxOfMany {
		wrong("maxFailedIndexes", s.MaxFailedIndexes, rule, maxOfMany, manyCompletions)
	}
	return errs
}

// validateJobUpdate returns errors for changes of fields by which existing pods were created.
func validateJobUpdate(obj, old *batchv1.Job) field.ErrorList {
	spec := field.NewPath("spec")
	now, was := &obj.Spec, &old.Spec
	var errs field.ErrorList
	switch {
	case !isIndexed(now):
		errs = append(errs, fieldrules.Unchanged(now.Completions, was.Completions, spec.Child("completions"))...)
	case now.Completions == nil || fieldrules.SemanticEqual(now.Completions, was.Completions):
	case *now.Completions != fieldrules.Deref(now.Parallelism):
		errs = append(errs, field.Invalid(spec.Child("completions"), *now.Completions, "can only be modified in tandem with spec.parallelism"))
	}
	errs = append(errs, fieldrules.Unchanged(now.Selector, was.Selector, spec.Child("selector"))...)
	errs = append(errs, validateJobTemplateUpdate(obj, old, spec.Child("template"))...)
	errs = append(errs, fieldrules.Unchanged(now.CompletionMode, was.CompletionMode, spec.Child("completionMode"))...)
	errs = append(errs, fieldrules.Unchanged(now.PodFailurePolicy, was.PodFailurePolicy,
		spec.Child("podFailurePolicy"))...)
	errs = append(errs, fieldrules.Unchanged(now.BackoffLimitPerIndex, was.BackoffLimitPerIndex,
		spec.Child("backoffLimitPerIndex"))...)
	errs = append(errs, fieldrules.Unchanged(now.ManagedBy, was.ManagedBy, spec.Child("managedBy"))...)
	return append(errs, fieldrules.Unchanged(now.SuccessPolicy, was.SuccessPolicy, spec.Child("successPolicy"))...)
}

// validateJobTemplateUpdate returns an error if the template has changed. Exceptions are placement
// and resources while the Job is suspended and has no pods, which job queues use to select nodes.
func validateJobTemplateUpdate(obj, old *batchv1.Job, at *field.Path) field.ErrorList {
	now, was := &obj.Spec.Template, &old.Spec.Template
	begun := old.Status.StartTime != nil && !hasJobCondition(&old.Status, batchv1.JobSuspended) || old.Status.Active > 0
	if !fieldrules.IsTrue(old.Spec.Suspend) || begun {
		return fieldrules.Unchanged(now, was, at)
	}
	was = was.DeepCopy()
	switch a := now.Spec.Affinity; {
	case a == nil && was.Spec.Affinity != nil:
		was.Spec.Affinity.NodeAffinity = nil
		if *was.Spec.Affinity == (corev1.Affinity{}) {
			was.Spec.Affinity = nil
		}
	case a != nil && was.Spec.Affinity == nil:
		was.Spec.Affinity = &corev1.Affinity{NodeAffinity: a.NodeAffinity}
	case a != nil:
		was.Spec.Affinity.NodeAffinity = a.NodeAffinity
	}
	was.Spec.NodeSelector, was.Spec.Tolerations, was.Spec.SchedulingGates = now.Spec.NodeSelector, now.Spec.Tolerations, now.Spec.SchedulingGates
	was.Annotations, was.Labels = now.Annotations, now.Labels
	sameResources(was.Spec.Containers, now.Spec.Containers)
	sameResources(was.Spec.InitContainers, now.Spec.InitContainers)
	return fieldrules.Unchanged(now, was, at)
}

// sameResources copies the resources of the containers in from to the containers of the same name
// and position in to.
func sameResources(to, from []corev1.Container) {
	for i := range min(len(to), len(from)) {
		if to[i].Name == from[i].Name {
			to[i].Resources = from[i].Resources
		}
	}
}
