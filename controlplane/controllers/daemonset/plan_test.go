package daemonset

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"keelson.dev/keelson/controlplane/controllers/podtest"
)

var epoch = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func daemonSet(change ...func(*appsv1.DaemonSet)) *appsv1.DaemonSet {
	l := map[string]string{"app": "log"}
	s := &appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "log", UID: "set", Generation: 2},
		Spec: appsv1.DaemonSetSpec{
			Selector: &metav1.LabelSelector{MatchLabels: l},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: l}},
			UpdateStrategy: appsv1.DaemonSetUpdateStrategy{Type: appsv1.RollingUpdateDaemonSetStrategyType,
				RollingUpdate: &appsv1.RollingUpdateDaemonSet{}},
		},
	}
	for _, c := range change {
		c(s)
	}
	return s
}

func onDelete(s *appsv1.DaemonSet) {
	s.Spec.UpdateStrategy = appsv1.DaemonSetUpdateStrategy{Type: appsv1.OnDeleteDaemonSetStrategyType}
}
func minReady(s *appsv1.DaemonSet) { s.Spec.MinReadySeconds = 30 }
func away(v string) func(*appsv1.DaemonSet) {
	return func(s *appsv1.DaemonSet) {
		n := intstr.Parse(v)
		s.Spec.UpdateStrategy.RollingUpdate.MaxUnavailable = &n
	}
}
func surging(v string) func(*appsv1.DaemonSet) {
	return func(s *appsv1.DaemonSet) {
		n, none := intstr.Parse(v), intstr.FromInt32(0)
		s.Spec.UpdateStrategy.RollingUpdate.MaxSurge, s.Spec.UpdateStrategy.RollingUpdate.MaxUnavailable = &n, &none
	}
}
func onDisks(s *appsv1.DaemonSet) {
	s.Spec.Template.Spec.NodeSelector = map[string]string{"disk": "ssd"}
}
func tolerant(s *appsv1.DaemonSet) {
	s.Spec.Template.Spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
}

// node is a node with a disk label and taints such as "NoSchedule" and "NoExecute" of its own, or with a known key.
func node(name, disk string, taints ...string) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"disk": disk}}}
	for _, t := range taints {
		key, effect, ok := strings.Cut(t, ":")
		if !ok {
			key, effect = "own", t
		}
		n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: key, Effect: corev1.TaintEffect(effect)})
	}
	return n
}

// pods parses "w1:old w2:new,starting": a node, a template and a state. The default state is ready
// for an hour.
func pods(set *appsv1.DaemonSet, list string) (out []*corev1.Pod) {
	for i, f := range strings.Fields(list) {
		at, rest, _ := strings.Cut(f, ":")
		hash, state, _ := strings.Cut(rest, ",")
		p := newPod(set, podTemplate(set), hash, at)
		p.Name = fmt.Sprintf("%s-%s-%d", at, hash, i)
		p.UID = types.UID(p.Name)
		p.Spec.NodeName = at
		if state == "waiting" {
			state, p.Spec.NodeName = "starting", ""
		}
		podtest.SetState(p, state, epoch)
		out = append(out, p)
	}
	return out
}

func words(step Step) string {
	var out []string
	for _, n := range step.Create {
		out = append(out, "create "+n)
	}
	for _, l := range []struct {
		verb string
		pods []*corev1.Pod
	}{{"delete", step.Delete}, {"replace", step.Failed}} {
		for _, p := range l.pods {
			out = append(out, l.verb+" "+p.Name)
		}
	}
	if step.Again > 0 {
		out = append(out, "again "+step.Again.String())
	}
	return strings.Join(out, ", ")
}

func snapshotOf(set *appsv1.DaemonSet, nodes []*corev1.Node, pods []*corev1.Pod) Snapshot {
	return Snapshot{Set: set, Nodes: nodes, Pods: pods, Hash: "new", Now: epoch, Going: func(p *corev1.Pod) bool {
		return p.DeletionTimestamp != nil
	}}
}

