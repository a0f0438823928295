// Package batch describes the kinds of the API group batch.
package batch

import (
	"fmt"
	"maps"
	"math"
	"reflect"
	"strconv"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
	"keelson.dev/keelson/controlplane/api/kinds/core/podspec"
)

// Labels of a Job's pods with the names that were used before Kubernetes 1.27.
const (
	legacyJobName       = "job-name"
	legacyControllerUID = "controller-uid"
)

// JobKind returns the definition of the kind Job.
func JobKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: batchv1.SchemeGroupVersion, Kind: "Job", Plural: "jobs", Singular: "job", InAllCategory: true,
	}, func(l *batchv1.JobList) *[]batchv1.Job { return &l.Items })
	k.Writes.Default = builder.Default(func(j *batchv1.Job) {
		defaultJobSpec(&j.Spec)
		if len(j.Labels) == 0 && len(j.Spec.Template.Labels) > 0 {
			// shares the map, so that generateJobSelector recognizes labels that a client did not
			// set
			j.Labels = j.Spec.Template.Labels
		}
	})
	// the default since before garbage collection existed
	k.Deletion.Propagation = metav1.DeletePropagationOrphan
	k.Deletion.Warning = "pods of a job outlive it by default; ask for propagationPolicy=Background to delete " +
		"them too, or for " +
		"propagationPolicy=Orphan to keep them without this warning"
	builder.SeparateSpecAndStatus(k, func(j *batchv1.Job) *batchv1.JobSpec { return &j.Spec },
		func(j *batchv1.Job) *batchv1.JobStatus { return &j.Status })
	builder.PrepareCreate(k, generateJobSelector)
	builder.AddValidation(k, validateJob)
	builder.AddUpdateValidation(k, validateJobUpdate)
	validateMeta := k.Subresources["status"].ValidateUpdate
	k.Subresources["status"].ValidateUpdate = func(obj, old api.Object) field.ErrorList {
		return append(validateMeta(obj, old), ValidateJobStatusUpdate(obj.(*batchv1.Job), old.(*batchv1.Job))...)
	}
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.StringColumn("Status"),
		builder.StringColumn("Completions"),
		builder.StringColumn("Duration"), builder.AgeColumn,
		builder.WideColumn("Containers"), builder.WideColumn("Images"), builder.WideColumn("Selector"))
	k.Lists.Row = builder.Row(func(j *batchv1.Job, now time.Time) []any {
		containers, images := podspec.ContainersAndImages(&j.Spec.Template.Spec)
		return []any{j.Name, jobState(j), jobCompletions(j), jobDuration(&j.Status, now), builder.Age(j, now),
			containers, images, metav1.FormatLabelSelector(j.Spec.Selector)}
	})
	k.Lists.Fields = builder.Fields(func(j *batchv1.Job) fields.Set {
		return fields.Set{"status.successful": strconv.Itoa(int(j.Status.Succeeded))}
	})
	return k
}

func defaultJobSpec(s *batchv1.JobSpec) {
	if s.Completions == nil && s.Parallelism == nil {
		builder.SetDefaultPtr(&s.Completions, 1)
	}
	builder.SetDefaultPtr(&s.Parallelism, 1)
	if s.BackoffLimit == nil {
		builder.SetDefaultPtr(&s.BackoffLimit, 6)
		if s.BackoffLimitPerIndex != nil {
			*s.BackoffLimit = math.MaxInt32
		}
	}
	builder.SetDefaultPtr(&s.CompletionMode, batchv1.NonIndexedCompletion)
	builder.SetDefaultPtr(&s.Suspend, false)
	builder.SetDefaultPtr(&s.ManualSelector, false)
	if s.PodFailurePolicy != nil {
		builder.SetDefaultPtr(&s.PodReplacementPolicy, batchv1.Failed)
	}
	builder.SetDefaultPtr(&s.PodReplacementPolicy, batchv1.TerminatingOrFailed)
	defaultFailurePolicy(s.PodFailurePolicy)
	podspec.DefaultPodTemplate(&s.Template)
}

func defaultFailurePolicy(p *batchv1.PodFailurePolicy) {
	if p == nil {
		return
	}
	for i := range p.Rules {
		patterns := p.Rules[i].OnPodConditions
		for j := range patterns {
			builder.SetDefault(&patterns[j].Status, corev1.ConditionTrue)
		}
	}
}

// generateJobSelector sets the selector of a Job to its UID, unless the selector is manual. It adds
// the labels that identify the Job's pods to the pod template. It adds them to the labels of the
// Job too, if those were defaulted from the template, but not if a client has set them. A template
// label with another value is kept; validation rejects it.
func generateJobSelector(job *batchv1.Job) {
	if ptr.Deref(job.Spec.ManualSelector, false) {
		job.Labels = maps.Clone(job.Labels)
		return
	}
	t := &job.Spec.Template
	defaulted := reflect.ValueOf(job.Labels).Pointer() == reflect.ValueOf(t.Labels).Pointer()
	t.Labels = addMissing(t.Labels, map[string]string{
		batchv1.JobNameLabel: job.Name, legacyJobName: job.Name,
		batchv1.ControllerUidLabel: string(job.UID), legacyControllerUID: string(job.UID),
	})
	if defaulted {
		job.Labels = maps.Clone(t.Labels)
	}
	s := &metav1.LabelSelector{}
	if job.Spec.Selector != nil {
		s = job.Spec.Selector.DeepCopy()
	}
	s.MatchLabels = addMissing(s.MatchLabels, map[string]string{batchv1.ControllerUidLabel: string(job.UID)})
	job.Spec.Selector = s
}

// addMissing returns a copy of labels with those additional labels that labels does not contain.
func addMissing(labels, additional map[string]string) map[string]string {
	out := maps.Clone(additional)
	maps.Copy(out, labels)
	return out
}

func hasJobCondition(s *batchv1.JobStatus, t batchv1.JobConditionType) bool {
	for _, c := range s.Conditions {
		if c.Type == t && c.Status == corev1.ConditionTrue {
			return true
		}
	}
	return false
}

func jobState(j *batchv1.Job) string {
	has := func(t batchv1.JobConditionType) bool { return hasJobCondition(&j.Status, t) }
	switch {
	case has(batchv1.JobComplete):
		return "Complete"
	case has(batchv1.JobFailed):
		return "Failed"
	case j.DeletionTimestamp != nil:
		return "Terminating"
	case has(batchv1.JobSuspended):
		return "Suspended"
	case has(batchv1.JobFailureTarget):
		return "FailureTarget"
	case has(batchv1.JobSuccessCriteriaMet):
		return "SuccessCriteriaMet"
	}
	return "Running"
}

func jobCompletions(j *batchv1.Job) string {
	switch parallel := ptr.Deref(j.Spec.Parallelism, 0); {
	case j.Spec.Completions != nil:
		return fmt.Sprintf("%d/%d", j.Status.Succeeded, *j.Spec.Completions)
	case parallel > 1:
		return fmt.Sprintf("%d/1 of %d", j.Status.Succeeded, parallel)
	}
	return fmt.Sprintf("%d/1", j.Status.Succeeded)
}

func jobDuration(s *batchv1.JobStatus, now time.Time) string {
	switch {
	case s.StartTime == nil:
		return ""
	case s.CompletionTime == nil:
		return duration.HumanDuration(now.Sub(s.StartTime.Time))
	}
	return duration.HumanDuration(s.CompletionTime.Sub(s.StartTime.Time))
}
