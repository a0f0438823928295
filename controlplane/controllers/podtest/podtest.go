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
	return []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue, LastTransitionTime: metav1.NewTime(since)}}
}

// Live simulates an hour before now. Terminating pods may be deleted, and pending pods may become
// ready. One in fails of the other pods fails; 0 means none. moved reports whether something
// happened or is still pending.
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

// SetState sets one of the states that tests name: "" is ready for an hour, "fresh" for 10 seconds,
// "starting" is pending, "going" is terminating with unchanged conditions, and "failed" is failed.
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
