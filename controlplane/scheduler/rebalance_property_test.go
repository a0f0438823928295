package scheduler

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/controllers/rebalance"
	"keelson.dev/keelson/controlplane/scheduler/framework"
	"keelson.dev/keelson/controlplane/scheduler/plugins"
)

// asTrial is what the controller sees of a trial.
type asTrial struct{ *Trial }

func (t asTrial) Evaluate(ctx context.Context, pod *v1.Pod) (rebalance.Verdict, error) {
	v, err := t.Trial.Evaluate(ctx, pod)
	return rebalance.Verdict(v), err
}

// shifting is a small cluster whose pods are moved.
type shifting struct {
	t       *testing.T
	d       dice
	seed    uint64
	w       *twin
	c       *cluster
	profile *framework.Profile
	owners  map[types.UID]*appsv1.ReplicaSet
	asking  map[types.UID]bool
	budgets map[types.UID]*policyv1.PodDisruptionBudget // of workloads
	serial  int
	ranks   map[string]int
}

const longAgo = 1000 // seconds

func newShifting(t *testing.T, seed uint64, ranks map[string]int) *shifting {
	p, err := framework.NewProfile(plugins.Default(&framework.Handle{})...)
	if err != nil {
		t.Fatal(err)
	}
	s := &shifting{t: t, d: dice{rand.New(rand.NewPCG(seed, 32))}, seed: seed, w: newTwin(),
		c:       newCluster(framework.Volumes{}, nil),
		profile: p, owners: map[types.UID]*appsv1.ReplicaSet{}, asking: map[types.UID]bool{},
		budgets: map[types.UID]*policyv1.PodDisruptionBudget{}, ranks: ranks}
	for i := range 2 + s.d.IntN(4) {
		s.node(fmt.Sprint("n", i+1))
	}
	for i := range 2 + s.d.IntN(4) {
		rs := &appsv1.ReplicaSet{ObjectMeta: metav1.ObjectMeta{Namespace: "one", Name: fmt.Sprint("set", i),
			UID: types.UID(fmt.Sprint("set", i))}}
		s.owners[rs.UID], s.asking[rs.UID] = rs, s.d.often(80)
		like := s.d.pod()
		like.Labels["set"] = rs.Name
		if s.d.often(40) {
			s.budgets[rs.UID] = &policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Namespace: rs.Namespace,
				Name: rs.Name},
				Spec: policyv1.PodDisruptionBudgetSpec{
					Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"set": rs.Name}}},
				Status: policyv1.PodDisruptionBudgetStatus{DisruptionsAllowed: int32(s.d.IntN(2))}}
		}
		for range 1 + s.d.IntN(4) {
			s.place(like, rs)
		}
	}
	return s
}

func (s *shifting) node(name string) {
	n := s.d.node(name)
	for key, as := range map[string]string{"zone": v1.LabelTopologyZone} {
		if z, ok := n.Labels[key]; ok && s.d.often(50) {
			n.Labels[as] = z
		}
	}
	s.w.nodes[name] = n
	s.c.setNode(n)
}

// place makes one more pod of a workload where the scheduler has it; "" = nowhere.
func (s *shifting) place(like *v1.Pod, rs *appsv1.ReplicaSet) string {
	pod := like.DeepCopy()
	s.serial++
	pod.Name = fmt.Sprintf("%s-%d", rs.Name, s.serial)
	pod.UID, pod.Spec.NodeName, pod.Namespace = types.UID(pod.Name), "", rs.Namespace
	pod.OwnerReferences = []metav1.OwnerReference{
		*metav1.NewControllerRef(rs, appsv1.SchemeGroupVersion.WithKind("ReplicaSet"))}
	pod.Status.Conditions = []v1.PodCondition{{Type: v1.PodReady, Status: v1.ConditionTrue,
		LastTransitionTime: metav1.Unix(0, 0)}}
	res, err := s.profile.Schedule(s.t.Context(), framework.NewCycle(framework.NewPodInfo(pod), s.c.takeSnapshot()),
		framework.Options{Rand: s.d.Rand})
	if err != nil {
		return ""
	}
	pod.Spec.NodeName = res.Node
	s.w.pods[pod.UID] = pod
	s.c.addBoundPod(pod)
	return res.Node
}

func (s *shifting) workloads() (out []rebalance.Workload) {
	for _, uid := range slices.Sorted(maps.Keys(s.owners)) {
		if !s.asking[uid] {
			continue
		}
		w := rebalance.Workload{Kind: "ReplicaSet", Object: s.owners[uid]}
		for _, pod := range s.w.pods {
			if metav1.IsControlledBy(pod, s.owners[uid]) {
				w.Pods = append(w.Pods, pod)
			}
		}
		slices.SortFunc(w.Pods, func(a, b *v1.Pod) int {
			return int(a.Name[len(a.Name)-1]) - int(b.Name[len(b.Name)-1])
		})
		out = append(out, w)
	}
	return out
}

