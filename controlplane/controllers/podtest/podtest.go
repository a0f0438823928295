// Package podtest simulates nodes in tests of plans: pods become ready, fail and are deleted.
package podtest

import (
	"math/rand/v2"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Ready returns the conditions of a pod that has been ready since a time.
func Ready(since time.Time) []corev1.PodCondition {
	return []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue,
		LastTransitionTime: metav1.NewTime(since)}}
}

// Live simulates the hour before the time now. Terminating pods may be deleted, and pending pods
// may become ready. Each other pod fails with probability 1/fails, or never if fails is 0. It
// returns the pods that remain. moved reports whether a pod was pending or terminating.
func Live(pods []*corev1.Pod, now time.Time, rnd *rand.Rand, fails int) (out []*corev1.Pod, moved bool) {
	for _, p := range pods {
		switch {
		case p.DeletionTimestamp != nil:
			moved = true
			if rnd.IntN(2) == 0 {
				continue
			}
		case p.Status.Phase == corev1.PodPending:
			moved = true
			if rnd.IntN(2) == 0 {
				p.Status.Phase, p.Status.Conditions = corev1.PodRunning, Ready(now.Add(-time.Hour))
			}
		case fails > 0 && rnd.IntN(fails) == 0:
			p.Status.Phase, p.Status.Conditions = corev1.PodFailed, nil
		}
		out = append(out, p)
	}
	return out, moved
}

// SetState changes pod p to one of the states that tests use: "" means ready for an hour, "fresh"
// ready for 10 seconds, and "starting" pending. "going" means terminating with unchanged
// conditions, and "failed" means failed.
func SetState(p *corev1.Pod, state string, now time.Time) {
	p.Status.Phase = corev1.PodRunning
	switch state {
	case "starting":
		p.Status.Phase = corev1.PodPending
	case "failed":
		p.Status.Phase = corev1.PodFailed
	case "fresh":
		p.Status.Conditions = Ready(now.Add(-10 * time.Second))
	case "going":
		at := metav1.NewTime(now)
		p.DeletionTimestamp = &at
	default:
		p.Status.Conditions = Ready(now.Add(-time.Hour))
	}
}
