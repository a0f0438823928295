// Package job runs Jobs: it creates pods until enough of them have succeeded.
package job

import (
	"cmp"
	"slices"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
)

// Step is the result of PlanJob. Its writes are performed in this order: Delete and Create, Status,
// End, the finalizers of the pods in Release.
type Step struct {
	Delete  []*corev1.Pod // excess pods to delete: they do not count as failed
	End     []*corev1.Pod // pods to delete because the Job is finishing: they are counted
	Create  []Creation
	Status  batchv1.JobStatus
	Release []*corev1.Pod
	Events  []Event
	Again   time.Duration
	Expired bool // the TTL has passed: the Job must be deleted
}

// Event is an event of a job.
type Event struct{ Type, Reason, Message string }

// PlanJob returns the next writes for a Job and its pods.
func PlanJob(s Snapshot) Step {
	j := s.Job
	if over := cmp.Or(findTrueCondition(&j.Status, batchv1.JobComplete),
		findTrueCondition(&j.Status, batchv1.JobFailed)); over != nil {
		return planFinished(s, over)
	}
	a := newAccount(s)
	var step Step
	if a.status.StartTime == nil && !isSuspended(j) {
		now := metav1.NewTime(s.Now)
		a.status.StartTime = &now
	}
	failing := findTrueCondition(&a.status, batchv1.JobFailureTarget)
	met := findTrueCondition(&a.status, batchv1.JobSuccessCriteriaMet)
	if failing == nil && met == nil && j.DeletionTimestamp == nil && !isSuspended(j) {
		a.resumeJob(&step)
	}
	a.countFinishedPods(failing != nil || met != nil, failing != nil)
	if failing == nil && met == nil {
		a.decideOutcome(&step)
		failing, met = findTrueCondition(&a.status, batchv1.JobFailureTarget),
			findTrueCondition(&a.status, batchv1.JobSuccessCriteriaMet)
	}
	switch {
	case failing != nil || met != nil:
		step.End = a.active
		a.terminating += len(a.active)
		a.active = nil
		a.finishJob(&step, failing, met)
	case j.DeletionTimestamp == nil:
		a.planPods(&step)
	}
	a.status.Active = int32(len(a.active) - len(step.Delete) + len(step.Create))
	a.status.Ready = new(int32)
	for _, p := range a.active {
		if api.IsPodReady(p) && !slices.Contains(step.Delete, p) {
			*a.status.Ready++
		}
	}
	going := int32(a.terminating + len(step.Delete))
	a.status.Terminating = &going
	step.Status, step.Release = a.status, a.release
	return step
}

// resumeJob sets condition Suspended to False if the Job is no longer suspended. It then sets a new
// start time, which restarts the deadline.
func (a *account) resumeJob(step *Step) {
	if !a.setCondition(batchv1.JobSuspended, corev1.ConditionFalse, "JobResumed", "Job resumed") {
		return
	}
	step.Events = append(step.Events, Event{corev1.EventTypeNormal, "Resumed", "Job resumed"})
	now := metav1.NewTime(a.Now)
	a.status.StartTime = &now
}

