package podtopologyspread

import (
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"keelson.dev/keelson/controlplane/scheduler/framework"
)

func newPod(set map[string]string) *v1.Pod {
	return &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "p", UID: "p", Labels: set}}
}

func TestSelectorOfConstraint(t *testing.T) {
	web := &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}
	pod := newPod(map[string]string{"app": "web", "pod-template-hash": "1"})
	for name, c := range map[string]struct {
		constraint v1.TopologySpreadConstraint
		labels     labels.Set
		want       bool
	}{
		"a pod with the labels": {v1.TopologySpreadConstraint{LabelSelector: web},
			labels.Set{"app": "web", "x": "y"}, true},
		"a pod with other labels": {v1.TopologySpreadConstraint{LabelSelector: web},
			labels.Set{"app": "db"}, false},
		"no selector selects nothing": {v1.TopologySpreadConstraint{}, labels.Set{"app": "web"}, false},
		"the pod's value of a key": {v1.TopologySpreadConstraint{LabelSelector: web,
			MatchLabelKeys: []string{"pod-template-hash"}}, labels.Set{"app": "web", "pod-template-hash": "1"}, true},
		"another value of a key": {v1.TopologySpreadConstraint{LabelSelector: web,
			MatchLabelKeys: []string{"pod-template-hash"}}, labels.Set{"app": "web", "pod-template-hash": "2"}, false},
		"a key that the pod has not": {v1.TopologySpreadConstraint{LabelSelector: web,
			MatchLabelKeys: []string{"absent"}}, labels.Set{"app": "web"}, true},
		"an operator that is not valid": {v1.TopologySpreadConstraint{
			LabelSelector: &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "app",
				Operator: "Near"}}}}, labels.Set{"app": "web"}, false},
	} {
		if got := selectorOf(pod, &c.constraint).Matches(c.labels); got != c.want {
			t.Errorf("%s: selected %t, want %t", name, got, c.want)
		}
	}
}

func TestConstraintsByAction(t *testing.T) {
	pod := newPod(nil)
	domains := int32(3)
	ignore, honor := v1.NodeInclusionPolicyIgnore, v1.NodeInclusionPolicyHonor
	pod.Spec.TopologySpreadConstraints = []v1.TopologySpreadConstraint{
		{TopologyKey: "zone", MaxSkew: 2, WhenUnsatisfiable: v1.DoNotSchedule, MinDomains: &domains,
			NodeAffinityPolicy: &ignore, NodeTaintsPolicy: &honor},
		{TopologyKey: "rack", MaxSkew: 1, WhenUnsatisfiable: v1.ScheduleAnyway},
	}
	hard, soft := constraintsOf(pod, v1.DoNotSchedule), constraintsOf(pod, v1.ScheduleAnyway)
	if len(hard) != 1 || len(soft) != 1 {
		t.Fatalf("%d hard and %d soft constraints", len(hard), len(soft))
	}
	if c := hard[0]; c.key != "zone" || c.maxSkew != 2 || c.minDomains != 3 || !c.ignoreAffinity || !c.honorTaints {
		t.Errorf("the hard constraint is %+v", c)
	}
	if c := soft[0]; c.key != "rack" || c.maxSkew != 1 || c.minDomains != 1 || c.ignoreAffinity || c.honorTaints {
		t.Errorf("the soft constraint is %+v", c)
	}
}

