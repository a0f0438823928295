package rebalance

import (
	"fmt"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/controllers"
)

// Unsettled says why no pod of a workload may go now: it is not as it should be, or may not miss one. "" = one may.
// Pods are all that it owns, also those that are going.
func Unsettled(o api.Object, pods []*corev1.Pod) string {
	want, behind, keeps := wanted(o)
	switch {
	case o.GetDeletionTimestamp() != nil || want == 0:
		return "it has no pods to move"
	case keeps != "":
		return keeps
	case behind:
		return "it is being changed"
	}
	ready := 0
	for _, p := range pods {
		switch {
		case p.DeletionTimestamp != nil:
			return fmt.Sprintf("pod %s is still going", p.Name)
		case controllers.PodReady(p):
			ready++
		}
	}
	if ready != want || len(pods) != want {
		return fmt.Sprintf("%d of %d pods are ready", ready, want)
	}
	return ""
}

// wanted is how many pods a workload asks for, whether it is not yet what it is told to be, and why it may miss none.
func wanted(o api.Object) (want int, behind bool, keeps string) {
	number := func(n *int32) int {
		if n == nil {
			return 1
		}
		return int(*n)
	}
	switch w := o.(type) {
	case *appsv1.Deployment:
		want = number(w.Spec.Replicas)
		s := w.Status
		behind = s.ObservedGeneration < w.Generation || int(s.UpdatedReplicas) != want || int(s.AvailableReplicas) != want || int(s.Replicas) != want
		if r := w.Spec.Strategy.RollingUpdate; r != nil && r.MaxUnavailable != nil && want > 0 {
			if n, err := intstr.GetScaledValueFromIntOrPercent(r.MaxUnavailable, want, false); err != nil || n < 1 {
				keeps = fmt.Sprintf("of %d pods its maxUnavailable %s lets none be missing", want, r.MaxUnavailable)
			}
		}
	case *appsv1.ReplicaSet:
		want = number(w.Spec.Replicas)
		behind = w.Status.ObservedGeneration < w.Generation || int(w.Status.AvailableReplicas) != want
	case *appsv1.StatefulSet:
		want = number(w.Spec.Replicas)
		s := w.Status
		behind = s.ObservedGeneration < w.Generation || int(s.UpdatedReplicas) != want || int(s.AvailableReplicas) != want
	}
	return want, behind, keeps
}