// decideOutcome sets condition FailureTarget for a Job that has failed, and SuccessCriteriaMet for
// a Job that has succeeded. Otherwise it sets neither. Failures have precedence over successes.
// finishJob later sets the final condition.
func (a *account) decideOutcome(step *Step) {
	j := a.Job
	for _, p := range a.Pods {
		if p.Status.Phase != corev1.PodFailed {
			continue
		}
		if v := judgePodFailure(j, p); v.action == batchv1.PodFailurePolicyActionFailJob {
			a.failJob(step, batchv1.JobReasonPodFailurePolicy, v.why)
			return
		}
	}
	limit := valueOr(j.Spec.BackoffLimit, 6)
	again := 0 // restarts of containers; they count as failures if pods restart their containers
	if j.Spec.Template.Spec.RestartPolicy == corev1.RestartPolicyOnFailure {
		for _, p := range a.Pods {
			if p.Status.Phase == corev1.PodRunning || p.Status.Phase == corev1.PodPending {
				again += containerRestarts(p)
			}
		}
	}
	if a.countFailures() > limit || again > 0 && again >= limit {
		a.failJob(step, batchv1.JobReasonBackoffLimitExceeded, "Job has reached the specified backoff limit")
		return
	}
	if j.Spec.ActiveDeadlineSeconds != nil && a.status.StartTime != nil && !isSuspended(j) {
		left := a.status.StartTime.Add(time.Duration(*j.Spec.ActiveDeadlineSeconds) * time.Second).Sub(a.Now)
		if left <= 0 {
			a.failJob(step, batchv1.JobReasonDeadlineExceeded, "Job was active longer than specified deadline")
			return
		}
		step.requestRetry(left)
	}
	switch {
	case perIndex(j) && j.Spec.MaxFailedIndexes != nil && a.lost.countIndexes() > int(*j.Spec.MaxFailedIndexes):
		a.failJob(step, batchv1.JobReasonMaxFailedIndexesExceeded,
			"Job has exceeded the specified maximal number of failed indexes")
		return
	case perIndex(j) && a.lost.countIndexes() > 0 &&
		a.done.countIndexes()+a.lost.countIndexes() >= completionsWanted(j):
		a.failJob(step, batchv1.JobReasonFailedIndexes, "Job has failed indexes")
		return
	}
	if rule := matchSuccessPolicy(j, a.done); rule != "" {
		a.setCondition(batchv1.JobSuccessCriteriaMet, corev1.ConditionTrue, batchv1.JobReasonSuccessPolicy, rule)
		return
	}
	n := a.countSuccesses()
	if c := completionsWanted(j); c >= 0 && n >= c || c < 0 && n > 0 && len(a.active) == 0 {
		a.setCondition(batchv1.JobSuccessCriteriaMet, corev1.ConditionTrue, batchv1.JobReasonCompletionsReached,
			"Reached expected number of succeeded pods")
	}
}

func (a *account) failJob(step *Step, reason, message string) {
	if a.setCondition(batchv1.JobFailureTarget, corev1.ConditionTrue, reason, message) {
		step.Events = append(step.Events, Event{corev1.EventTypeWarning, reason, message})
	}
	a.countFinishedPods(true, true) // count again: while the Job is failing, more pods count as failed
}

// finishJob sets condition Complete or Failed once all pods have ended and are counted. failing and
// met are the conditions FailureTarget and SuccessCriteriaMet; one of them is nil.
func (a *account) finishJob(step *Step, failing, met *batchv1.JobCondition) {
	if a.terminating > 0 || a.isCountingPods() {
		return
	}
	now := metav1.NewTime(a.Now)
	if a.status.StartTime == nil {
		a.status.StartTime = &now // a Job that ends while suspended has no start time, and a finished Job must have one
	}
	if failing != nil {
		a.setCondition(batchv1.JobFailed, corev1.ConditionTrue, failing.Reason, failing.Message)
	} else {
		a.setCondition(batchv1.JobComplete, corev1.ConditionTrue, met.Reason, met.Message)
		a.status.CompletionTime = &now
		step.Events = append(step.Events, Event{corev1.EventTypeNormal, "Completed", "Job completed"})
	}
	if ttl := a.Job.Spec.TTLSecondsAfterFinished; ttl != nil {
		step.requestRetry(max(time.Millisecond, time.Duration(*ttl)*time.Second))
	}
}

func (step *Step) requestRetry(d time.Duration) {
	if d > 0 && (step.Again == 0 || d < step.Again) {
		step.Again = d
	}
}

// planFinished returns the step of a finished Job. final is its condition Complete or Failed. The
// step removes the finalizers of the pods, and deletes the Job after its TTL.
func planFinished(s Snapshot, final *batchv1.JobCondition) Step {
	step := Step{Status: s.Job.Status}
	for _, p := range s.Pods {
		if isTracked(p) {
			step.Release = append(step.Release, p)
		}
	}
	if ttl := s.Job.Spec.TTLSecondsAfterFinished; ttl != nil && s.Job.DeletionTimestamp == nil {
		left := final.LastTransitionTime.Add(time.Duration(*ttl) * time.Second).Sub(s.Now)
		step.Expired = left <= 0
		step.requestRetry(left)
	}
	return step
}

