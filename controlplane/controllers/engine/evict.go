package engine

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/client"
)

// Eviction describes the deletion of pods because of a taint. PodDisruptionBudgets do not apply to
// it. Reason and Message are the reason and message of condition DisruptionTarget of a pod. Event
// is the reason of the Event.
type Eviction struct{ Reason, Message, Event string }

// Evict sets condition DisruptionTarget in the status of pod p and then deletes p. It returns nil
// if p no longer exists.
func (e Eviction) Evict(ctx context.Context, t *Term, pods *View[*corev1.Pod], p *corev1.Pod) error {
	next := p.DeepCopy()
	next.Status.Conditions = append(
		slices.DeleteFunc(next.Status.Conditions, func(c corev1.PodCondition) bool {
			return c.Type == corev1.DisruptionTarget
		}),
		corev1.PodCondition{Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue, Reason: e.Reason,
			Message: e.Message, LastTransitionTime: metav1.NewTime(t.Now()),
			ObservedGeneration: p.Generation})
	next, err := client.UpdateStatus(ctx, t.Client, next)
	switch {
	case apierrors.IsNotFound(err):
		return nil
	case err != nil:
		return fmt.Errorf("setting condition DisruptionTarget of pod %s/%s before its eviction: %w",
			p.Namespace, p.Name, err)
	}
	pods.RecordWrite(next)
	t.Events.Eventf(p, corev1.EventTypeNormal, e.Event, "Marking for deletion Pod %s/%s", p.Namespace, p.Name)
	pods.MarkDeleting(p)
	if err := client.Delete[*corev1.Pod](ctx, t.Client, p.Namespace, p.Name, DeleteOnlyUID(p)); err != nil &&
		!apierrors.IsNotFound(err) {
		pods.UnmarkDeleting(p)
		return fmt.Errorf("evicting pod %s/%s: %w", p.Namespace, p.Name, err)
	}
	return nil
}