func TestEligibleNodes(t *testing.T) {
	node := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", Labels: map[string]string{"zone": "a", "disk": "hdd"}}}
	node.Spec.Taints = []v1.Taint{{Key: "k", Effect: v1.TaintEffectNoSchedule}}
	soft := node.DeepCopy()
	soft.Spec.Taints[0].Effect = v1.TaintEffectPreferNoSchedule
	selecting := newPod(nil)
	selecting.Spec.NodeSelector = map[string]string{"disk": "ssd"}
	tolerating := newPod(nil)
	tolerating.Spec.Tolerations = []v1.Toleration{{Key: "k", Operator: v1.TolerationOpExists}}
	for name, c := range map[string]struct {
		constraint constraint
		pod        *v1.Pod
		node       *v1.Node
		keys       []string
		want       bool
	}{
		"a node with the key":                 {constraint{}, newPod(nil), node, []string{"zone"}, true},
		"a node without one of the keys":      {constraint{}, newPod(nil), node, []string{"zone", "rack"}, false},
		"a node that the pod does not select": {constraint{}, selecting, node, []string{"zone"}, false},
		"the policy ignores the affinity": {constraint{ignoreAffinity: true}, selecting, node,
			[]string{"zone"}, true},
		"a tainted node": {constraint{}, newPod(nil), node, []string{"zone"}, true},
		"the policy honors taints": {constraint{honorTaints: true}, newPod(nil), node,
			[]string{"zone"}, false},
		"the policy honors taints: a tolerated one": {constraint{honorTaints: true}, tolerating, node,
			[]string{"zone"}, true},
		"the policy honors taints: a preference": {constraint{honorTaints: true}, newPod(nil), soft,
			[]string{"zone"}, true},
	} {
		if got := c.constraint.eligibleNodes(c.pod, c.keys).Has(c.node); got != c.want {
			t.Errorf("%s: eligible %t, want %t", name, got, c.want)
		}
	}
	// Two constraints share counts exactly if they select the same nodes.
	plain, honoring := constraint{}, constraint{honorTaints: true}
	if plain.eligibleNodes(newPod(nil), []string{"zone"}).ID != plain.eligibleNodes(tolerating, []string{"zone"}).ID {
		t.Error("tolerations matter although taints are not honored")
	}
	if honoring.eligibleNodes(newPod(nil), []string{"zone"}).ID ==
		honoring.eligibleNodes(tolerating, []string{"zone"}).ID {
		t.Error("pods with different tolerations share counts")
	}
	if plain.eligibleNodes(newPod(nil), []string{"zone"}).ID == plain.eligibleNodes(selecting, []string{"zone"}).ID {
		t.Error("pods with different node selectors share counts")
	}
}

func TestDefaultConstraints(t *testing.T) {
	yes := true
	pod := newPod(map[string]string{"app": "web", "hash": "1"})
	pod.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "rs",
		Controller: &yes}}
	snap := framework.NewSnapshot()
	cycle := framework.NewCycle(framework.NewPodInfo(pod), snap)
	if got := defaultConstraints(cycle, systemConstraints, v1.ScheduleAnyway); len(got) > 0 {
		t.Errorf("a pod of nothing has %d constraints", len(got))
	}
	snap.Workloads.Services = func(*v1.Pod) []map[string]string { return []map[string]string{{"app": "web"}} }
	snap.Workloads.Owner = func(string, *metav1.OwnerReference) labels.Selector {
		return labels.SelectorFromSet(labels.Set{"hash": "1"})
	}
	got := defaultConstraints(cycle, systemConstraints, v1.ScheduleAnyway)
	if len(got) != 2 || got[0].key != v1.LabelHostname || got[0].maxSkew != 3 || got[1].key != v1.LabelTopologyZone ||
		got[1].maxSkew != 5 {
		t.Fatalf("the default constraints are %+v", got)
	}
	for _, c := range []struct {
		labels labels.Set
		want   bool
	}{{labels.Set{"app": "web", "hash": "1"}, true}, {labels.Set{"app": "web", "hash": "2"}, false},
		{labels.Set{"app": "db", "hash": "1"}, false}} {
		if selected := got[0].selector.Matches(c.labels); selected != c.want {
			t.Errorf("a pod with labels %s: selected %t, want %t", c.labels, selected, c.want)
		}
	}
	if hard := defaultConstraints(cycle, systemConstraints, v1.DoNotSchedule); len(hard) > 0 {
		t.Errorf("%d default constraints refuse nodes", len(hard))
	}
}
