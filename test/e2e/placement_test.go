package e2e

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/test/testenv"
)

// perNode counts the pods of an app that are Ready on each node, and lists those without a node.
func (w world) perNode(app string) (on map[string]int, waiting []string) {
	w.Helper()
	on = map[string]int{}
	for _, p := range w.pods(app) {
		switch {
		case p.Spec.NodeName == "":
			waiting = append(waiting, p.Name)
		case ready(&p):
			on[p.Spec.NodeName]++
		}
	}
	return on, waiting
}

// F85 F87: of five replicas that stay apart from one another, each of the three workers runs one; the others wait and
// say why.
func TestOneReplicaPerHost(t *testing.T) {
	w := begin(t)
	d := web("apart", 5)
	d.Spec.Template.Spec.Affinity = &v1.Affinity{PodAntiAffinity: &v1.PodAntiAffinity{RequiredDuringSchedulingIgnoredDuringExecution: []v1.PodAffinityTerm{
		{TopologyKey: v1.LabelHostname, LabelSelector: d.Spec.Selector}}}}
	w.createWeb(d)
	var waiting []string
	testenv.Eventually(w, soon, func() error {
		var on map[string]int
		on, waiting = w.perNode("apart")
		if len(on) != 3 || len(waiting) != 2 || slices.Max([]int{on["w1"], on["w2"], on["w3"]}) != 1 {
			return fmt.Errorf("ready on %v, waiting %v", on, waiting)
		}
		return nil
	})
	want := "0/3 nodes are available: 3 node(s) didn't match pod anti-affinity rules. preemption: 0/3 nodes are available: 3 No preemption victims found for incoming pod."
	for _, name := range waiting {
		w.waitEvent(name, "FailedScheduling", want)
	}
}

// F84: six replicas with a skew of one are two on each of the three workers.
func TestReplicasAreSpread(t *testing.T) {
	w := begin(t)
	d := web("even", 6)
	d.Spec.Template.Spec.TopologySpreadConstraints = []v1.TopologySpreadConstraint{{MaxSkew: 1, TopologyKey: v1.LabelHostname,
		WhenUnsatisfiable: v1.DoNotSchedule, LabelSelector: d.Spec.Selector, MatchLabelKeys: []string{"pod-template-hash"}}}
	w.createWeb(d)
	w.waitReplicas("even", 6)
	if on, _ := w.perNode("even"); on["w1"] != 2 || on["w2"] != 2 || on["w3"] != 2 {
		t.Errorf("ready on %v, want two on each", on)
	}
}

// most is more than half of what a worker has, so that one such pod fits on each.
func (w world) most() v1.ResourceList {
	w.Helper()
	n, err := w.cs.CoreV1().Nodes().Get(context.Background(), "w1", metav1.GetOptions{})
	if err != nil {
		w.Fatal(err)
	}
	return v1.ResourceList{v1.ResourceCPU: *resource.NewMilliQuantity(n.Status.Allocatable.Cpu().MilliValue()*3/4, resource.DecimalSI)}
}

