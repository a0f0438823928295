// Package replicaset maintains the number of pods that a ReplicaSet requests.
package replicaset

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// Scaling is the result of PlanScaling: pods to create or to delete. At most one field is set.
type Scaling struct {
	Create int
	Delete []*corev1.Pod
}

// PlanScaling returns the change that gives rs the desired number of active pods. related counts,
// by node, the pods of all ReplicaSets of the same Deployment. Of two otherwise equal pods, the pod
// on the node with more related pods is deleted first.
func PlanScaling(rs *appsv1.ReplicaSet, active []*corev1.Pod, related map[string]int, now time.Time) Scaling {
	if rs.DeletionTimestamp != nil {
		return Scaling{}
	}
	diff := len(active) - int(replicasOrDefault(rs))
	switch {
	case diff < 0:
		return Scaling{Create: -diff}
	case diff > 0:
		return Scaling{Delete: rankForDeletion(active, related, now)[:diff]}
	}
	return Scaling{}
}

func replicasOrDefault(rs *appsv1.ReplicaSet) int32 {
	if rs.Spec.Replicas == nil {
		return 1
	}
	return *rs.Spec.Replicas
}

// deletionCost returns the value of the annotation pod-deletion-cost of pod p. Pods with a lower
// cost are deleted first.
func deletionCost(p *corev1.Pod) int {
	v, ok := p.Annotations[corev1.PodDeletionCost]
	if !ok {
		return 0
	}
	var n int
	if _, err := fmt.Sscanf(v, "%d", &n); err != nil {
		return 0
	}
	return n
}

var phaseRank = map[corev1.PodPhase]int{corev1.PodPending: 0, corev1.PodUnknown: 1, corev1.PodRunning: 2}

// rankForDeletion returns pods in the order in which they are deleted. The criteria are, in this
// order: unbound, pending, not ready, lower deletion cost, more related pods on the node, ready for
// a shorter time, more restarts, newer. Times are compared by their order of magnitude, so that
// among pods of about the same age the newest is not always chosen.
func rankForDeletion(pods []*corev1.Pod, related map[string]int, now time.Time) []*corev1.Pod {
	pods = slices.Clone(pods)
	slices.SortStableFunc(pods, func(a, b *corev1.Pod) int {
		return cmp.Or(
			engine.TrueFirst(a.Spec.NodeName == "", b.Spec.NodeName == ""),
			cmp.Compare(phaseRank[a.Status.Phase], phaseRank[b.Status.Phase]),
			engine.TrueFirst(!api.IsPodReady(a), !api.IsPodReady(b)),
			cmp.Compare(deletionCost(a), deletionCost(b)),
			cmp.Compare(related[b.Spec.NodeName], related[a.Spec.NodeName]),
			cmp.Compare(ageMagnitude(now.Sub(readySince(a, now))), ageMagnitude(now.Sub(readySince(b, now)))),
			cmp.Compare(maxRestarts(b), maxRestarts(a)),
			cmp.Compare(ageMagnitude(now.Sub(a.CreationTimestamp.Time)),
				ageMagnitude(now.Sub(b.CreationTimestamp.Time))),
			cmp.Compare(a.UID, b.UID),
		)
	})
	return pods
}

// ageMagnitude returns the binary logarithm of age d in seconds.
func ageMagnitude(d time.Duration) int {
	n := 0
	for s := int64(d / time.Second); s > 0; s >>= 1 {
		n++
	}
	return n
}

func readySince(p *corev1.Pod, now time.Time) time.Time {
	if c := api.PodCondition(p, corev1.PodReady); c != nil && c.Status == corev1.ConditionTrue {
		return c.LastTransitionTime.Time
	}
	return now
}

func maxRestarts(p *corev1.Pod) int32 {
	var n int32
	for _, c := range p.Status.ContainerStatuses {
		n = max(n, c.RestartCount)
	}
	return n
}

// Status returns the new status of rs. active are its active pods and terminating is the number of
// its terminating pods. failure is the error of creating or deleting pods in this reconcile, or
// nil. again is the time until a ready pod becomes available.
func Status(rs *appsv1.ReplicaSet, active []*corev1.Pod, terminating int32, failure error, now time.Time) (
	s appsv1.ReplicaSetStatus, again time.Duration,
) {
	s = *rs.Status.DeepCopy()
	s.Replicas, s.FullyLabeledReplicas, s.ReadyReplicas, s.AvailableReplicas = int32(len(active)), 0, 0, 0
	s.ObservedGeneration, s.TerminatingReplicas = rs.Generation, &terminating
	template := labels.SelectorFromSet(rs.Spec.Template.Labels)
	for _, p := range active {
		if template.Matches(labels.Set(p.Labels)) {
			s.FullyLabeledReplicas++
		}
		if !api.IsPodReady(p) {
			continue
		}
		s.ReadyReplicas++
		ok, wait := engine.IsPodAvailable(p, rs.Spec.MinReadySeconds, now)
		if ok {
			s.AvailableReplicas++
		} else if wait > 0 && (again == 0 || wait < again) {
			again = wait
		}
	}
	s.Conditions = failureCondition(rs, len(active), failure, now)
	return s, again
}

// failureCondition returns the conditions of rs, with condition ReplicaFailure only if failure is
// not nil.
func failureCondition(rs *appsv1.ReplicaSet, active int, failure error, now time.Time) []appsv1.ReplicaSetCondition {
	var out []appsv1.ReplicaSetCondition
	var have *appsv1.ReplicaSetCondition
	for i, c := range rs.Status.Conditions {
		if c.Type == appsv1.ReplicaSetReplicaFailure {
			have = &rs.Status.Conditions[i]
			continue
		}
		out = append(out, c)
	}
	if failure == nil {
		return out
	}
	if have != nil {
		return append(out, *have)
	}
	reason := "FailedCreate"
	if active > int(replicasOrDefault(rs)) {
		reason = "FailedDelete"
	}
	return append(out, appsv1.ReplicaSetCondition{
		Type: appsv1.ReplicaSetReplicaFailure, Status: corev1.ConditionTrue,
		LastTransitionTime: metav1.NewTime(now), Reason: reason, Message: failure.Error(),
	})
}

func statusEqual(a, b appsv1.ReplicaSetStatus) bool { return equality.Semantic.DeepEqual(a, b) }
