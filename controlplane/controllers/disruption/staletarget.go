package disruption

import (
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// podKey is the kind of the keys of pods in the queue, for resetStaleTarget. Keys of budgets have
// no kind.
const podKey = "pod"

// staleTarget reports whether pod p has condition DisruptionTarget although it still runs. left is
// the time until the condition is stale. A condition that an agent set is never stale, because an
// agent deletes no pods.
func staleTarget(p *corev1.Pod, now time.Time) (left time.Duration, target bool) {
	if p.DeletionTimestamp != nil || api.IsPodTerminal(p) {
		return 0, false
	}
	at := targetCondition(p)
	if at < 0 {
		return 0, false
	}
	c := p.Status.Conditions[at]
	if c.Status != corev1.ConditionTrue || c.Reason == corev1.PodReasonTerminationByKubelet {
		return 0, false
	}
	return max(0, c.LastTransitionTime.Add(disruptionLife).Sub(now)), true
}

// targetCondition returns the index of the pod's condition DisruptionTarget, or -1.
func targetCondition(p *corev1.Pod) int {
	return slices.IndexFunc(p.Status.Conditions,
		func(c corev1.PodCondition) bool { return c.Type == corev1.DisruptionTarget })
}

// resetStaleTarget sets condition DisruptionTarget of a pod to False if the pod was not deleted
// within disruptionLife. Before that, it returns the remaining time; otherwise it returns 0.
func (r *reconciler) resetStaleTarget(ctx context.Context, key engine.Key) (time.Duration, error) {
	p, ok := engine.Cached[*corev1.Pod](r.pods, key.Namespace, key.Name)
	if !ok {
		return 0, nil
	}
	now := r.term.Now()
	left, target := staleTarget(p, now)
	if !target || left > 0 {
		return left, nil
	}
	next := p.DeepCopy()
	next.Status.Conditions[targetCondition(p)] = corev1.PodCondition{Type: corev1.DisruptionTarget,
		Status: corev1.ConditionFalse, ObservedGeneration: p.Generation, LastTransitionTime: metav1.NewTime(now)}
	if _, err := client.UpdateStatus(ctx, r.term.Client, next); err != nil && !apierrors.IsNotFound(err) {
		return 0, fmt.Errorf("resetting the condition DisruptionTarget of pod %s/%s: %w", p.Namespace, p.Name, err)
	}
	return 0, nil
}
