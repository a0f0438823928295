// Package cronjob starts the Jobs of CronJobs at their scheduled times.
package cronjob

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/controllers/engine"
)

var kind = batchv1.SchemeGroupVersion.WithKind("CronJob")

// Snapshot is the input of PlanCronJob: a CronJob and its jobs.
type Snapshot struct {
	CronJob *batchv1.CronJob
	Jobs    []*batchv1.Job // the jobs that the cron job controls
	Going   func(*batchv1.Job) bool
	Now     time.Time
	Local   *time.Location // time zone of CronJobs that specify no time zone
}

// Step is the result of PlanCronJob. Its writes are performed in this order: deletion of jobs that
// are replaced, creation of the new job, the status, deletion of old jobs.
type Step struct {
	Replace []*batchv1.Job
	Run     *time.Time // scheduled time of the job to create; nil if no job must be created
	Events  []Event
	Again   time.Duration
}

// Event is an event that describes the current state of a CronJob. It is recorded once. It is
// recorded again only if PlanCronJob did not return it in between.
type Event struct{ Type, Reason, Message string }

// PlanCronJob returns the next writes for a CronJob.
func PlanCronJob(s Snapshot) Step {
	var step Step
	c := s.CronJob
	for _, j := range s.Jobs {
		if _, ok := scheduledTime(j); !ok && finishedCondition(j) == nil && !isListedActive(c, j.UID) {
			step.addEvent(warningEvent("UnexpectedJob", "Saw a job that the controller did not create or forgot: %s",
				j.Name))
		}
	}
	if c.DeletionTimestamp != nil || c.Spec.Suspend != nil && *c.Spec.Suspend {
		return step
	}
	t, wrong := timesOf(c, s.Local)
	if wrong != nil {
		step.addEvent(wrong)
		return step
	}
	from := s.earliestTime()
	due, ok := t.lastTime(from, s.Now)
	next := t.nextTime(from)
	if ok {
		next = t.nextTime(due)
	}
	if next.IsZero() {
		step.addEvent(warningEvent("InvalidSchedule",
			"invalid schedule: %q : it has no time within the next five years", c.Spec.Schedule))
	} else {
		step.Again = max(time.Millisecond, next.Sub(s.Now))
	}
	if ok {
		s.planStart(&step, t, from, due)
	}
	return step
}

// planStart adds to step the start of a run for due, the latest scheduled time that has passed. It
// adds nothing if the concurrency policy or the deadline forbids the run. Scheduled times between
// from and due were missed and are skipped; many of them cause a warning.
func (s Snapshot) planStart(step *Step, t times, from, due time.Time) {
	c := s.CronJob
	if d := c.Spec.StartingDeadlineSeconds; d != nil {
		earliest := s.Now.Add(-time.Duration(min(*d, maxDeadlineSeconds)) * time.Second)
		if due.Before(earliest) {
			step.addEvent(warningEvent("MissSchedule", "Missed scheduled time to start a job: %s",
				due.UTC().Format(time.RFC1123Z)))
			return
		}
		if earliest.After(from) {
			from = earliest
		}
	}
	if t.hasManyMissed(from, s.Now) {
		step.addEvent(warningEvent("TooManyMissedTimes",
			"too many missed start times. Set or decrease .spec.startingDeadlineSeconds or check clock skew"))
	}
	var running []*batchv1.Job
	for _, j := range s.Jobs {
		if s.isScheduledJob(j) {
			running = append(running, j)
		}
	}
	switch {
	case c.Spec.ConcurrencyPolicy == batchv1.ForbidConcurrent && len(running) > 0:
		step.addEvent(&Event{corev1.EventTypeNormal, "JobAlreadyActive",
			"Not starting job because prior execution is running and concurrency policy is Forbid"})
		return
	case c.Spec.ConcurrencyPolicy == batchv1.ReplaceConcurrent:
		for _, j := range running {
			if !s.Going(j) {
				step.Replace = append(step.Replace, j)
			}
		}
	}
	step.Run = &due
}

// maxDeadlineSeconds is the longest deadline, in seconds, that a time.Duration can hold.
const maxDeadlineSeconds = int64(1<<63-1) / int64(time.Second)

func (step *Step) addEvent(e *Event) { step.Events = append(step.Events, *e) }

// earliestTime returns the time after which runs have to be started. It is the last scheduled time
// for which a job was created or, before the first job, the creation time of the CronJob. A job
// that exists counts even if the status does not include it yet.
func (s Snapshot) earliestTime() time.Time {
	if last := s.lastRun(); last != nil {
		return last.Time
	}
	return s.CronJob.CreationTimestamp.Time
}

// lastRun returns the latest scheduled time for which a job was created, or nil. It ignores
// annotations with a future time, which this controller does not write.
func (s Snapshot) lastRun() *metav1.Time {
	last := s.CronJob.Status.LastScheduleTime
	for _, j := range s.Jobs {
		if at, ok := scheduledTime(j); ok && !at.After(s.Now) && (last == nil || at.After(last.Time)) {
			last = &metav1.Time{Time: at}
		}
	}
	return last
}

// isScheduledJob reports whether unfinished job j is a scheduled run: it has a scheduled time, or
// the status of the CronJob lists it.
func (s Snapshot) isScheduledJob(j *batchv1.Job) bool {
	_, made := scheduledTime(j)
	return finishedCondition(j) == nil && (made || isListedActive(s.CronJob, j.UID))
}

