package deployment

import (
	"fmt"
	"math"
	"slices"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// Reasons of the conditions of a Deployment. Clients such as kubectl compare them.
const (
	reasonCreated      = "NewReplicaSetCreated"
	reasonFound        = "FoundNewReplicaSet"
	reasonCreateFailed = "ReplicaSetCreateError"
	reasonUpdated      = "ReplicaSetUpdated"
	reasonAvailable    = "NewReplicaSetAvailable"
	reasonTimedOut     = "ProgressDeadlineExceeded"
	reasonPaused       = "DeploymentPaused"
	reasonResumed      = "DeploymentResumed"
)

// Progress is the reason and message of condition Progressing that the writes of this reconcile
// cause.
type Progress struct {
	Reason, Message string
	Failed          bool
}

// Status returns the new status of Deployment d. progress is the reason and message of condition
// Progressing that the writes of this reconcile cause, or nil. again is the time until the progress
// deadline, or 0 if no deadline applies.
func Status(d *appsv1.Deployment, sets []*appsv1.ReplicaSet, progress *Progress, now time.Time) (
	s appsv1.DeploymentStatus, again time.Duration,
) {
	current, _ := splitReplicaSets(d, sets)
	s = *d.Status.DeepCopy()
	s.ObservedGeneration = d.Generation
	s.Replicas = sumReplicas(sets, func(rs *appsv1.ReplicaSet) int32 { return rs.Status.Replicas })
	s.ReadyReplicas = sumReplicas(sets, func(rs *appsv1.ReplicaSet) int32 { return rs.Status.ReadyReplicas })
	s.AvailableReplicas = sumReplicas(sets, func(rs *appsv1.ReplicaSet) int32 { return rs.Status.AvailableReplicas })
	s.UpdatedReplicas = 0
	if current != nil {
		s.UpdatedReplicas = current.Status.Replicas
	}
	s.UnavailableReplicas = max(0, sumReplicas(sets, specReplicas)-s.AvailableReplicas)
	s.TerminatingReplicas = terminatingPods(sets)
	setAvailable(d, &s, now)
	setFailure(sets, current, &s)
	again = setProgressing(d, current, &s, progress, now)
	return s, again
}

// terminatingPods returns the number of terminating pods of all sets, or nil if the status of a
// ReplicaSet does not contain that number yet.
func terminatingPods(sets []*appsv1.ReplicaSet) *int32 {
	var n int32
	for _, rs := range sets {
		if rs.Status.TerminatingReplicas == nil {
			return nil
		}
		n += *rs.Status.TerminatingReplicas
	}
	return &n
}

func setAvailable(d *appsv1.Deployment, s *appsv1.DeploymentStatus, now time.Time) {
	_, unavailable := rollingUpdateBounds(d)
	c := appsv1.DeploymentCondition{
		Type: appsv1.DeploymentAvailable, Status: corev1.ConditionTrue,
		Reason: "MinimumReplicasAvailable", Message: "Deployment has minimum availability.",
	}
	if s.AvailableReplicas < ptr.Deref(d.Spec.Replicas, 1)-unavailable {
		c.Status, c.Reason = corev1.ConditionFalse, "MinimumReplicasUnavailable"
		c.Message = "Deployment does not have minimum availability."
	}
	setCondition(s, c, now, false)
}

// setFailure copies condition ReplicaFailure of a ReplicaSet to the status s of the Deployment. The
// current ReplicaSet has precedence.
func setFailure(sets []*appsv1.ReplicaSet, current *appsv1.ReplicaSet, s *appsv1.DeploymentStatus) {
	var found *appsv1.ReplicaSetCondition
	for _, rs := range sets {
		for i, c := range rs.Status.Conditions {
			if c.Type == appsv1.ReplicaSetReplicaFailure && (found == nil || rs == current) {
				found = &rs.Status.Conditions[i]
			}
		}
	}
	if found == nil {
		removeCondition(s, appsv1.DeploymentReplicaFailure)
		return
	}
	setCondition(s, appsv1.DeploymentCondition{
		Type: appsv1.DeploymentReplicaFailure, Status: found.Status, Reason: found.Reason, Message: found.Message,
	}, found.LastTransitionTime.Time, false)
}

// setProgressing sets condition Progressing in status s. The condition depends on progress, on
// changes since the previous status, on whether the rollout is complete, and on the progress
// deadline. It returns the time until the deadline, or 0.
func setProgressing(
	d *appsv1.Deployment, current *appsv1.ReplicaSet, s *appsv1.DeploymentStatus, progress *Progress, now time.Time,
) time.Duration {
	if !hasDeadline(d) {
		removeCondition(s, appsv1.DeploymentProgressing)
		return 0
	}
	progressing := func(status corev1.ConditionStatus, reason, message string, renew bool) {
		setCondition(s, appsv1.DeploymentCondition{
			Type: appsv1.DeploymentProgressing, Status: status, Reason: reason, Message: message,
		}, now, renew)
	}
	have := findCondition(*s, appsv1.DeploymentProgressing)
	if progress != nil {
		status := corev1.ConditionTrue
		if progress.Failed {
			status = corev1.ConditionFalse
		}
		progressing(status, progress.Reason, progress.Message, !progress.Failed)
		have = findCondition(*s, appsv1.DeploymentProgressing)
	}
	if d.Spec.Paused || have != nil && have.Reason == reasonPaused {
		pausedOrResumed(d, have, progressing)
		return 0
	}
	if have != nil && have.Reason == reasonAvailable && s.Replicas == s.UpdatedReplicas && progress == nil {
		return 0 // the rollout is complete; a pod lost afterwards does not start a rollout
	}
	subject := fmt.Sprintf("Deployment %q", d.Name)
	if current != nil {
		subject = fmt.Sprintf("ReplicaSet %q", current.Name)
	}
	switch {
	case isRolloutComplete(d, *s):
		progressing(corev1.ConditionTrue, reasonAvailable, subject+" has successfully progressed.", true)
		return 0
	case hasProgressed(d.Status, *s):
		if progress == nil {
			progressing(corev1.ConditionTrue, reasonUpdated, subject+" is progressing.", true)
		}
	case timedOut(d, have, now):
		progressing(corev1.ConditionFalse, reasonTimedOut, subject+" has timed out progressing.", false)
		return 0
	}
	return untilDeadline(d, findCondition(*s, appsv1.DeploymentProgressing), now)
}

func pausedOrResumed(
	d *appsv1.Deployment, have *appsv1.DeploymentCondition,
	progressing func(corev1.ConditionStatus, string, string, bool),
) {
	switch {
	case have != nil && have.Reason == reasonTimedOut: // keep the timeout visible
	case d.Spec.Paused && (have == nil || have.Reason != reasonPaused):
		progressing(corev1.ConditionUnknown, reasonPaused, "Deployment is paused", true)
	case !d.Spec.Paused:
		progressing(corev1.ConditionUnknown, reasonResumed, "Deployment is resumed", true)
	}
}

// isRolloutComplete reports whether all desired pods have the current template and are available,
// and no other pod exists.
func isRolloutComplete(d *appsv1.Deployment, s appsv1.DeploymentStatus) bool {
	want := ptr.Deref(d.Spec.Replicas, 1)
	return s.UpdatedReplicas == want && s.Replicas == want && s.AvailableReplicas == want &&
		s.ObservedGeneration >= d.Generation
}

// hasProgressed reports whether the rollout advanced from the previous status to the current one.
// It advances by more pods of the current template, fewer old pods, or more ready or available
// pods.
func hasProgressed(previous, current appsv1.DeploymentStatus) bool {
	return current.UpdatedReplicas > previous.UpdatedReplicas ||
		current.Replicas-current.UpdatedReplicas < previous.Replicas-previous.UpdatedReplicas ||
		current.ReadyReplicas > previous.ReadyReplicas || current.AvailableReplicas > previous.AvailableReplicas
}

// hasDeadline reports whether Deployment d has a progress deadline. The maximum int32 disables it.
func hasDeadline(d *appsv1.Deployment) bool {
	return d.Spec.ProgressDeadlineSeconds != nil && *d.Spec.ProgressDeadlineSeconds != math.MaxInt32
}

func timedOut(d *appsv1.Deployment, c *appsv1.DeploymentCondition, now time.Time) bool {
	switch {
	case c == nil || c.Reason == reasonAvailable:
		return false
	case c.Reason == reasonTimedOut:
		return true
	}
	return !now.Before(progressDeadline(d, c))
}

func progressDeadline(d *appsv1.Deployment, c *appsv1.DeploymentCondition) time.Time {
	return c.LastUpdateTime.Add(time.Duration(*d.Spec.ProgressDeadlineSeconds) * time.Second)
}

func untilDeadline(d *appsv1.Deployment, c *appsv1.DeploymentCondition, now time.Time) time.Duration {
	if c == nil || c.Status == corev1.ConditionFalse || c.Reason == reasonAvailable {
		return 0
	}
	return max(time.Second, progressDeadline(d, c).Sub(now))
}

func findCondition(s appsv1.DeploymentStatus, t appsv1.DeploymentConditionType) *appsv1.DeploymentCondition {
	for i := range s.Conditions {
		if s.Conditions[i].Type == t {
			return &s.Conditions[i]
		}
	}
	return nil
}

// setCondition adds condition c to status s, or replaces the condition of its type. The transition
// time changes only with the condition's status. If renew is true, the update time changes even if
// status and reason are equal, which restarts the progress deadline.
func setCondition(s *appsv1.DeploymentStatus, c appsv1.DeploymentCondition, now time.Time, renew bool) {
	stamp := metav1.NewTime(now)
	have := findCondition(*s, c.Type)
	if have != nil && have.Status == c.Status && have.Reason == c.Reason && !renew {
		return
	}
	c.LastUpdateTime, c.LastTransitionTime = stamp, stamp
	if have != nil && have.Status == c.Status {
		c.LastTransitionTime = have.LastTransitionTime
	}
	removeCondition(s, c.Type)
	s.Conditions = append(s.Conditions, c)
}

func removeCondition(s *appsv1.DeploymentStatus, t appsv1.DeploymentConditionType) {
	s.Conditions = slices.DeleteFunc(s.Conditions, func(c appsv1.DeploymentCondition) bool { return c.Type == t })
}
