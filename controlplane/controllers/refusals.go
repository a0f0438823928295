package controllers

import (
	"fmt"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api"
)

// How long nothing is created after a pod was refused by its node: doubling from round to round.
const (
	firstRefusal = 2 * time.Second
	mostRefusal  = 5 * time.Minute
)

// Refusals are the pods of one owner that their nodes refused one round after the other. Without a pause an owner
// whose pods the scheduler sends to a node that will not have them would make a failed pod with every breath.
type Refusals struct {
	Rounds int           // 0 = none, or pods started since
	Last   *corev1.Pod   // refused last
	Wait   time.Duration // how long to create nothing
}

// Allow says how many of n wanted pods to create now. From the second round on it is one, to try.
func (r Refusals) Allow(n int) int {
	switch {
	case r.Wait > 0:
		return 0
	case r.Rounds > 1:
		return min(n, 1)
	}
	return n
}

// CountRefusals judges by the pods of an owner alone, so that a new leader comes to the same result. Pods that were
// created while nothing should have been are of the same round. A pod that starts ends the count, and so does a
// pause longer than the longest that this asks for.
func CountRefusals(pods []*corev1.Pod, now time.Time) Refusals {
	if !slices.ContainsFunc(pods, refused) {
		return Refusals{}
	}
	pods = slices.Clone(pods)
	slices.SortStableFunc(pods, func(a, b *corev1.Pod) int { return a.CreationTimestamp.Compare(b.CreationTimestamp.Time) })
	var r Refusals
	var latest time.Time // creation of the last pod that was refused or may still be
	for _, p := range pods {
		created := p.CreationTimestamp.Time
		switch {
		case refused(p):
			if since := created.Sub(latest); r.Rounds == 0 || since > 2*mostRefusal {
				r.Rounds = 1
			} else if since >= pause(r.Rounds) {
				r.Rounds++
			}
			r.Last, latest = p, created
		case r.Rounds == 0 || !created.After(r.Last.CreationTimestamp.Time):
		case started(p):
			r = Refusals{}
		case !PodEnded(p):
			latest = created
		}
	}
	if r.Rounds > 0 {
		r.Wait = max(0, min(pause(r.Rounds), latest.Add(pause(r.Rounds)).Sub(now)))
	}
	return r
}

// RefusalLog remembers of which round of refusals an owner has been told last. The zero value is ready.
type RefusalLog struct {
	mu   sync.Mutex
	told map[Key]refusalRound
}

type refusalRound struct {
	number int
	at     int64
}

// Forget drops what is known of an owner that is gone.
func (l *RefusalLog) Forget(key Key) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.told, key)
}

// isNew says whether key has not been told of the round yet.
func (l *RefusalLog) isNew(key Key, r Refusals) bool {
	now := refusalRound{number: r.Rounds, at: r.Last.CreationTimestamp.Unix()}
	l.mu.Lock()
	defer l.mu.Unlock()
	was := l.told[key]
	if l.told == nil {
		l.told = map[Key]refusalRound{}
	}
	l.told[key] = now
	return was != now
}

// Tell says in an Event, once a round, that nodes refuse the pods of owner, and returns the same as an error for its
// status; nil where none was refused.
func (l *RefusalLog) Tell(t *Term, owner api.Object, key Key, r Refusals) error {
	if r.Rounds == 0 {
		l.Forget(key)
		return nil
	}
	p := r.Last
	err := fmt.Errorf("pod %s was refused by node %s: %s: %s", p.Name, p.Spec.NodeName, p.Status.Reason, p.Status.Message)
	if r.Wait > 0 && l.isNew(key, r) {
		t.Events.Eventf(owner, corev1.EventTypeWarning, "BackOff", "Creating no pods for %v, attempt %d: %v",
			r.Wait.Round(time.Second), r.Rounds, err)
	}
	return err
}

func pause(rounds int) time.Duration {
	return min(firstRefusal<<min(rounds-1, 16), mostRefusal)
}

// refused says whether the pod ended on its node before any of its containers ran. So do pods that tolerate the taint of a
// node under pressure, which then says that it has evicted them; one that was evicted later has run.
func refused(p *corev1.Pod) bool {
	return p.Status.Phase == corev1.PodFailed && p.Spec.NodeName != "" && p.DeletionTimestamp == nil && p.Status.Reason != "" && !started(p)
}

// started says whether a container of the pod has run.
func started(p *corev1.Pod) bool {
	if p.Status.Phase == corev1.PodRunning || p.Status.Phase == corev1.PodSucceeded {
		return true
	}
	ran := func(s corev1.ContainerStatus) bool {
		return s.State.Running != nil || s.State.Terminated != nil || s.LastTerminationState.Terminated != nil
	}
	return slices.ContainsFunc(p.Status.ContainerStatuses, ran) || slices.ContainsFunc(p.Status.InitContainerStatuses, ran)
}
