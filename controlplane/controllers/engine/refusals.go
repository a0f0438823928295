package engine

import (
	"fmt"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api"
)

// Bounds of the delay before pods are created again after nodes have refused pods. The delay
// doubles with each round of refusals.
const (
	minRefusalDelay = 2 * time.Second
	maxRefusalDelay = 5 * time.Minute
)

// Refusals summarizes how often kubelets have refused, at admission, pods of one owner in
// consecutive rounds. From it the delay before further pods is computed. Without a delay, an owner
// would create failed pods in a loop if the scheduler always binds its pods to a node that refuses
// them.
type Refusals struct {
	Rounds int           // number of consecutive rounds; 0 means that no pod was refused since a pod last started
	Last   *corev1.Pod   // pod that was refused last
	Wait   time.Duration // remaining time during which no pod may be created
}

// AllowedCreations returns how many of n pods may be created now. From the second round of refusals
// on, this is at most one.
func (r Refusals) AllowedCreations(n int) int {
	switch {
	case r.Wait > 0:
		return 0
	case r.Rounds > 1:
		return min(n, 1)
	}
	return n
}

// CountRefusals computes the Refusals of an owner from its pods alone, so that a new leader
// computes the same result. Pods that were created during the delay belong to the same round. The
// count starts again when a pod starts, and after a pause of more than twice the maximum delay.
func CountRefusals(pods []*corev1.Pod, now time.Time) Refusals {
	if !slices.ContainsFunc(pods, isPodRefused) {
		return Refusals{}
	}
	pods = slices.Clone(pods)
	slices.SortStableFunc(pods, func(a, b *corev1.Pod) int {
		return a.CreationTimestamp.Compare(b.CreationTimestamp.Time)
	})
	var r Refusals
	var latest time.Time // creation time of the last pod that was refused or may still be refused
	for _, p := range pods {
		created := p.CreationTimestamp.Time
		switch {
		case isPodRefused(p):
			if since := created.Sub(latest); r.Rounds == 0 || since > 2*maxRefusalDelay {
				r.Rounds = 1
			} else if since >= refusalDelay(r.Rounds) {
				r.Rounds++
			}
			r.Last, latest = p, created
		case r.Rounds == 0 || !created.After(r.Last.CreationTimestamp.Time):
		case hasPodStarted(p):
			r = Refusals{}
		case !api.IsPodTerminal(p):
			latest = created
		}
	}
	if r.Rounds > 0 {
		r.Wait = max(0, min(refusalDelay(r.Rounds), latest.Add(refusalDelay(r.Rounds)).Sub(now)))
	}
	return r
}

// RefusalLog records which round of refusals was last reported for each owner. The zero value is
// ready for use.
type RefusalLog struct {
	mu           sync.Mutex
	lastReported map[Key]refusalRound
}

type refusalRound struct {
	number int
	at     int64
}

// Forget removes the record of an owner that no longer exists.
func (l *RefusalLog) Forget(key Key) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.lastReported, key)
}

// recordRound stores r as the last reported round of the owner with this key. It reports whether
// another round was stored before.
func (l *RefusalLog) recordRound(key Key, r Refusals) bool {
	now := refusalRound{number: r.Rounds, at: r.Last.CreationTimestamp.Unix()}
	l.mu.Lock()
	defer l.mu.Unlock()
	was := l.lastReported[key]
	if l.lastReported == nil {
		l.lastReported = map[Key]refusalRound{}
	}
	l.lastReported[key] = now
	return was != now
}

// Report returns an error for the status of owner if nodes have refused its pods, and nil
// otherwise. It records the error as an Event once per round.
func (l *RefusalLog) Report(t *Term, owner api.Object, key Key, r Refusals) error {
	if r.Rounds == 0 {
		l.Forget(key)
		return nil
	}
	p := r.Last
	err := fmt.Errorf("pod %s was refused by node %s: %s: %s", p.Name, p.Spec.NodeName, p.Status.Reason,
		p.Status.Message)
	if r.Wait > 0 && l.recordRound(key, r) {
		t.Events.Eventf(owner, corev1.EventTypeWarning, "BackOff", "Creating no pods for %v, attempt %d: %v",
			r.Wait.Round(time.Second), r.Rounds, err)
	}
	return err
}

func refusalDelay(rounds int) time.Duration {
	return min(minRefusalDelay<<min(rounds-1, 16), maxRefusalDelay)
}

// isPodRefused reports whether pod p failed on its node before any of its containers ran. A node
// under resource pressure also refuses pods that tolerate its taint, with reason Evicted. A pod
// that was evicted while running is not refused.
func isPodRefused(p *corev1.Pod) bool {
	return p.Status.Phase == corev1.PodFailed && p.Spec.NodeName != "" && p.DeletionTimestamp == nil &&
		p.Status.Reason != "" && !hasPodStarted(p)
}

// hasPodStarted reports whether a container of the pod has run.
func hasPodStarted(p *corev1.Pod) bool {
	if p.Status.Phase == corev1.PodRunning || p.Status.Phase == corev1.PodSucceeded {
		return true
	}
	ran := func(s corev1.ContainerStatus) bool {
		return s.State.Running != nil || s.State.Terminated != nil || s.LastTerminationState.Terminated != nil
	}
	return slices.ContainsFunc(p.Status.ContainerStatuses, ran) ||
		slices.ContainsFunc(p.Status.InitContainerStatuses, ran)
}
