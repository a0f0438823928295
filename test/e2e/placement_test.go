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

// countPerNode returns the number of Ready pods of an app on each node, and the pods without a
// node.
func (w testNamespace) countPerNode(app string) (on map[string]int, waiting []string) {
	w.Helper()
	on = map[string]int{}
	for _, p := range w.livingPods(app) {
		switch {
		case p.Spec.NodeName == "":
			waiting = append(waiting, p.Name)
		case podIsReady(&p):
			on[p.Spec.NodeName]++
		}
	}
	return on, waiting
}

// F85 F87: of five replicas that stay apart from one another, each of the three workers runs one; the others wait and
// say why.
func TestOneReplicaPerHost(t *testing.T) {
	w := newNamespace(t)
	d := webDeployment("apart", 5)
	d.Spec.Template.Spec.Affinity = &v1.Affinity{
		PodAntiAffinity: &v1.PodAntiAffinity{RequiredDuringSchedulingIgnoredDuringExecution: []v1.PodAffinityTerm{
			{TopologyKey: v1.LabelHostname, LabelSelector: d.Spec.Selector}}}}
	w.createWeb(d)
	var waiting []string
	testenv.Eventually(w, soon, func() error {
		var on map[string]int
		on, waiting = w.countPerNode("apart")
		if len(on) != 3 || len(waiting) != 2 || slices.Max([]int{on["w1"], on["w2"], on["w3"]}) != 1 {
			return fmt.Errorf("ready on %v, waiting %v", on, waiting)
		}
		return nil
	})
	want := "0/3 nodes are available: 3 node(s) didn't match pod anti-affinity rules. preemption: 0/3 nodes are " +
		"available: 3 No preemption victims found for incoming pod."
	for _, name := range waiting {
		w.awaitEvent(name, "FailedScheduling", want)
	}
}

// F84: six replicas with a skew of one are two on each of the three workers.
func TestReplicasAreSpread(t *testing.T) {
	w := newNamespace(t)
	d := webDeployment("even", 6)
	d.Spec.Template.Spec.TopologySpreadConstraints = []v1.TopologySpreadConstraint{{MaxSkew: 1,
		TopologyKey:       v1.LabelHostname,
		WhenUnsatisfiable: v1.DoNotSchedule, LabelSelector: d.Spec.Selector,
		MatchLabelKeys: []string{"pod-template-hash"}}}
	w.createWeb(d)
	w.awaitReplicas("even", 6)
	if on, _ := w.countPerNode("even"); on["w1"] != 2 || on["w2"] != 2 || on["w3"] != 2 {
		t.Errorf("ready on %v, want two on each", on)
	}
}

// majorityOfWorker returns three quarters of a worker's allocatable CPU, so that one such pod fits
// on each worker.
func (w testNamespace) majorityOfWorker() v1.ResourceList {
	w.Helper()
	n, err := w.cs.CoreV1().Nodes().Get(context.Background(), "w1", metav1.GetOptions{})
	if err != nil {
		w.Fatal(err)
	}
	return v1.ResourceList{v1.ResourceCPU: *resource.NewMilliQuantity(n.Status.Allocatable.Cpu().MilliValue()*3/4,
		resource.DecimalSI)}
}

// A gang of three with resources for only one: no pod gets a node, and each reports the reason.
// When resources are available, all pods are scheduled. F57: until then no worker has a cgroup of
// them.
func TestGang(t *testing.T) {
	w := newNamespace(t)
	ctx := context.Background()
	large := func(name string) *v1.Pod {
		p := sleeperPod(name)
		p.Spec.Containers[0].Resources.Requests = w.majorityOfWorker()
		return p
	}
	before := w.createPod(large("before"))
	w.awaitPod("before", requireReady)
	if len(findCgroups(t, "", before.UID)) == 0 {
		t.Error("a pod that runs has no cgroup")
	}
	groups := w.cs.SchedulingV1beta1().PodGroups(w.ns)
	if _, err := groups.Create(ctx, &schedulingv1beta1.PodGroup{ObjectMeta: metav1.ObjectMeta{Name: "gang"},
		Spec: schedulingv1beta1.PodGroupSpec{
			SchedulingPolicy: schedulingv1beta1.PodGroupSchedulingPolicy{
				Gang: &schedulingv1beta1.GangSchedulingPolicy{MinCount: 3}}}}, metav1.CreateOptions{}); err != nil {
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
		p.Spec.SchedulingGroup = &v1.PodSchedulingGroup{PodGroupName: new("gang")}
		gang = append(gang, w.createPod(p))
	}
	// The first pods report that the gang has too few pods; the last message counts all of them.
	for i := range 3 {
		w.awaitPod(fmt.Sprint("gang-", i), func(p *v1.Pod) error {
			for _, c := range p.Status.Conditions {
				if c.Type == v1.PodScheduled && strings.Contains(c.Message,
					"pod group gang: only 2 of 3 pods had a node") {
					return nil
				}
			}
			return fmt.Errorf("its conditions are %+v", p.Status.Conditions)
		})
	}
	if on, waiting := w.countPerNode("gang"); len(waiting) != 3 {
		t.Errorf("ready on %v, waiting %v, though there is no room for all", on, waiting)
	}
	for _, p := range gang {
		if found := findCgroups(t, "", p.UID); len(found) > 0 {
			t.Errorf("pod %s has no node, and cgroups %q", p.Name, found)
		}
	}
	testenv.Eventually(w, soon, func() error { // which is written after the conditions of its pods
		if c := placed(); c.Status != metav1.ConditionFalse {
			return fmt.Errorf("the group's status is %+v", c)
		}
		return nil
	})
	if err := w.cs.CoreV1().Pods(w.ns).Delete(ctx, "before",
		metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))}); err != nil {
		t.Fatal(err)
	}
	w.awaitReplicas("gang", 3)
	if on, _ := w.countPerNode("gang"); on["w1"] != 1 || on["w2"] != 1 || on["w3"] != 1 {
		t.Errorf("ready on %v", on)
	}
	testenv.Eventually(w, soon, func() error {
		if c := placed(); c.Status != metav1.ConditionTrue {
			return fmt.Errorf("the group's status is %+v", c)
		}
		return nil
	})
}

// A pod of a high PriorityClass preempts a pod without priority, which gets an event.
func TestPreemption(t *testing.T) {
	w := newNamespace(t)
	ctx := context.Background()
	class := w.ns + "-important"
	if _, err := w.cs.SchedulingV1().PriorityClasses().Create(ctx, &schedulingv1.PriorityClass{
		ObjectMeta: metav1.ObjectMeta{Name: class}, Value: 1000}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = w.cs.SchedulingV1().PriorityClasses().Delete(ctx, class, metav1.DeleteOptions{}) })
	most := w.majorityOfWorker()
	greedy := func(name, class string) *v1.Pod {
		p := sleeperPod(name)
		p.Spec.PriorityClassName = class
		p.Spec.NodeSelector = map[string]string{v1.LabelHostname: "w1"}
		p.Spec.Containers[0].Resources.Requests = most
		return p
	}
	w.createPod(greedy("low", ""))
	w.awaitPod("low", requireReady)
	p := w.createPod(greedy("high", class))
	w.awaitPod("high", requireReady)
	want := fmt.Sprintf("Preempted by pod %s on node w1", p.UID)
	if m := w.awaitEvent("low", "Preempted"); m != want {
		t.Errorf("event of the victim: %q, want %q", m, want)
	}
	if left := w.livingPods("low"); len(left) != 0 {
		t.Errorf("the victim is still there: %+v", left[0].Status)
	}
}