func TestPlan(t *testing.T) {
	three := []*corev1.Node{node("w1", "ssd"), node("w2", "ssd"), node("w3", "hdd")}
	for name, c := range map[string]struct {
		set   *appsv1.DaemonSet
		nodes []*corev1.Node
		pods  string
		want  string
	}{
		"one for each":              {daemonSet(), three, "", "create w1, create w2, create w3"},
		"where it belongs":          {daemonSet(onDisks), three, "w1:new w3:new", "create w2, delete w3-new-1"},
		"a node that goes":          {daemonSet(), three[:1], "w1:new w9:new", ""},
		"one that is placed counts": {daemonSet(), three[:1], "w1:new,waiting", ""},
		"a taint keeps new ones away": {daemonSet(),
			[]*corev1.Node{node("w1", "", "NoSchedule"), node("w2", "", "NoSchedule")}, "w1:new", ""},
		"a taint drives out": {daemonSet(), []*corev1.Node{node("w1", "", "NoExecute")}, "w1:new",
			"delete w1-new-0"},
		"not the tolerant": {daemonSet(tolerant), []*corev1.Node{node("w1", "", "NoExecute")},
			"", "create w1"},
		"a preference is none": {daemonSet(), []*corev1.Node{node("w1", "", "PreferNoSchedule")},
			"", "create w1"},
		"states of nodes are tolerated": {daemonSet(),
			[]*corev1.Node{node("w1", "", corev1.TaintNodeNotReady+":NoExecute",
				corev1.TaintNodeUnschedulable+":NoSchedule", corev1.TaintNodeDiskPressure+":NoSchedule")},
			"", "create w1"},
		"a network that is not there": {daemonSet(),
			[]*corev1.Node{node("w1", "", corev1.TaintNodeNetworkUnavailable+":NoSchedule")}, "", ""},
		"unless it is not needed": {daemonSet(func(s *appsv1.DaemonSet) { s.Spec.Template.Spec.HostNetwork = true }),
			[]*corev1.Node{node("w1", "", corev1.TaintNodeNetworkUnavailable+":NoSchedule")}, "", "create w1"},
		"the second of two":         {daemonSet(), three[:1], "w1:new w1:new", "delete w1-new-1"},
		"an ended one":              {daemonSet(), three[:1], "w1:new,failed", "replace w1-new-0"},
		"beside one that runs":      {daemonSet(), three[:1], "w1:new,failed w1:new", "replace w1-new-0"},
		"wait for one that goes":    {daemonSet(), three[:1], "w1:old,going", ""},
		"an update begins":          {daemonSet(), three, "w1:old w2:old w3:old", "delete w1-old-0"},
		"one at a time":             {daemonSet(), three, "w1:old,going w2:old w3:old", ""},
		"until it is available":     {daemonSet(), three, "w1:new,starting w2:old w3:old", ""},
		"for long enough":           {daemonSet(minReady), three, "w1:new,fresh w2:old w3:old", "again 20s"},
		"what is broken goes first": {daemonSet(), three, "w1:old w2:old,starting w3:old", "delete w2-old-1"},
		"two of three": {daemonSet(away("50%")), three, "w1:old w2:old w3:old",
			"delete w1-old-0, delete w2-old-1"},
		"on delete":                    {daemonSet(onDelete), three[:1], "w1:old", ""},
		"a surge":                      {daemonSet(surging("1")), three, "w1:old w2:old w3:old", "create w1"},
		"that is under way":            {daemonSet(surging("1")), three, "w1:old w1:new,starting w2:old w3:old", ""},
		"that is available":            {daemonSet(surging("1")), three[:2], "w1:old w1:new w2:old", "delete w1-old-0"},
		"the old one is broken anyway": {daemonSet(surging("1")), three[:1], "w1:old,starting", "create w1"},
		"and goes at once": {daemonSet(surging("1")), three[:1], "w1:old,starting w1:new,starting",
			"delete w1-old-0"},
		"no surge, both there": {daemonSet(), three[:1], "w1:old w1:new,starting", "delete w1-old-0"},
	} {
		if got := words(PlanDaemonSet(snapshotOf(c.set, c.nodes, pods(c.set, c.pods)))); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

func TestStatus(t *testing.T) {
	set := daemonSet(onDisks, minReady)
	nodes := []*corev1.Node{node("w1", "ssd"), node("w2", "ssd"), node("w3", "ssd"), node("w4", "hdd"),
		node("w5", "ssd")}
	s, again := Status(snapshotOf(set, nodes, pods(set, "w1:old w2:new,fresh w3:new,starting w4:new")), nil)
	got := fmt.Sprintf("desired %d, current %d, mis %d, ready %d, updated %d, available %d, not %d",
		s.DesiredNumberScheduled, s.CurrentNumberScheduled,
		s.NumberMisscheduled, s.NumberReady, s.UpdatedNumberScheduled, s.NumberAvailable, s.NumberUnavailable)
	if want := "desired 4, current 3, mis 1, ready 2, updated 2, available 1, not 3"; got != want ||
		again != 20*time.Second || s.ObservedGeneration != 2 {
		t.Errorf("%s, want %s; again in %v", got, want, again)
	}
}

func TestPodIsPinned(t *testing.T) {
	set := daemonSet(onDisks)
	set.Spec.Template.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
		PreferredDuringSchedulingIgnoredDuringExecution: []corev1.PreferredSchedulingTerm{{Weight: 1}}}}
	p := newPod(set, podTemplate(set), "h", "w7")
	if nodeOf(p) != "w7" || p.Spec.NodeName != "" ||
		len(p.Spec.Affinity.NodeAffinity.PreferredDuringSchedulingIgnoredDuringExecution) != 1 ||
		p.Labels[appsv1.ControllerRevisionHashLabelKey] != "h" || p.GenerateName != "log-" ||
		len(p.Spec.Tolerations) != 6 {
		t.Errorf("%+v %+v", p.ObjectMeta, p.Spec)
	}
	if set.Spec.Template.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution != nil ||
		len(set.Spec.Template.Spec.Tolerations) != 0 {
		t.Error("the template was changed")
	}
}

