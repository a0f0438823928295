package defaultpreemption

import (
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/scheduler/framework"
)

func newPod(name string, priority int32, labels map[string]string) *framework.PodInfo {
	return framework.NewPodInfo(&v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID(name), Labels: labels},
		Spec:       v1.PodSpec{Priority: &priority, Containers: []v1.Container{{Name: "c"}}},
	})
}

func newBudget(namespace string, allowed int32, disrupted ...string) *policyv1.PodDisruptionBudget {
	b := &policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "budget"}}
	b.Spec.Selector = &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}
	b.Status.DisruptionsAllowed = allowed
	for _, name := range disrupted {
		if b.Status.DisruptedPods == nil {
			b.Status.DisruptedPods = map[string]metav1.Time{}
		}
		b.Status.DisruptedPods[name] = metav1.Time{}
	}
	return b
}

func joinNames(pods []*framework.PodInfo) string {
	var names []string
	for _, p := range pods {
		names = append(names, p.Pod.Name)
	}
	return strings.Join(names, " ")
}

func TestBudgetsProtectPods(t *testing.T) {
	web := map[string]string{"app": "web"}
	everything := newBudget("default", 0)
	everything.Spec.Selector = &metav1.LabelSelector{}
	for name, c := range map[string]struct {
		budgets         []*policyv1.PodDisruptionBudget
		protected, free string
	}{
		"no budget": {nil, "", "a b other bare"},
		"no disruption is allowed": {[]*policyv1.PodDisruptionBudget{newBudget("default", 0)},
			"a b", "other bare"},
		"one disruption is allowed": {[]*policyv1.PodDisruptionBudget{newBudget("default", 1)}, "b",
			"a other bare"},
		"two disruptions are allowed": {[]*policyv1.PodDisruptionBudget{newBudget("default", 2)}, "",
			"a b other bare"},
		"the strictest of two counts": {[]*policyv1.PodDisruptionBudget{newBudget("default", 2),
			newBudget("default", 0)}, "a b", "other bare"},
		"a pod is disrupted already": {[]*policyv1.PodDisruptionBudget{newBudget("default", 0, "a")}, "b",
			"a other bare"},
		"a budget of another namespace": {[]*policyv1.PodDisruptionBudget{newBudget("other", 0)}, "",
			"a b other bare"},
		"an empty selector matches none": {[]*policyv1.PodDisruptionBudget{everything}, "", "a b other bare"},
	} {
		pods := []*framework.PodInfo{newPod("a", 0, web), newPod("b", 0, web),
			newPod("other", 0, map[string]string{"app": "db"}), newPod("bare", 0, nil)}
		protected, free := newLedger(c.budgets).splitProtected(pods)
		if joinNames(protected) != c.protected || joinNames(free) != c.free {
			t.Errorf("%s: protected %q, free %q, want %q and %q", name, joinNames(protected), joinNames(free),
				c.protected, c.free)
		}
	}
}

func TestBestCandidate(t *testing.T) {
	began := map[string]time.Time{"late": time.Unix(2000, 0), "early": time.Unix(1000, 0)}
	start := func(p *framework.PodInfo) time.Time { return began[p.Pod.Name] }
	victims := func(priorities ...int32) (out []*framework.PodInfo) {
		for _, p := range priorities {
			out = append(out, newPod("v", p, nil))
		}
		return out
	}
	for name, list := range map[string][]Candidate{ // the first of each list is the best
		"fewer violations": {{Node: "best", Violations: 1, Victims: victims(9, 9)},
			{Node: "n", Violations: 2, Victims: victims(1)}},
		"lower highest priority":  {{Node: "best", Victims: victims(5, 5, 5)}, {Node: "n", Victims: victims(6)}},
		"lower sum of priorities": {{Node: "best", Victims: victims(5, 1)}, {Node: "n", Victims: victims(5, 2)}},
		"fewer victims":           {{Node: "best", Victims: victims(5)}, {Node: "n", Victims: victims(5, -1)}},
		"victims that have started late": {{Node: "best", Victims: []*framework.PodInfo{newPod("late", 5, nil)}},
			{Node: "n", Victims: []*framework.PodInfo{newPod("early", 5, nil)}}},
		"the first of equal candidates": {{Node: "best", Victims: victims(5)}, {Node: "n", Victims: victims(5)}},
	} {
		if got := Best(list, start); got.Node != "best" {
			t.Errorf("%s: %s is chosen", name, got.Node)
		}
		if len(list[0].Victims) == len(list[1].Victims) && name == "the first of equal candidates" {
			continue
		}
		if got := Best([]Candidate{list[1], list[0]}, start); got.Node != "best" {
			t.Errorf("%s, in the other order: %s is chosen", name, got.Node)
		}
	}
}

func TestSearchIsBounded(t *testing.T) {
	percent, least, none := int32(50), int32(3), int32(0)
	for _, c := range []struct {
		name        string
		plugin      Plugin
		nodes, want int
	}{
		{"default, few nodes", Plugin{}, 20, 100},
		{"default, many nodes", Plugin{}, 5000, 500},
		{"a percentage", Plugin{Percent: &percent, Least: &least}, 20, 10},
		{"at least", Plugin{Percent: &percent, Least: &least}, 2, 3},
		{"never none", Plugin{Percent: &none, Least: &none}, 20, 1},
	} {
		if got := c.plugin.candidateCount(c.nodes); got != c.want {
			t.Errorf("%s: %d candidates, want %d", c.name, got, c.want)
		}
	}
	starts := map[int]bool{}
	for _, uid := range []string{"a", "b", "c", "d", "e", "f", "g", "h"} {
		p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{UID: types.UID(uid)}}
		at := startOffset(p, 5)
		if at < 0 || at >= 5 || at != startOffset(p, 5) {
			t.Errorf("pod %s: the search starts at %d of 5 nodes", uid, at)
		}
		starts[at] = true
	}
	if len(starts) < 2 {
		t.Error("all pods start their search at the same node")
	}
	if at := startOffset(&v1.Pod{}, 0); at != 0 {
		t.Errorf("without nodes the search starts at %d", at)
	}
}

func TestPolicyNeverPreempts(t *testing.T) {
	pod := newPod("p", 5, nil)
	never := v1.PreemptNever
	pod.Pod.Spec.PreemptionPolicy = &never
	c := framework.NewCycle(pod, framework.NewSnapshot())
	if reason := (Plugin{H: &framework.Handle{}}).ineligibleReason(c, &framework.FitError{}); reason !=
		"preemptionPolicy=Never." {
		t.Errorf("the reason is %q", reason)
	}
	pod.Pod.Spec.PreemptionPolicy = nil
	if reason := (Plugin{H: &framework.Handle{}}).ineligibleReason(c, &framework.FitError{}); reason != "" {
		t.Errorf("a pod without a policy may not preempt: %q", reason)
	}
}
