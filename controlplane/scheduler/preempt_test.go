package scheduler_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/client"
)

func important(n int32) func(*v1.Pod) { return func(pod *v1.Pod) { pod.Spec.Priority = &n } }

func apart(pod *v1.Pod) {
	pod.Labels = map[string]string{"app": "web"}
	pod.Spec.Affinity =
		&v1.Affinity{
			PodAntiAffinity: &v1.PodAntiAffinity{RequiredDuringSchedulingIgnoredDuringExecution: []v1.PodAffinityTerm{
				{TopologyKey: v1.LabelHostname,
					LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}}}}}
}

// F85: one pod per host; the one too many waits, says why, and takes the place of one that goes.
func TestOnePerHost(t *testing.T) {
	b := newBed(t, nil)
	for i := range 4 {
		b.node(fmt.Sprint("w", i), "8")
	}
	b.lead()
	on := map[string]bool{}
	for i := range 4 {
		name := fmt.Sprint("p", i)
		b.pod(name, "1", apart)
		b.awaitNode(name, "")
		on[b.get(name).Spec.NodeName] = true
	}
	if len(on) != 4 {
		t.Errorf("four pods on %v", on)
	}
	b.pod("p4", "1", apart)
	b.awaitReason("p4", "0/4 nodes are available: 4 node(s) didn't match pod anti-affinity rules. preemption: 0/4 "+
		"nodes are available: 4 No preemption victims found for incoming pod.")
	was := b.get("p2").Spec.NodeName
	b.delete("p2")
	b.awaitNode("p4", was)
}

func (b *bed) delete(name string) {
	b.t.Helper()
	zero := int64(0)
	if err := client.Delete[*v1.Pod](b.ctx, b.client, "default", name,
		metav1.DeleteOptions{GracePeriodSeconds: &zero}); err != nil {
		b.t.Fatal(err)
	}
}

// A pod of higher priority takes the place of the least important ones. They say why they end, it says where it waits,
// nobody else takes the room meanwhile, and one that may not preempt waits.
func TestPreemption(t *testing.T) {
	b := newBed(t, nil)
	b.node("w1", "2")
	b.node("w2", "2")
	b.lead()
	for name, p := range map[string]int32{"a": 1, "b": 2, "c": 3, "d": 3} {
		b.pod(name, "1", important(p))
		b.awaitNode(name, "")
	}
	never := v1.PreemptNever
	b.pod("polite", "1", important(10), func(pod *v1.Pod) { pod.Spec.PreemptionPolicy = &never })
	b.awaitReason("polite", "0/2 nodes are available: 2 Insufficient cpu. preemption: not eligible due to "+
		"preemptionPolicy=Never.")
	b.delete("polite")
	victimNode := b.get("a").Spec.NodeName
	b.pod("big", "1", important(10))
	b.eventually("nomination", func() error {
		if got := b.get("big").Status.NominatedNodeName; got != victimNode {
			return fmt.Errorf("nominated to %q, want %q", got, victimNode)
		}
		return nil
	})
	var victim *v1.Pod
	b.eventually("victim", func() error {
		if victim = b.get("a"); victim.DeletionTimestamp == nil {
			return errors.New("not deleted")
		}
		return nil
	})
	if !slices.ContainsFunc(victim.Status.Conditions, func(c v1.PodCondition) bool {
		return c.Type == v1.DisruptionTarget && c.Status == v1.ConditionTrue && c.Reason == "PreemptionByScheduler" &&
			c.Message == "default-scheduler: preempting to accommodate a higher priority pod"
	}) {
		t.Errorf("conditions of the victim: %+v", victim.Status.Conditions)
	}
	b.eventually("event", func() error {
		want := fmt.Sprintf("Preempted: Preempted by pod %s on node %s", b.get("big").UID, victimNode)
		if got := b.events("a"); !slices.Contains(got, want) {
			return fmt.Errorf("events %q, want %q", got, want)
		}
		return nil
	})
	// The victim is still ending. Another one of lower priority than the pod that waits does not get the room.
	b.pod("late", "1", important(0))
	b.delete("a")
	b.awaitNode("big", victimNode)
	b.awaitReason("late", "0/2 nodes are available: 2 Insufficient cpu. preemption: 0/2 nodes are available: 2 No "+
		"preemption victims found for incoming pod.")
	for _, name := range []string{"b", "c", "d"} {
		if pod := b.get(name); pod.DeletionTimestamp != nil {
			t.Errorf("pod %s was preempted too", name)
		}
	}
	if got := b.get("big").Status.NominatedNodeName; got != "" {
		t.Errorf("the pod that is bound is still nominated to %q", got)
	}
}
