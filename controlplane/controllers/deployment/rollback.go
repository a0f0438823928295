package deployment

import (
	"context"
	"fmt"
	"strconv"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// CompletedAnnotation on a Deployment with automatic rollback is the revision of its last complete
// rollout.
const CompletedAnnotation = "keelson.dev/completed-revision"

// minCrashRestarts is the number of restarts from which a container in CrashLoopBackOff counts as
// crashing.
const minCrashRestarts = 3

// rollsBack reports whether Deployment d has the annotation for automatic rollback to its last
// complete revision.
func rollsBack(d *appsv1.Deployment) bool {
	return d.Annotations[api.RollbackAnnotation] == "true" && d.DeletionTimestamp == nil
}

// crashLoops reports whether a container of pod p is in CrashLoopBackOff and has restarted at least
// minCrashRestarts times.
func crashLoops(p *corev1.Pod) bool {
	for _, list := range [][]corev1.ContainerStatus{p.Status.InitContainerStatuses, p.Status.ContainerStatuses} {
		for _, s := range list {
			if s.State.Waiting != nil && s.State.Waiting.Reason == "CrashLoopBackOff" &&
				s.RestartCount >= minCrashRestarts {
				return true
			}
		}
	}
	return false
}

// Completed returns the revision to store as CompletedAnnotation of Deployment d, or 0 if no write
// is necessary.
func Completed(d *appsv1.Deployment, sets []*appsv1.ReplicaSet) int64 {
	current, _ := splitReplicaSets(d, sets)
	if !rollsBack(d) || current == nil || !isRolloutComplete(d, d.Status) || lastCompleted(d) == revisionOf(current) {
		return 0
	}
	return revisionOf(current)
}

func lastCompleted(d *appsv1.Deployment) int64 {
	n, err := strconv.ParseInt(d.Annotations[CompletedAnnotation], 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// Rollback returns the ReplicaSet of the last complete revision, and the reason for a rollback to
// it. It returns nil if the current rollout of Deployment d has not failed. crashing is the name of
// a crashing pod of the current template, or "". A status of an older generation is ignored. The
// last complete revision is not rolled back.
func Rollback(d *appsv1.Deployment, sets []*appsv1.ReplicaSet, crashing string) (to *appsv1.ReplicaSet, why string) {
	current, old := splitReplicaSets(d, sets)
	last := lastCompleted(d)
	if !rollsBack(d) || d.Spec.Paused || d.Status.ObservedGeneration != d.Generation || current == nil || last == 0 ||
		revisionOf(current) == last || isRolloutComplete(d, d.Status) {
		return nil, ""
	}
	switch c := findCondition(d.Status, appsv1.DeploymentProgressing); {
	case c != nil && c.Status == corev1.ConditionFalse && c.Reason == reasonTimedOut:
		why = c.Message
	case crashing != "":
		why = fmt.Sprintf("Pod %q exits repeatedly.", crashing)
	default:
		return nil, ""
	}
	for _, rs := range old {
		if revisionOf(rs) == last {
			return rs, why
		}
	}
	return nil, ""
}

// maintainRollback stores the last complete revision of Deployment d, or resets its template to
// that revision if the rollout has failed. It reports whether it changed d; the caller must then
// end this reconcile.
func (r *reconciler) maintainRollback(
	ctx context.Context, d *appsv1.Deployment, sets []*appsv1.ReplicaSet,
) (bool, error) {
	if !rollsBack(d) {
		return false, nil
	}
	next := d.DeepCopy()
	if n := Completed(d, sets); n != 0 {
		next.Annotations = withEntry(next.Annotations, CompletedAnnotation, fmt.Sprint(n))
		return true, r.updateDeployment(ctx, next, "storing the complete revision of")
	}
	to, why := Rollback(d, sets, r.findCrashingPod(d, sets))
	if to == nil {
		return false, nil
	}
	next.Spec.Template = *to.Spec.Template.DeepCopy()
	delete(next.Spec.Template.Labels, appsv1.DefaultDeploymentUniqueLabelKey)
	if err := r.updateDeployment(ctx, next, "rolling back"); err != nil {
		return false, err
	}
	r.term.Events.Eventf(d, corev1.EventTypeWarning, "DeploymentRollback", "Rolled back to revision %d: %s",
		revisionOf(to), why)
	return true, nil
}

func (r *reconciler) updateDeployment(ctx context.Context, next *appsv1.Deployment, what string) error {
	stored, err := client.Update(ctx, r.term.Client, next)
	if err != nil {
		return fmt.Errorf("%s deployment %s/%s: %w", what, next.Namespace, next.Name, err)
	}
	r.deployments.RecordWrite(stored)
	return nil
}

// findCrashingPod returns the name of a pod of the current template for which crashLoops returns
// true, or "".
func (r *reconciler) findCrashingPod(d *appsv1.Deployment, sets []*appsv1.ReplicaSet) string {
	current, _ := splitReplicaSets(d, sets)
	if current == nil {
		return ""
	}
	for _, p := range engine.CachedBy[*corev1.Pod](r.pods, engine.ControllerIndex, string(current.UID)) {
		if p.DeletionTimestamp == nil && crashLoops(p) {
			return p.Name
		}
	}
	return ""
}
