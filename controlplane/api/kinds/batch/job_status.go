package batch

import (
	"fmt"

	batchv1 "k8s.io/api/batch/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// ValidateJobStatusUpdate validates an update of a Job's status. It does not report errors that the
// stored status also has.
func ValidateJobStatusUpdate(obj, old *batchv1.Job) field.ErrorList {
	had := map[string]bool{}
	for _, e := range validateJobStatus(old) {
		had[e.Error()] = true
	}
	var errs field.ErrorList
	for _, e := range validateJobStatus(obj) {
		if !had[e.Error()] {
			errs = append(errs, e)
		}
	}
	fldPath := field.NewPath("status")
	updated, previous := &obj.Status, &old.Status
	wrong := func(name string, value any, msg string) {
		errs = append(errs, field.Invalid(fldPath.Child(name), value, msg))
	}
	for _, t := range []batchv1.JobConditionType{batchv1.JobFailed, batchv1.JobComplete, batchv1.JobFailureTarget} {
		if hasJobCondition(previous, t) && !hasJobCondition(updated, t) {
			wrong("conditions", field.OmitValueType{}, fmt.Sprintf("cannot disable the terminal %s=True condition", t))
		}
	}
	if hasJobCondition(previous, batchv1.JobSuccessCriteriaMet) &&
		!hasJobCondition(updated, batchv1.JobSuccessCriteriaMet) {
		wrong("conditions", field.OmitValueType{}, "cannot disable the SuccessCriteriaMet=True condition")
	}
	if hasJobCondition(previous, batchv1.JobComplete) && !hasJobCondition(previous, batchv1.JobSuccessCriteriaMet) &&
		hasJobCondition(updated, batchv1.JobSuccessCriteriaMet) {
		wrong("conditions", field.OmitValueType{},
			"cannot set SuccessCriteriaMet=True for Job already has Complete=true conditions")
	}
	if updated.Failed < previous.Failed {
		wrong("failed", updated.Failed, "cannot decrease the failed counter")
	}
	// An Indexed Job with completions equal to its parallelism can be scaled down. Scaling down
	// also lowers the number of succeeded indexes.
	elastic := isIndexed(&obj.Spec) && obj.Spec.Completions != nil &&
		*obj.Spec.Completions == ptr.Deref(obj.Spec.Parallelism, 0)
	if updated.Succeeded < previous.Succeeded && !elastic {
		wrong("succeeded", updated.Succeeded, "cannot decrease the succeeded counter")
	}
	if updated.CompletionTime != nil && previous.CompletionTime != nil &&
		!updated.CompletionTime.Equal(previous.CompletionTime) {
		wrong("completionTime", updated.CompletionTime, "completionTime cannot be mutated")
	}
	resumes := hasJobCondition(previous, batchv1.JobSuspended) && !hasJobCondition(updated, batchv1.JobSuspended)
	if previous.StartTime != nil && !previous.StartTime.Equal(updated.StartTime) &&
		!ptr.Deref(obj.Spec.Suspend, false) && !resumes {
		wrong("startTime", updated.StartTime, "field is immutable for unsuspended job once set")
	}
	return errs
}

func validateJobStatus(j *batchv1.Job) field.ErrorList {
	s, fldPath := &j.Status, field.NewPath("status")
	var errs field.ErrorList
	for _, n := range []struct {
		name  string
		value int32
	}{{"active", s.Active}, {"succeeded", s.Succeeded}, {"failed", s.Failed}, {"ready",
		ptr.Deref(s.Ready, 0)}, {"terminating", ptr.Deref(s.Terminating, 0)}} {
		errs = append(errs, fieldrules.ValidateNonNegative(n.value, fldPath.Child(n.name))...)
	}
	if u := s.UncountedTerminatedPods; u != nil {
		seen := map[types.UID]bool{}
		here := fldPath.Child("uncountedTerminatedPods")
		errs = append(errs, validateUncounted(u.Succeeded, seen, here.Child("succeeded"))...)
		errs = append(errs, validateUncounted(u.Failed, seen, here.Child("failed"))...)
	}
	if s.Ready != nil && *s.Ready > s.Active {
		errs = append(errs, field.Invalid(fldPath.Child("ready"), *s.Ready, "cannot set more ready pods than active"))
	}
	errs = append(errs, validateJobConditions(s, fldPath.Child("conditions"))...)
	errs = append(errs, validateJobTimes(s, fldPath)...)
	if hasJobCondition(s, batchv1.JobComplete) || hasJobCondition(s, batchv1.JobFailed) {
		errs = append(errs, validateFinishedJob(j, fldPath)...)
	}
	return append(errs, validateJobIndexes(j, fldPath)...)
}

func validateUncounted(list []types.UID, seen map[types.UID]bool, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, uid := range list {
		switch {
		case uid == "":
			errs = append(errs, field.Invalid(fldPath.Index(i), uid, "must not be empty"))
		case seen[uid]:
			errs = append(errs, field.Duplicate(fldPath.Index(i), uid))
		}
		seen[uid] = true
	}
	return errs
}

// validateJobConditions returns errors for contradictory conditions, and for a Complete or Failed
// condition without the condition that must precede it.
func validateJobConditions(s *batchv1.JobStatus, fldPath *field.Path) field.ErrorList {
	complete, failed := hasJobCondition(s, batchv1.JobComplete), hasJobCondition(s, batchv1.JobFailed)
	target, met := hasJobCondition(s, batchv1.JobFailureTarget), hasJobCondition(s, batchv1.JobSuccessCriteriaMet)
	var errs field.ErrorList
	for _, r := range []struct {
		broken bool
		msg    string
	}{
		{complete && failed, "cannot set Complete=True and Failed=true conditions"},
		{complete && target, "cannot set Complete=True and FailureTarget=true conditions"},
		{failed && !target, "cannot set Failed=True condition without the FailureTarget=true condition"},
		{complete && !met, "cannot set Complete=True condition without the SuccessCriteriaMet=true condition"},
		{met && failed, "cannot set SuccessCriteriaMet=True and Failed=true conditions"},
		{met && target, "cannot set SuccessCriteriaMet=True and FailureTarget=true conditions"},
	} {
		if r.broken {
			errs = append(errs, field.Invalid(fldPath, field.OmitValueType{}, r.msg))
		}
	}
	return errs
}

func validateJobTimes(s *batchv1.JobStatus, fldPath *field.Path) field.ErrorList {
	fldPath = fldPath.Child("completionTime")
	complete := hasJobCondition(s, batchv1.JobComplete)
	var errs field.ErrorList
	switch {
	case s.CompletionTime == nil && complete:
		errs = append(errs, field.Required(fldPath, "completionTime is required for Complete jobs"))
	case s.CompletionTime != nil && !complete:
		errs = append(errs, field.Invalid(fldPath, s.CompletionTime,
			"cannot set completionTime when there is no Complete=True condition"))
	}
	if s.StartTime != nil && s.CompletionTime != nil && s.CompletionTime.Before(s.StartTime) {
		errs = append(errs, field.Invalid(fldPath, s.CompletionTime, "completionTime cannot be set before startTime"))
	}
	return errs
}

func validateFinishedJob(j *batchv1.Job, fldPath *field.Path) field.ErrorList {
	s := &j.Status
	neverRan := ptr.Deref(j.Spec.Suspend, false) && j.Spec.Completions != nil && *j.Spec.Completions == 0
	var errs field.ErrorList
	if s.Active > 0 {
		errs = append(errs, field.Invalid(fldPath.Child("active"), s.Active, "active>0 is invalid for finished job"))
	}
	if s.StartTime == nil && !neverRan {
		errs = append(errs, field.Required(fldPath.Child("startTime"), "startTime is required for finished job"))
	}
	if u := s.UncountedTerminatedPods; u != nil && len(u.Failed)+len(u.Succeeded) > 0 {
		errs = append(errs, field.Invalid(fldPath.Child("uncountedTerminatedPods"), u,
			"uncountedTerminatedPods needs to be empty for finished job"))
	}
	if ptr.Deref(s.Terminating, 0) > 0 {
		errs = append(errs, field.Invalid(fldPath.Child("terminating"), *s.Terminating,
			"terminating>0 is invalid for finished job"))
	}
	return errs
}

func validateJobIndexes(j *batchv1.Job, fldPath *field.Path) field.ErrorList {
	s, completions := &j.Status, ptr.Deref(j.Spec.Completions, 0)
	done, failed := fldPath.Child("completedIndexes"), fldPath.Child("failedIndexes")
	var errs field.ErrorList
	if j.Spec.Completions != nil {
		if _, err := countIndexes(s.CompletedIndexes, completions); err != nil {
			errs = append(errs, field.Invalid(done, s.CompletedIndexes, "error parsing completedIndexes: "+err.Error()))
		}
	}
	if s.CompletedIndexes != "" && !isIndexed(&j.Spec) {
		errs = append(errs, field.Invalid(done, s.CompletedIndexes,
			"cannot set non-empty completedIndexes when non-indexed completion mode"))
	}
	if s.FailedIndexes == nil {
		return errs
	}
	if j.Spec.BackoffLimitPerIndex == nil {
		errs = append(errs, field.Invalid(failed, *s.FailedIndexes,
			"cannot set non-null failedIndexes when backoffLimitPerIndex is null"))
	} else if _, err := countIndexes(*s.FailedIndexes, completions); err != nil && j.Spec.Completions != nil {
		errs = append(errs, field.Invalid(failed, *s.FailedIndexes, "error parsing failedIndexes: "+err.Error()))
	}
	if at := countOverlap(s.CompletedIndexes, *s.FailedIndexes, completions); at >= 0 {
		errs = append(errs, field.Invalid(failed, *s.FailedIndexes,
			fmt.Sprintf("failedIndexes and completedIndexes overlap at index: %d", at)))
	}
	return errs
}