// scheduledTime returns the scheduled time for which job j was created. It returns false for a job
// that a user created.
func scheduledTime(j *batchv1.Job) (time.Time, bool) {
	at, err := time.Parse(time.RFC3339, j.Annotations[batchv1.CronJobScheduledTimestampAnnotation])
	return at, err == nil
}

func isListedActive(c *batchv1.CronJob, uid types.UID) bool {
	return slices.ContainsFunc(c.Status.Active, func(r corev1.ObjectReference) bool { return r.UID == uid })
}

// finishedCondition returns the true condition Complete or Failed of job j, or nil if j is not
// finished.
func finishedCondition(j *batchv1.Job) *batchv1.JobCondition {
	for i := range j.Status.Conditions {
		c := &j.Status.Conditions[i]
		if (c.Type == batchv1.JobComplete || c.Type == batchv1.JobFailed) && c.Status == corev1.ConditionTrue {
			return c
		}
	}
	return nil
}

// newJob returns the job of CronJob c for a scheduled time. Its name contains the minute, so that
// no minute has two jobs.
func newJob(c *batchv1.CronJob, at time.Time) *batchv1.Job {
	t := c.Spec.JobTemplate.DeepCopy()
	j := &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: c.Namespace, Name: fmt.Sprintf("%s-%d", c.Name, at.Unix()/60),
			Labels: t.Labels, Annotations: map[string]string{},
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(c, kind)},
		},
		Spec: t.Spec,
	}
	maps.Copy(j.Annotations, t.Annotations)
	j.Annotations[batchv1.CronJobScheduledTimestampAnnotation] = at.Format(time.RFC3339)
	engine.CopyTrace(j, c)
	return j
}

// Status returns the new status of a CronJob, and the events of the change. ran is the scheduled
// time for which this reconcile has created a job, or nil.
func Status(s Snapshot, ran *time.Time) (batchv1.CronJobStatus, []Event) {
	c := s.CronJob
	out := batchv1.CronJobStatus{LastScheduleTime: s.lastRun(), LastSuccessfulTime: c.Status.LastSuccessfulTime}
	if ran != nil && (out.LastScheduleTime == nil || ran.After(out.LastScheduleTime.Time)) {
		out.LastScheduleTime = &metav1.Time{Time: *ran}
	}
	if equality.Semantic.DeepEqual(out.LastScheduleTime, c.Status.LastScheduleTime) {
		out.LastScheduleTime = c.Status.LastScheduleTime // keep the same time in its previous time zone
	}
	known := map[types.UID]*batchv1.Job{}
	jobs := slices.Clone(s.Jobs)
	slices.SortFunc(jobs, func(a, b *batchv1.Job) int {
		x, _ := scheduledTime(a)
		y, _ := scheduledTime(b)
		return cmp.Or(x.Compare(y), cmp.Compare(a.Name, b.Name))
	})
	for _, j := range jobs {
		known[j.UID] = j
		if done := j.Status.CompletionTime; done != nil &&
			(out.LastSuccessfulTime == nil || done.After(out.LastSuccessfulTime.Time)) {
			out.LastSuccessfulTime = done
		}
		if s.isScheduledJob(j) && (j.DeletionTimestamp != nil || !s.Going(j)) {
			out.Active = append(out.Active, s.activeReference(j))
		}
	}
	var events []Event
	for _, r := range c.Status.Active {
		j := known[r.UID]
		if j == nil {
			events = append(events, Event{corev1.EventTypeNormal, "MissingJob", "Active job went missing: " + r.Name})
		} else if end := finishedCondition(j); end != nil {
			events = append(events, Event{corev1.EventTypeNormal, "SawCompletedJob",
				fmt.Sprintf("Saw completed job: %s, condition: %v", j.Name, end.Type)})
		}
	}
	return out, events
}

// activeReference returns the reference to job j for the status of the CronJob. It returns an
// existing reference unchanged.
func (s Snapshot) activeReference(j *batchv1.Job) corev1.ObjectReference {
	for _, r := range s.CronJob.Status.Active {
		if r.UID == j.UID {
			return r
		}
	}
	return corev1.ObjectReference{APIVersion: batchv1.SchemeGroupVersion.String(), Kind: "Job",
		Namespace: j.Namespace, Name: j.Name, UID: j.UID, ResourceVersion: j.ResourceVersion}
}

// Past returns the finished jobs that exceed the history limits, the oldest first.
func Past(s Snapshot) []*batchv1.Job {
	var well, badly []*batchv1.Job
	for _, j := range s.Jobs {
		end := finishedCondition(j)
		switch {
		case end == nil || s.Going(j):
		case end.Type == batchv1.JobComplete:
			well = append(well, j)
		default:
			badly = append(badly, j)
		}
	}
	return append(jobsOverLimit(well, s.CronJob.Spec.SuccessfulJobsHistoryLimit),
		jobsOverLimit(badly, s.CronJob.Spec.FailedJobsHistoryLimit)...)
}

func jobsOverLimit(jobs []*batchv1.Job, limit *int32) []*batchv1.Job {
	if limit == nil || len(jobs) <= int(*limit) {
		return nil
	}
	slices.SortFunc(jobs, func(a, b *batchv1.Job) int {
		switch x, y := a.Status.StartTime, b.Status.StartTime; {
		case x == nil || y == nil:
			return cmp.Or(engine.TrueFirst(x != nil, y != nil), cmp.Compare(a.Name, b.Name))
		default:
			return cmp.Or(x.Compare(y.Time), cmp.Compare(a.Name, b.Name))
		}
	})
	return jobs[:len(jobs)-int(*limit)]
}
