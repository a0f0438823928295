package job

import (
	"slices"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// mostUncounted is the maximum number of terminal pods that are counted in one step. Until they are
// counted, the status of the Job contains their UIDs.
const mostUncounted = 500

// Snapshot is the input of PlanJob: a Job and its pods.
type Snapshot struct {
	Job   *batchv1.Job
	Pods  []*corev1.Pod // pods that the Job controls, including terminal and terminating pods
	Going func(*corev1.Pod) bool
	Now   time.Time
}

// account computes the counts of succeeded and failed pods in the status of a Job.
//
// Each terminal pod is counted exactly once, even if the controller or a node crashes at any time.
// A finalizer keeps each pod until it is counted. First the UID of the pod (or its index) is
// written to the status. Then the finalizer is removed. Only then the UID is removed from the
// status and the count is incremented. If the pod of a UID in the status has no finalizer or no
// longer exists, this controller has removed the finalizer, and the pod is counted.
type account struct {
	Snapshot
	status batchv1.JobStatus

	done, lost  indexes // completion indexes that have succeeded and failed
	release     []*corev1.Pod
	active      []*corev1.Pod
	terminating int // pods that are terminating but have not ended
	uncounted   int // pods that have ended but are not counted yet
}

// newAccount returns an account for a Job. It counts the pods with a UID in the status that no
// longer have the finalizer.
func newAccount(s Snapshot) *account {
	a := &account{Snapshot: s, status: *s.Job.Status.DeepCopy()}
	if isIndexed(s.Job) {
		a.done = parseIndexes(a.status.CompletedIndexes, completionsWanted(s.Job))
		if a.status.FailedIndexes != nil {
			a.lost = parseIndexes(*a.status.FailedIndexes, completionsWanted(s.Job))
		}
	}
	held := map[types.UID]bool{}
	for _, p := range s.Pods {
		held[p.UID] = isTracked(p)
	}
	if u := a.status.UncountedTerminatedPods; u != nil {
		settled := func(list []types.UID, into *int32) []types.UID {
			return slices.DeleteFunc(list, func(uid types.UID) bool {
				if !held[uid] {
					*into++
				}
				return !held[uid]
			})
		}
		u.Succeeded = settled(u.Succeeded, &a.status.Succeeded)
		u.Failed = settled(u.Failed, &a.status.Failed)
	} else {
		a.status.UncountedTerminatedPods = &batchv1.UncountedTerminatedPods{}
	}
	a.classifyPods()
	return a
}

// classifyPods sets active and terminating from the pods of the Job.
func (a *account) classifyPods() {
	for _, p := range a.Pods {
		switch {
		case hasPodStopped(p):
		case a.Going(p):
			a.terminating++
		default:
			a.active = append(a.active, p)
		}
	}
}

// isFailedPod reports whether pod p counts as failed, whether or not it was counted already.
func (a *account) isFailedPod(p *corev1.Pod) bool {
	if p.Status.Phase == corev1.PodFailed {
		return true
	}
	if p.Status.Phase != corev1.PodSucceeded && hasPodStopped(p) {
		return true
	}
	// For a pod that is being deleted, it may never be known how it ended.
	return !waitsForEnd(a.Job) && p.DeletionTimestamp != nil && p.Status.Phase != corev1.PodSucceeded
}

// countFinishedPods adds the pods that have ended to the status. If ending is true, the Job is
// about to finish, and its terminating pods count as ended. If failing is true, the Job is about to
// fail.
func (a *account) countFinishedPods(ending, failing bool) {
	u := a.status.UncountedTerminatedPods
	a.uncounted = 0
	for _, p := range a.Pods {
		if !isTracked(p) || slices.Contains(a.release, p) {
			continue
		}
		if slices.Contains(u.Succeeded, p.UID) || slices.Contains(u.Failed, p.UID) {
			a.release = append(a.release, p)
			continue
		}
		if !hasPodStopped(p) && !(ending && p.DeletionTimestamp != nil) && !a.isFailedPod(p) {
			continue
		}
		if len(a.release) >= mostUncounted {
			a.uncounted++
			continue
		}
		a.countOne(p, u, ending, failing)
	}
	if isIndexed(a.Job) {
		a.status.CompletedIndexes, a.status.Succeeded = a.done.String(), int32(a.done.countIndexes())
		if perIndex(a.Job) {
			text := a.lost.String()
			a.status.FailedIndexes = &text
		}
	}
}

func (a *account) countOne(p *corev1.Pod, u *batchv1.UncountedTerminatedPods, ending, failing bool) {
	i := indexOf(p)
	known := !isIndexed(a.Job) || i >= 0 && i < completionsWanted(a.Job)
	switch {
	case p.Status.Phase == corev1.PodSucceeded:
		if !isIndexed(a.Job) {
			u.Succeeded = append(u.Succeeded, p.UID)
		} else if known {
			a.done = a.done.withIndex(i) // the set of indexes shows that the pod was counted
		}
	case a.isFailedPod(p) || failing:
		v := judgePodFailure(a.Job, p)
		if known && perIndex(a.Job) && !a.lost.hasIndex(i) && !a.done.hasIndex(i) {
			before, _ := failuresOf(p)
			out := v.action == batchv1.PodFailurePolicyActionFailIndex ||
				v.action != batchv1.PodFailurePolicyActionIgnore &&
					before >= valueOr(a.Job.Spec.BackoffLimitPerIndex, 0)
			switch {
			case out:
				a.lost = a.lost.withIndex(i)
			case !ending && !a.isReplaced(p, i):
				a.uncounted++ // keep this pod: the failure count of the next pod of the index is computed from it
				return
			}
		}
		if known && v.action != batchv1.PodFailurePolicyActionIgnore {
			u.Failed = append(u.Failed, p.UID)
		}
	}
	a.release = append(a.release, p)
}

// isReplaced reports whether a pod of this index exists that was created after pod p failed.
func (a *account) isReplaced(p *corev1.Pod, index int) bool {
	counted, ignored := failuresOf(p)
	return slices.ContainsFunc(a.Pods, func(o *corev1.Pod) bool {
		c, i := failuresOf(o)
		return o.UID != p.UID && indexOf(o) == index && c+i > counted+ignored
	})
}

// countFailures returns the number of failed pods, including those in
// status.uncountedTerminatedPods.
func (a *account) countFailures() int {
	return int(a.status.Failed) + len(a.status.UncountedTerminatedPods.Failed)
}

func (a *account) countSuccesses() int {
	if isIndexed(a.Job) {
		return a.done.countIndexes()
	}
	return int(a.status.Succeeded) + len(a.status.UncountedTerminatedPods.Succeeded)
}

// isCountingPods reports whether some ended pods are not completely counted yet.
func (a *account) isCountingPods() bool {
	u := a.status.UncountedTerminatedPods
	return a.uncounted+len(a.release)+len(u.Succeeded)+len(u.Failed) > 0
}

// Bounds of the delay before a failed pod is replaced. The delay doubles with each further failure
// since the last success.
const (
	firstBackoff = 10 * time.Second
	mostBackoff  = 10 * time.Minute
)

// creationBackoff returns the time during which no pod may be created because of failed pods. index
// selects the pods of one completion index; -1 selects all pods. The result depends only on
// existing pods, so that a new leader computes the same result.
func (a *account) creationBackoff(index int) time.Duration {
	var past []*corev1.Pod
	for _, p := range a.Pods {
		if (index < 0 || indexOf(p) == index) && (hasPodStopped(p) || a.isFailedPod(p)) {
			past = append(past, p)
		}
	}
	slices.SortFunc(past, func(x, y *corev1.Pod) int { return podEndTime(y).Compare(podEndTime(x)) })
	n := 0
	for _, p := range past {
		if p.Status.Phase == corev1.PodSucceeded {
			break
		}
		n++
	}
	if n == 0 {
		return 0
	}
	pause := min(firstBackoff<<min(n-1, 16), mostBackoff)
	return max(0, min(pause, podEndTime(past[0]).Add(pause).Sub(a.Now)))
}

// findTrueCondition returns the condition of type t if it is true, and nil otherwise.
func findTrueCondition(s *batchv1.JobStatus, t batchv1.JobConditionType) *batchv1.JobCondition {
	for i := range s.Conditions {
		if c := &s.Conditions[i]; c.Type == t && c.Status == corev1.ConditionTrue {
			return c
		}
	}
	return nil
}

// setCondition sets a condition and reports whether it changed.
func (a *account) setCondition(t batchv1.JobConditionType, status corev1.ConditionStatus, reason, message string) bool {
	c := batchv1.JobCondition{Type: t, Status: status, Reason: reason, Message: message,
		LastProbeTime: metav1.NewTime(a.Now), LastTransitionTime: metav1.NewTime(a.Now)}
	for i := range a.status.Conditions {
		have := &a.status.Conditions[i]
		if have.Type != t {
			continue
		}
		if have.Status == status && have.Reason == reason && have.Message == message {
			return false
		}
		*have = c
		return true
	}
	if status == corev1.ConditionFalse {
		return false // a condition is not added with status False
	}
	a.status.Conditions = append(a.status.Conditions, c)
	return true
}
