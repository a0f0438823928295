// Package disruption maintains the status of PodDisruptionBudgets: how many of their pods are
// healthy, and how many evictions are allowed. The status is for users and tools. The eviction API
// computes these numbers again (apiserver/subresource).
package disruption

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/policy"
)

// disruptionLife is how long an evicted pod counts as disrupted although its deletion was not
// observed. The eviction API uses the same value.
const disruptionLife = 2 * time.Minute

// Status returns the new status of budget b. pods are the pods that b selects, and expected is the
// number of pods that their controllers request. If expected could not be determined, expectedErr
// is the error: no disruption is allowed, and the condition contains the error. again is the time
// until an evicted pod that was never deleted no longer counts as disrupted; 0 means never.
func Status(b *policyv1.PodDisruptionBudget, pods []*corev1.Pod, expected int, expectedErr error,
	now time.Time) (s policyv1.PodDisruptionBudgetStatus, again time.Duration, err error) {
	s = *b.Status.DeepCopy()
	if expectedErr != nil {
		s.DisruptionsAllowed = 0
		meta.SetStatusCondition(&s.Conditions, metav1.Condition{Type: policyv1.DisruptionAllowedCondition,
			Status: metav1.ConditionFalse, Reason: policyv1.SyncFailedReason, Message: expectedErr.Error(),
			ObservedGeneration: b.Status.ObservedGeneration, LastTransitionTime: metav1.NewTime(now)})
		return s, 0, nil
	}
	desired, err := policy.DesiredHealthy(b, expected)
	if err != nil {
		return s, 0, err
	}
	going := map[string]metav1.Time{}
	healthy := 0
	for _, p := range pods {
		if p.DeletionTimestamp != nil {
			continue // the pod already counts as disrupted
		}
		if at, spent := b.Status.DisruptedPods[p.Name]; spent {
			if left := at.Add(disruptionLife).Sub(now); left > 0 {
				going[p.Name] = at
				if again == 0 || left < again {
					again = left
				}
				continue
			}
		}
		if api.IsPodReady(p) {
			healthy++
		}
	}
	s.DisruptedPods = nil
	if len(going) > 0 {
		s.DisruptedPods = going
	}
	s.CurrentHealthy, s.DesiredHealthy, s.ExpectedPods = int32(healthy), int32(desired), int32(expected)
	s.DisruptionsAllowed = 0
	if expected > 0 {
		s.DisruptionsAllowed = int32(max(0, healthy-desired))
	}
	s.ObservedGeneration = b.Generation
	c := metav1.Condition{Type: policyv1.DisruptionAllowedCondition, Status: metav1.ConditionFalse,
		Reason:             policyv1.InsufficientPodsReason,
		ObservedGeneration: b.Generation, LastTransitionTime: metav1.NewTime(now)}
	if s.DisruptionsAllowed > 0 {
		c.Status, c.Reason = metav1.ConditionTrue, policyv1.SufficientPodsReason
	}
	meta.SetStatusCondition(&s.Conditions, c)
	return s, again, nil
}
