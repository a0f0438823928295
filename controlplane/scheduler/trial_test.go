package scheduler

import (
	"reflect"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/scheduler/config"
	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// What is said of a pod that runs is what the scheduler would do with it, and asking changes nothing.
func TestTrial(t *testing.T) {
	c := newCluster(framework.Volumes{}, nil)
	for _, name := range []string{"n1", "n2", "n3"} {
		n := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{v1.LabelHostname: name}}}
		small(n) // three cores
		switch name {
		case "n2":
			n.Spec.Taints = []v1.Taint{{Key: "t", Value: "x", Effect: v1.TaintEffectNoSchedule}}
		case "n3":
			n.Spec.Unschedulable = true
		}
		c.setNode(n)
	}
	place := func(name, node string, change ...func(*v1.Pod)) *v1.Pod {
		pod := testPod(name, change...)
		pod.Labels, pod.Spec.NodeName = map[string]string{"app": name}, node
		c.addBoundPod(pod)
		return pod
	}
	rests, tainted, cordoned := place("rests", "n1"), place("tainted", "n2"), place("cordoned", "n3")
	tolerant := place("tolerant", "n1", func(pod *v1.Pod) {
		pod.Spec.Tolerations = []v1.Toleration{{Operator: v1.TolerationOpExists}}
	})
	other := place("other", "n1", func(pod *v1.Pod) { pod.Spec.SchedulerName = "theirs" })
	own, err := newProfiles(config.Default(), func() *framework.Handle { return &framework.Handle{} }, nil)
	if err != nil {
		t.Fatal(err)
	}
	trial := newTrial(own, c.copySnapshot())
	for range 2 {
		for _, want := range []struct {
			pod *v1.Pod
			Evaluation
		}{
			{rests, Evaluation{Best: []string{"n1"}, WithPod: 100, WithoutPod: 200. / 3, InBest: 100}},
			{tainted, Evaluation{Refusal: "node(s) had untolerated taint {t: x}"}}, // and n1 is full
			{cordoned, Evaluation{SkipReason: "its node is cordoned"}},
			{other, Evaluation{SkipReason: "another scheduler is responsible for it"}},
			{testPod("elsewhere"), Evaluation{SkipReason: "it is not on a known node"}},
		} {
			got, err := trial.Evaluate(t.Context(), want.pod)
			if want.pod == tainted {
				got.WithPod, got.WithoutPod = 0, 0
			}
			if err != nil || !reflect.DeepEqual(got, want.Evaluation) {
				t.Errorf("%s: %+v, %v; want %+v", want.pod.Name, got, err, want.Evaluation)
			}
		}
	}
	if got, err := trial.Evaluate(t.Context(), tolerant); err != nil || got.Refusal != "" || got.Gain <= 0 ||
		got.InBest != 200./3 {
		t.Errorf("tolerant: %+v, %v", got, err)
	}
	beside := place("beside", "n1", func(pod *v1.Pod) {
		pod.Spec.Affinity =
			&v1.Affinity{
				PodAffinity: &v1.PodAffinity{RequiredDuringSchedulingIgnoredDuringExecution: []v1.PodAffinityTerm{
					{TopologyKey: v1.LabelHostname,
						LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "tolerant"}}}}}}
	})
	c.removePod(other.UID)
	trial = newTrial(own, c.copySnapshot())
	if harmed, err := trial.FindHarmedPod(t.Context(), tolerant, "n2"); err != nil || harmed != "default/"+beside.Name {
		t.Errorf("the move of one that another must be beside harms %q, %v", harmed, err)
	}
	if harmed, err := trial.FindHarmedPod(t.Context(), rests, "n2"); err != nil || harmed != "" {
		t.Errorf("the move of another harms %q, %v", harmed, err)
	}
	if _, err := trial.FindHarmedPod(t.Context(), rests, "n1"); err == nil {
		t.Error("a move to where the pod is")
	}
}