// misplaced are the pods that their nodes would not take again, and their names.
func (s *shifting) misplaced() map[string]bool {
	out := map[string]bool{}
	for uid, pod := range s.w.pods {
		if n := s.w.nodes[pod.Spec.NodeName]; n != nil && !s.w.without(map[types.UID]bool{uid: true}).fits(pod, n) {
			out[pod.Name] = true
		}
	}
	return out
}

// uneven is how the workload's pods lie over domains: the sum of squares.
func uneven(pods []*v1.Pod, of func(node string) string) int {
	at, sum := map[string]int{}, 0
	for _, pod := range pods {
		at[of(pod.Spec.NodeName)]++
	}
	for _, n := range at {
		sum += n * n
	}
	return sum
}

func (s *shifting) zone(node string) string { return s.w.nodes[node].Labels[v1.LabelTopologyZone] }

// full is how much of a node's processors is asked for, in hundredths.
func (s *shifting) full(node string) float64 {
	cpu := int64(0)
	for _, pod := range s.w.pods {
		if pod.Spec.NodeName == node {
			cpu += cpuOf(pod)
		}
	}
	return 100 * float64(cpu) / float64(s.w.nodes[node].Status.Allocatable.Cpu().MilliValue())
}

// step moves one pod and looks at what became of the cluster; false when it is at rest.
func (s *shifting) step() bool {
	snap := newTrial(singleProfile(s.profile), s.c.copySnapshot())
	now := rebalance.Surroundings{Now: time.Unix(longAgo, 0), Interval: time.Minute, Zone: s.zone,
		Budgets: slices.Collect(maps.Values(s.budgets))}
	m, err := rebalance.Choose(s.t.Context(), asTrial{snap}, s.workloads(), now)
	if err != nil {
		s.t.Fatalf("seed %d: %v", s.seed, err)
	}
	if m == nil {
		return false
	}
	before, from := s.misplaced(), m.Pod.Spec.NodeName
	owner := metav1.GetControllerOf(m.Pod).UID
	if b := s.budgets[owner]; !s.asking[owner] || b != nil && b.Status.DisruptionsAllowed == 0 {
		s.t.Fatalf("seed %d: %s was chosen, which does not ask or has a budget that allows nothing", s.seed, m.Pod.Name)
	}
	was, full := m.Workload.Pods, s.full(from)
	delete(s.w.pods, m.Pod.UID)
	s.c.removePod(m.Pod.UID)
	to := s.place(m.Pod, s.owners[owner])
	if to == "" || to == from {
		s.t.Fatalf("seed %d: %s left %s for %s because %s, and is at %q", s.seed, m.Pod.Name, from, m.To, m.Why, to)
	}
	after := s.misplaced()
	for name := range after {
		if !before[name] {
			s.t.Errorf("seed %d: %s moved from %s to %s because %s: now %s is misplaced", s.seed, m.Pod.Name, from,
				to, m.Why, name)
		}
	}
	kind := "rule"
	if !before[m.Pod.Name] {
		kind = "evenness"
		is := slices.Clone(was)
		moved := m.Pod.DeepCopy()
		moved.Spec.NodeName = to
		is[slices.Index(is, m.Pod)] = moved
		node := func(n string) string { return n }
		zones := uneven(is, s.zone) - uneven(was, s.zone)
		nodes := uneven(is, node) - uneven(was, node)
		if zones > 0 || zones == 0 && nodes > 0 {
			s.t.Errorf("seed %d: %s moved from %s to %s because %s: its like are less even: %+d over zones, %+d over "+
				"nodes", s.seed, m.Pod.Name, from, to, m.Why, zones, nodes)
		}
		if zones == 0 && nodes == 0 {
			kind = "room"
			if is := s.full(to); full-is < rebalance.MinFuller {
				s.t.Errorf("seed %d: %s moved from %s, %.0f%% full, to %s, which is %.0f%% full with it", s.seed,
					m.Pod.Name, from, full, to, is)
			}
		}
	} else if len(after) >= len(before) {
		s.t.Errorf("seed %d: %s moved by a rule, and as many pods are misplaced", s.seed, m.Pod.Name)
	}
	s.ranks[kind]++
	return true
}

// Whatever nodes do, a cluster that does not change any more comes to rest: no pod goes back and forth. No move
// leaves another pod where its rules would not have it, or a workload's pods less even over zones and nodes, or breaks a
// disruption budget.
func TestRebalancingComesToRest(t *testing.T) {
	const clusters, most = 1500, 60
	ranks := map[string]int{}
	longest := 0
	for seed := range uint64(clusters) {
		s := newShifting(t, seed, ranks)
		for range 3 { // nodes come, and change
			s.node(fmt.Sprint("n", 1+s.d.IntN(6)))
			moves := 0
			for s.step() {
				if moves++; moves > most {
					t.Fatalf("seed %d: %d moves, and no end", seed, moves)
				}
				if t.Failed() {
					return
				}
			}
			longest = max(longest, moves)
		}
	}
	for _, kind := range []string{"rule", "evenness", "room"} {
		if ranks[kind] < 100 {
			t.Errorf("%d moves by %s: the clusters show too little", ranks[kind], kind)
		}
	}
	t.Logf("moves %v, at most %d until a cluster was at rest", ranks, longest)
}
