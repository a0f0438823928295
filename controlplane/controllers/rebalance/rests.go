package rebalance

import (
	"fmt"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"keelson.dev/keelson/controlplane/api"
)

// Unsettled returns why no pod of workload o may be evicted now: o is not in its desired state, or
// cannot lose a pod. It returns "" if a pod may be evicted. pods are all pods of o, including
// terminating pods.
func Unsettled(o api.Object, pods []*corev1.Pod) string {
	want, behind, keeps := workloadDemand(o)
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
			return fmt.Sprintf("pod %s is still terminating", p.Name)
		case api.IsPodReady(p):
			ready++
		}
	}
	if ready != want || len(pods) != want {
		return fmt.Sprintf("%d of %d pods are ready", ready, want)
	}
	return ""
}

// workloadDemand returns how many pods workload o requests. behind reports that o has not reached
// its desired state. keeps is the reason why o cannot lose a pod, or "".
func workloadDemand(o api.Object) (want int, behind bool, keeps string) {
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
		behind = s.ObservedGeneration < w.Generation || int(s.UpdatedReplicas) != want ||
			int(s.AvailableReplicas) != want || int(s.Replicas) != want
		if r := w.Spec.Strategy.RollingUpdate; r != nil && r.MaxUnavailable != nil && want > 0 {
			if n, err := intstr.GetScaledValueFromIntOrPercent(r.MaxUnavailable, want, false); err != nil || n < 1 {
				keeps = fmt.Sprintf("with %d pods, maxUnavailable %s allows no eviction", want, r.MaxUnavailable)
			}
		}
	case *appsv1.ReplicaSet:
		want = number(w.Spec.Replicas)
		behind = w.Status.ObservedGeneration < w.Generation || int(w.Status.AvailableReplicas) != want
	case *appsv1.StatefulSet:
		want = number(w.Spec.Replicas)
		s := w.Status
		behind = s.ObservedGeneration < w.Generation || int(s.UpdatedReplicas) != want ||
			int(s.AvailableReplicas) != want
	}
	return want, behind, keeps
}