// planPods adds to step the creation of missing pods or the deletion of excess pods.
func (a *account) planPods(step *Step) {
	j := a.Job
	if isSuspended(j) {
		if a.setCondition(batchv1.JobSuspended, corev1.ConditionTrue, "JobSuspended", "Job suspended") {
			step.Events = append(step.Events, Event{corev1.EventTypeNormal, "Suspended", "Job suspended"})
			a.status.StartTime = nil
		}
		step.Delete = a.active
		return
	}
	keep := a.active
	if isIndexed(j) {
		keep, step.Delete = a.divideByIndex()
	}
	want := maxParallelism(j)
	if c := completionsWanted(j); c >= 0 {
		want = min(want, c-a.countSuccesses())
		if perIndex(j) {
			want = min(maxParallelism(j), c-a.countSuccesses()-a.lost.countIndexes())
		}
	} else if a.countSuccesses() > 0 {
		want = min(want, len(keep)) // a pod has succeeded: no further pods are created, and active pods may finish
	}
	if len(keep) > want {
		step.Delete = append(step.Delete, sortByProgress(keep)[:len(keep)-max(0, want)]...)
		return
	}
	more := want - len(keep)
	if waitsForEnd(j) {
		more -= a.terminating
	}
	if more <= 0 {
		return
	}
	if isIndexed(j) {
		a.createIndexes(step, keep, more)
		return
	}
	if pause := a.creationBackoff(-1); pause > 0 {
		step.requestRetry(pause)
		return
	}
	for range more {
		step.Create = append(step.Create, Creation{Index: -1})
	}
}

// createIndexes adds to step the creation of at most count pods, for the first completion indexes
// that have no pod and are not finished. keep are the active pods.
func (a *account) createIndexes(step *Step, keep []*corev1.Pod, count int) {
	var busy indexes
	for _, p := range keep {
		busy = busy.withIndex(indexOf(p))
	}
	if waitsForEnd(a.Job) {
		for _, p := range a.Pods {
			if a.Going(p) && !hasPodStopped(p) && indexOf(p) >= 0 {
				busy = busy.withIndex(indexOf(p))
			}
		}
	}
	if !perIndex(a.Job) {
		if pause := a.creationBackoff(-1); pause > 0 {
			step.requestRetry(pause)
			return
		}
	}
	for len(step.Create) < count {
		next := missingIndexes(count-len(step.Create), completionsWanted(a.Job), a.done, a.lost, busy)
		if len(next) == 0 {
			return
		}
		for _, i := range next {
			busy = busy.withIndex(i)
			c := Creation{Index: i}
			if perIndex(a.Job) {
				if pause := a.creationBackoff(i); pause > 0 {
					step.requestRetry(pause)
					continue
				}
				c.Failed, c.Ignored = a.failuresBefore(i)
			}
			step.Create = append(step.Create, c)
		}
	}
}

// failuresBefore returns how many pods of a completion index have failed so far, and how many
// failures were ignored. It reads the annotations of the last failed pod of the index.
func (a *account) failuresBefore(index int) (counted, ignored int) {
	for _, p := range a.Pods {
		if indexOf(p) != index || !a.isFailedPod(p) {
			continue
		}
		c, i := failuresOf(p)
		if judgePodFailure(a.Job, p).action == batchv1.PodFailurePolicyActionIgnore {
			i++
		} else {
			c++
		}
		if c+i > counted+ignored {
			counted, ignored = c, i
		}
	}
	return counted, ignored
}

// divideByIndex divides the active pods of an indexed Job: keep has one pod for each unfinished
// index, and excess has all other pods.
func (a *account) divideByIndex() (keep, excess []*corev1.Pod) {
	seen := map[int]bool{}
	for _, p := range slices.Backward(sortByProgress(a.active)) {
		i := indexOf(p)
		if i < 0 || i >= completionsWanted(a.Job) || seen[i] || a.done.hasIndex(i) || a.lost.hasIndex(i) {
			excess = append(excess, p)
			continue
		}
		seen[i] = true
		keep = append(keep, p)
	}
	slices.Reverse(keep)
	return keep, excess
}

// sortByProgress returns a copy of pods, sorted by progress. Pods with the least progress are
// first, because they are deleted first.
func sortByProgress(pods []*corev1.Pod) []*corev1.Pod {
	rank := func(p *corev1.Pod) int {
		switch {
		case p.Spec.NodeName == "":
			return 0
		case p.Status.Phase == corev1.PodPending:
			return 1
		case !api.IsPodReady(p):
			return 2
		}
		return 3
	}
	pods = slices.Clone(pods)
	slices.SortStableFunc(pods, func(x, y *corev1.Pod) int {
		return cmp.Or(cmp.Compare(rank(x), rank(y)), y.CreationTimestamp.Compare(x.CreationTimestamp.Time),
			cmp.Compare(y.Name, x.Name))
	})
	return pods
}