// Performed step by step, while pods start, fail and disappear, an update never exceeds its bounds,
// and completes.
func TestPlanConverges(t *testing.T) {
	for seed := range uint64(300) {
		rnd := rand.New(rand.NewPCG(seed, 2))
		set := daemonSet(away(fmt.Sprint(1 + rnd.IntN(3))))
		if rnd.IntN(2) == 0 {
			set = daemonSet(surging(fmt.Sprint(1 + rnd.IntN(3))))
		}
		var nodes []*corev1.Node
		var start []string
		for i := range 1 + rnd.IntN(7) {
			name := fmt.Sprint("w", i)
			nodes = append(nodes, node(name, "ssd"))
			if rnd.IntN(4) > 0 {
				start = append(start, name+":old")
			}
		}
		all := pods(set, strings.Join(start, " "))
		for step := 0; ; step++ {
			if step == 400 {
				t.Fatalf("seed %d does not end", seed)
			}
			s := snapshotOf(set, nodes, all)
			plan := PlanDaemonSet(s)
			within(t, seed, s, plan)
			var moved bool
			all, moved = carryOut(set, all, plan, rnd, step)
			fails, lives := 20, false
			if step >= 30 {
				fails = 0
			}
			if all, lives = podtest.Live(all, epoch, rnd, fails); !moved && !lives && step > 30 && words(plan) == "" {
				break
			}
		}
		if len(all) != len(nodes) || slices.ContainsFunc(all, func(p *corev1.Pod) bool {
			return p.Labels[appsv1.ControllerRevisionHashLabelKey] != "new"
		}) {
			t.Fatalf("seed %d: %d pods on %d nodes", seed, len(all), len(nodes))
		}
	}
}

// within checks the bounds of a single step: no more available pods are deleted than permitted, and
// no node gets a second pod except by surge.
func within(t *testing.T, seed uint64, s Snapshot, plan Step) {
	t.Helper()
	places := s.podsByNode()
	surge, most := rollingUpdateBounds(s.Set, places)
	ready := func(p *corev1.Pod) bool { return p != nil && len(p.Status.Conditions) > 0 }
	down, both := 0, 0
	for _, at := range places {
		deleted := func(p *corev1.Pod) bool { return slices.Contains(plan.Delete, p) }
		is := ready(at.recent) || ready(at.old)
		stays := ready(at.recent) && !deleted(at.recent) || ready(at.old) && !deleted(at.old)
		switch {
		case !stays && is:
			down++
			if surge > 0 {
				t.Fatalf("seed %d: %s is left without an available pod: %s", seed, at.name, words(plan))
			}
		case !is:
			down++
		}
		if slices.Contains(plan.Create, at.name) && (at.old != nil || at.recent != nil) {
			if both++; surge == 0 || at.recent != nil {
				t.Fatalf("seed %d: a second pod for %s", seed, at.name)
			}
		}
	}
	taken := 0
	for _, p := range plan.Delete {
		if ready(p) {
			taken++
		}
	}
	if surge == 0 && taken > 0 && down > most && down-taken >= most {
		t.Fatalf("seed %d: %d nodes are without a pod, %d may be: %s", seed, down, most, words(plan))
	}
}

func carryOut(set *appsv1.DaemonSet, all []*corev1.Pod, plan Step, rnd *rand.Rand, step int) ([]*corev1.Pod, bool) {
	moved := false
	for _, n := range plan.Create {
		moved = true
		if rnd.IntN(4) > 0 {
			p := pods(set, n+":new,starting")[0]
			p.Name = fmt.Sprintf("%s-%d", p.Name, step)
			all = append(all, p)
		}
	}
	now := metav1.NewTime(epoch)
	for _, p := range slices.Concat(plan.Delete, plan.Failed) {
		p.DeletionTimestamp = &now
		moved = true
	}
	return all, moved
}
