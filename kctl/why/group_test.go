package why

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// F126: a pod of a group says what the group waits for.
func TestPodsOfGroups(t *testing.T) {
	of := func(name string) func(*corev1.Pod) {
		return func(p *corev1.Pod) { p.Spec.SchedulingGroup = &corev1.PodSchedulingGroup{PodGroupName: &name} }
	}
	group := func(least int32) schedulingv1beta1.PodGroup {
		g := schedulingv1beta1.PodGroup{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "train"}}
		g.Spec.SchedulingPolicy.Gang = &schedulingv1beta1.GangSchedulingPolicy{MinCount: least}
		return g
	}
	gated := func(p *corev1.Pod) { p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "example.com/quota"}} }
	other := func(p *corev1.Pod) { p.Spec.SchedulerName = "batch" }
	gone := func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed }
	few := unfit("0/1 nodes are available: pod group train has fewer than the 3 pods that it needs.")
	world := func(least int32, mates ...*corev1.Pod) World {
		w := World{Nodes: []corev1.Node{node("w1")},
			Group: GroupObjects{Groups: []schedulingv1beta1.PodGroup{group(least)}}}
		for _, p := range append(mates, pod("a", of("train"))) {
			w.Group.Mates = append(w.Group.Mates, *p)
		}
		return w
	}
	const had = "pod group train: only 2 of 3 pods had a node"
	transcript(t, "groups", []subject{
		{"a group that is not there", world(3), pod("a", of("trian"),
			unfit("0/1 nodes are available: pod group trian does not exist."))},
		{"too few pods", world(3), pod("a", of("train"), few)},
		{"a pod that is gated, one that has ended, one of another group",
			world(3, pod("b", of("train"), gated), pod("c", of("train"), gone), pod("d", of("other"))),
			pod("a", of("train"), few)},
		{"different schedulers", world(2, pod("b", of("train"), other)), pod("a", of("train"), few)},
		{"no room for one", world(3, pod("b", of("train")), pod("c", of("train"))),
			pod("a", of("train"), asks("cpu", "8"), unfit("0/1 nodes are available: 1 Insufficient cpu. "+had+"."))},
		{"no room for another", world(3, pod("b", of("train")), pod("c", of("train"))),
			pod("a", of("train"), unfit(had+"; pod c: 0/1 nodes are available: 1 Insufficient cpu."))},
		{"others are ended for it", world(3, pod("b", of("train")), pod("c", of("train"))),
			pod("a", of("train"),
				unfit(had+"; preemption: pods of lower priority are being evicted for the group; pod c: 0/1 nodes are "+
					"available: 1 Insufficient cpu."))},
		{"groups not read", World{Unread: []string{Groups}}, pod("a", of("train"), few)},
	})
}