// Of a gang of three, for which there is room but for one, no pod gets a node, and each says why; when the room is there,
// all do. F57: until then no worker has a cgroup of theirs.
func TestGang(t *testing.T) {
	w := begin(t)
	ctx := context.Background()
	large := func(name string) *v1.Pod {
		p := sleeper(name)
		p.Spec.Containers[0].Resources.Requests = w.most()
		return p
	}
	before := w.createPod(large("before"))
	w.waitPod("before", isReady)
	if len(cgroupsOf(t, "", before.UID)) == 0 {
		t.Error("a pod that runs has no cgroup")
	}
	groups := w.cs.SchedulingV1beta1().PodGroups(w.ns)
	if _, err := groups.Create(ctx, &schedulingv1beta1.PodGroup{ObjectMeta: metav1.ObjectMeta{Name: "gang"}, Spec: schedulingv1beta1.PodGroupSpec{
		SchedulingPolicy: schedulingv1beta1.PodGroupSchedulingPolicy{Gang: &schedulingv1beta1.GangSchedulingPolicy{MinCount: 3}}}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	placed := func() metav1.Condition {
		g, err := groups.Get(ctx, "gang", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if c := meta.FindStatusCondition(g.Status.Conditions, schedulingv1beta1.PodGroupInitiallyScheduled); c != nil {
			return *c
		}
		return metav1.Condition{}
	}
	var gang []*v1.Pod
	for i := range 3 {
		p := large(fmt.Sprint("gang-", i))
		p.Labels = map[string]string{"app": "gang"}
		p.Spec.SchedulingGroup = &v1.PodSchedulingGroup{PodGroupName: ptr("gang")}
		gang = append(gang, w.createPod(p))
	}
	// The first pods to come are told that there are too few of them; what is told last is of them all.
	for i := range 3 {
		w.waitPod(fmt.Sprint("gang-", i), func(p *v1.Pod) error {
			for _, c := range p.Status.Conditions {
				if c.Type == v1.PodScheduled && strings.Contains(c.Message, "pod group gang: only 2 of 3 pods had a node") {
					return nil
				}
			}
			return fmt.Errorf("its conditions are %+v", p.Status.Conditions)
		})
	}
	if on, waiting := w.perNode("gang"); len(waiting) != 3 {
		t.Errorf("ready on %v, waiting %v, though there is no room for all", on, waiting)
	}
	for _, p := range gang {
		if found := cgroupsOf(t, "", p.UID); len(found) > 0 {
			t.Errorf("pod %s has no node, and cgroups %q", p.Name, found)
		}
	}
	testenv.Eventually(w, soon, func() error { // which is written after what its pods are told
		if c := placed(); c.Status != metav1.ConditionFalse {
			return fmt.Errorf("the group says %+v", c)
		}
		return nil
	})
	if err := w.cs.CoreV1().Pods(w.ns).Delete(ctx, "before", metav1.DeleteOptions{GracePeriodSeconds: ptr(int64(0))}); err != nil {
		t.Fatal(err)
	}
	w.waitReplicas("gang", 3)
	if on, _ := w.perNode("gang"); on["w1"] != 1 || on["w2"] != 1 || on["w3"] != 1 {
		t.Errorf("ready on %v", on)
	}
	testenv.Eventually(w, soon, func() error {
		if c := placed(); c.Status != metav1.ConditionTrue {
			return fmt.Errorf("the group says %+v", c)
		}
		return nil
	})
}

// A pod of an important PriorityClass takes the place of one without, which is told of it.
func TestPreemption(t *testing.T) {
	w := begin(t)
	ctx := context.Background()
	class := w.ns + "-important"
	if _, err := w.cs.SchedulingV1().PriorityClasses().Create(ctx, &schedulingv1.PriorityClass{
		ObjectMeta: metav1.ObjectMeta{Name: class}, Value: 1000}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = w.cs.SchedulingV1().PriorityClasses().Delete(ctx, class, metav1.DeleteOptions{}) })
	most := w.most()
	greedy := func(name, class string) *v1.Pod {
		p := sleeper(name)
		p.Spec.PriorityClassName = class
		p.Spec.NodeSelector = map[string]string{v1.LabelHostname: "w1"}
		p.Spec.Containers[0].Resources.Requests = most
		return p
	}
	w.createPod(greedy("low", ""))
	w.waitPod("low", isReady)
	p := w.createPod(greedy("high", class))
	w.waitPod("high", isReady)
	want := fmt.Sprintf("Preempted by pod %s on node w1", p.UID)
	if m := w.waitEvent("low", "Preempted"); m != want {
		t.Errorf("event of the victim: %q, want %q", m, want)
	}
	if left := w.pods("low"); len(left) != 0 {
		t.Errorf("the victim is still there: %+v", left[0].Status)
	}
}
