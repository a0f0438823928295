package job

import (
	"slices"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// mostUncounted is how many ended pods are counted at a time: their UIDs stand in the status meanwhile.
const mostUncounted = 500

// Snapshot is what is known of a job.
type Snapshot struct {
	Job   *batchv1.Job
	Pods  []*corev1.Pod // that it controls, ended and going ones too
	Going func(*corev1.Pod) bool
	Now   time.Time
}

// account is the state of a job's counting.
//
// A pod that ends is counted once, whoever is killed when: its finalizer keeps it, its UID (or index) is stored in the
// status first, then the finalizer is taken off, and only then does it move from the list of UIDs to the number. A UID
// in the list whose pod has no finalizer any more, or is gone, has been taken off by us, so it is counted then.
type account struct {
	Snapshot
	status batchv1.JobStatus

	done, lost indexes // indexes that have succeeded and failed
	release    []*corev1.Pod
	active     []*corev1.Pod
	going      int // pods on their way out that have not ended
	waiting    int // that have ended and are not counted yet
}

// newAccount settles what has been counted before.
func newAccount(s Snapshot) *account {
	a := &account{Snapshot: s, status: *s.Job.Status.DeepCopy()}
	if indexed(s.Job) {
		a.done = parseIndexes(a.status.CompletedIndexes, completions(s.Job))
		if a.status.FailedIndexes != nil {
			a.lost = parseIndexes(*a.status.FailedIndexes, completions(s.Job))
		}
	}
	held := map[types.UID]bool{}
	for _, p := range s.Pods {
		held[p.UID] = tracked(p)
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
	a.observe()
	return a
}

// observe sorts the pods into those that are at work, on their way out, and ended.
func (a *account) observe() {
	for _, p := range a.Pods {
		switch {
		case over(p):
		case a.Going(p):
			a.going++
		default:
			a.active = append(a.active, p)
		}
	}
}

// failed says whether a pod counts as one that failed, or will once it is counted.
func (a *account) failed(p *corev1.Pod) bool {
	if p.Status.Phase == corev1.PodFailed {
		return true
	}
	if p.Status.Phase != corev1.PodSucceeded && over(p) {
		return true
	}
	// One that is deleted may never come to the end of its life where anybody sees it.
	return !waitsForEnd(a.Job) && p.DeletionTimestamp != nil && p.Status.Phase != corev1.PodSucceeded
}

// count takes in the pods that have ended. ending says that the job is over, so that what is still there ends with
// it: failing says how.
func (a *account) count(ending, failing bool) {
	u := a.status.UncountedTerminatedPods
	a.waiting = 0
	for _, p := range a.Pods {
		if !tracked(p) || slices.Contains(a.release, p) {
			continue
		}
		if slices.Contains(u.Succeeded, p.UID) || slices.Contains(u.Failed, p.UID) {
			a.release = append(a.release, p)
			continue
		}
		if !over(p) && !(ending && p.DeletionTimestamp != nil) && !a.failed(p) {
			continue
		}
		if len(a.release) >= mostUncounted {
			a.waiting++
			continue
		}
		a.countOne(p, u, ending, failing)
	}
	if indexed(a.Job) {
		a.status.CompletedIndexes, a.status.Succeeded = a.done.String(), int32(a.done.count())
		if perIndex(a.Job) {
			text := a.lost.String()
			a.status.FailedIndexes = &text
		}
	}
}

func (a *account) countOne(p *corev1.Pod, u *batchv1.UncountedTerminatedPods, ending, failing bool) {
	i := indexOf(p)
	known := !indexed(a.Job) || i >= 0 && i < completions(a.Job)
	switch {
	case p.Status.Phase == corev1.PodSucceeded:
		if !indexed(a.Job) {
			u.Succeeded = append(u.Succeeded, p.UID)
		} else if known {
			a.done = a.done.add(i) // the index says that it was counted
		}
	case a.failed(p) || failing:
		v := judge(a.Job, p)
		if known && perIndex(a.Job) && !a.lost.has(i) && !a.done.has(i) {
			before, _ := failuresOf(p)
			out := v.action == batchv1.PodFailurePolicyActionFailIndex ||
				v.action != batchv1.PodFailurePolicyActionIgnore && before >= valueOr(a.Job.Spec.BackoffLimitPerIndex, 0)
			switch {
			case out:
				a.lost = a.lost.add(i)
			case !ending && !a.replaced(p, i):
				a.waiting++ // its successor reads from it how many failed before
				return
			}
		}
		if known && v.action != batchv1.PodFailurePolicyActionIgnore {
			u.Failed = append(u.Failed, p.UID)
		}
	}
	a.release = append(a.release, p)
}

// replaced says whether a later pod of the index is there.
func (a *account) replaced(p *corev1.Pod, index int) bool {
	counted, ignored := failuresOf(p)
	return slices.ContainsFunc(a.Pods, func(o *corev1.Pod) bool {
		c, i := failuresOf(o)
		return o.UID != p.UID && indexOf(o) == index && c+i > counted+ignored
	})
}

// failures are how many pods have failed, those included whose counting is under way.
func (a *account) failures() int {
	return int(a.status.Failed) + len(a.status.UncountedTerminatedPods.Failed)
}

func (a *account) successes() int {
	if indexed(a.Job) {
		return a.done.count()
	}
	return int(a.status.Succeeded) + len(a.status.UncountedTerminatedPods.Succeeded)
}

// counting says whether pods are being counted still.
func (a *account) counting() bool {
	u := a.status.UncountedTerminatedPods
	return a.waiting+len(a.release)+len(u.Succeeded)+len(u.Failed) > 0
}

// How long no pod is made after one has failed: doubling with each further failure since the last success.
const (
	firstBackoff = 10 * time.Second
	mostBackoff  = 10 * time.Minute
)

// backoff says how long to make no pod, judging by the pods that are there: a new leader comes to the same result.
// index restricts it to the pods of one index; -1 = all.
func (a *account) backoff(index int) time.Duration {
	var past []*corev1.Pod
	for _, p := range a.Pods {
		if (index < 0 || indexOf(p) == index) && (over(p) || a.failed(p)) {
			past = append(past, p)
		}
	}
	slices.SortFunc(past, func(x, y *corev1.Pod) int { return ended(y).Compare(ended(x)) })
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
	return max(0, min(pause, ended(past[0]).Add(pause).Sub(a.Now)))
}

// condition returns a condition of the status that is true; nil when there is none.
func condition(s *batchv1.JobStatus, t batchv1.JobConditionType) *batchv1.JobCondition {
	for i := range s.Conditions {
		if c := &s.Conditions[i]; c.Type == t && c.Status == corev1.ConditionTrue {
			return c
		}
	}
	return nil
}

// say sets a condition. It returns whether it was another before.
func (a *account) say(t batchv1.JobConditionType, status corev1.ConditionStatus, reason, message string) bool {
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
		return false // what is not there need not be denied
	}
	a.status.Conditions = append(a.status.Conditions, c)
	return true
}
