package scheduler

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/scheduler/framework"
	"keelson.dev/keelson/controlplane/scheduler/plugins"
	"keelson.dev/keelson/controlplane/scheduler/plugins/defaultpreemption"
)

// without is the cluster less some pods.
func (w *twin) without(gone map[types.UID]bool) *twin {
	out := &twin{nodes: w.nodes, pods: map[types.UID]*v1.Pod{}, namespaces: w.namespaces}
	for uid, pod := range w.pods {
		if !gone[uid] {
			out.pods[uid] = pod
		}
	}
	return out
}

func cpuOf(pod *v1.Pod) int64 { return pod.Spec.Containers[0].Resources.Requests.Cpu().MilliValue() }

// fits says whether nothing keeps the pod off the node: taints, labels, CPU, spread and affinity.
func (w *twin) fits(pod *v1.Pod, n *v1.Node) bool {
	for _, t := range n.Spec.Taints {
		if t.Effect != v1.TaintEffectPreferNoSchedule && !framework.Tolerated(pod.Spec.Tolerations, &t) {
			return false
		}
	}
	for k, v := range pod.Spec.NodeSelector {
		if n.Labels[k] != v {
			return false
		}
	}
	cpu := cpuOf(pod)
	w.on(func(q *v1.Pod, on *v1.Node) {
		if on == n {
			cpu += cpuOf(q)
		}
	})
	return cpu <= n.Status.Allocatable.Cpu().MilliValue() && w.spread(pod, n) == "" && w.affinity(pod, n) == ""
}

type sacrifice struct {
	node       string
	victims    []*v1.Pod
	violations int
}

func startOf(pod *v1.Pod) time.Time {
	if pod.Status.StartTime == nil {
		return time.Unix(math.MaxInt32, 0)
	}
	return pod.Status.StartTime.Time
}

func byImportance(a, b *v1.Pod) int {
	return cmp.Or(cmp.Compare(*b.Spec.Priority, *a.Spec.Priority), startOf(a).Compare(startOf(b)),
		cmp.Compare(a.UID, b.UID))
}

// protectedBy says which of the pods, in this order, exceed what budgets allow.
func protectedBy(budgets []*policyv1.PodDisruptionBudget, pods []*v1.Pod) map[types.UID]bool {
	out, used := map[types.UID]bool{}, map[string]int32{}
	for _, pod := range pods {
		for _, b := range budgets {
			if b.Namespace == pod.Namespace && len(pod.Labels) > 0 && matches(b.Spec.Selector, pod.Labels) {
				if used[b.Name]++; used[b.Name] > b.Status.DisruptionsAllowed {
					out[pod.UID] = true
				}
			}
		}
	}
	return out
}

// sacrifices tries each node: all pods of lower priority go, then each comes back that may.
func (w *twin) sacrifices(pod *v1.Pod, budgets []*policyv1.PodDisruptionBudget) (out []sacrifice) {
	for _, name := range w.nodeNames() {
		n := w.nodes[name]
		gone := map[types.UID]bool{}
		var lower []*v1.Pod
		w.on(func(q *v1.Pod, on *v1.Node) {
			if on == n && *q.Spec.Priority < *pod.Spec.Priority {
				gone[q.UID] = true
				lower = append(lower, q)
			}
		})
		if len(lower) == 0 || !w.without(gone).fits(pod, n) {
			continue
		}
		slices.SortStableFunc(lower, byImportance)
		protected := protectedBy(budgets, lower)
		s := sacrifice{node: name}
		for _, first := range []bool{true, false} {
			for _, q := range lower {
				if protected[q.UID] != first {
					continue
				}
				if delete(gone, q.UID); w.without(gone).fits(pod, n) {
					continue
				}
				gone[q.UID] = true
				s.victims = append(s.victims, q)
				if first {
					s.violations++
				}
			}
		}
		slices.SortStableFunc(s.victims, byImportance)
		out = append(out, s)
	}
	return out
}

// cost is what candidates are compared by, in order.
func (s sacrifice) cost() []int64 {
	var sum int64
	first := startOf(s.victims[0])
	for _, v := range s.victims {
		sum += int64(*v.Spec.Priority) + 1<<31
		if *v.Spec.Priority == *s.victims[0].Spec.Priority && startOf(v).Before(first) {
			first = startOf(v)
		}
	}
	return []int64{int64(s.violations), int64(*s.victims[0].Spec.Priority), sum, int64(len(s.victims)), -first.Unix()}
}

func uidsOf(pods []*v1.Pod) (out []types.UID) {
	for _, pod := range pods {
		out = append(out, pod.UID)
	}
	return out
}

// Preemption finds, in thousands of small full clusters, the nodes and victims that one finds who takes away and puts
// back pods and looks at the whole cluster each time, and it chooses one that costs least.
func TestPreemptionEqualsTwin(t *testing.T) {
	const clusters, steps = 1000, 12
	h := &framework.Handle{}
	prof, err := framework.NewProfile(plugins.Default(h)...)
	if err != nil {
		t.Fatal(err)
	}
	h.Fits = prof.Fits
	preemptions, several, violating := 0, 0, 0
	for seed := range uint64(clusters) {
		d := dice{rand.New(rand.NewPCG(seed, 11))}
		w, c := newTwin(), newCluster(framework.Volumes{}, nil)
		for i := range 4 {
			name := fmt.Sprint("n", i+1)
			w.nodes[name] = d.node(name)
			c.setNode(w.nodes[name])
			for range 3 {
				pod := d.pod()
				pod.Spec.NodeName = name
				if d.often(60) {
					pod.Spec.Affinity = nil
				}
				w.pods[pod.UID] = pod
				c.addBoundPod(pod)
			}
		}
		for step := range steps {
			w.change(d, c)
			if d.often(50) || len(w.nodes) == 0 {
				continue
			}
			pod := d.pod()
			*pod.Spec.Priority += 2
			if d.often(70) {
				pod.Spec.Affinity, pod.Spec.NodeSelector = nil, nil
			}
			if d.often(60) {
				pod.Spec.TopologySpreadConstraints = nil
			}
			snap := c.takeSnapshot()
			cycle := framework.NewCycle(framework.NewPodInfo(pod), snap)
			_, failed := prof.Schedule(t.Context(), cycle, framework.Options{})
			why, unfit := failed.(*framework.FitError)
			if !unfit {
				if failed != nil {
					t.Fatal(failed)
				}
				continue
			}
			budgets := w.budgets(d)
			h.Budgets = func() []*policyv1.PodDisruptionBudget { return budgets }
			found, _ := defaultpreemption.Plugin{H: h}.Candidates(t.Context(), cycle, why)
			want := w.sacrifices(pod, budgets)
			got := map[string]string{}
			for _, f := range found {
				var pods []*v1.Pod
				for _, v := range f.Victims {
					pods = append(pods, v.Pod)
				}
				got[f.Node] = fmt.Sprint(slices.Sorted(slices.Values(uidsOf(pods))), f.Violations)
			}
			expected := map[string]string{}
			for _, s := range want {
				expected[s.node] = fmt.Sprint(slices.Sorted(slices.Values(uidsOf(s.victims))), s.violations)
			}
			if !maps.Equal(got, expected) {
				t.Fatalf("seed %d step %d: candidates %v, want %v", seed, step, got, expected)
			}
			if len(found) == 0 {
				continue
			}
			best := defaultpreemption.Best(found, func(q *framework.PodInfo) time.Time { return startOf(q.Pod) })
			costs := map[string][]int64{}
			least := slices.MinFunc(want, func(a, b sacrifice) int { return slices.Compare(a.cost(), b.cost()) }).cost()
			for _, s := range want {
				costs[s.node] = s.cost()
				if s.violations > 0 {
					violating++
				}
			}
			if !slices.Equal(costs[best.Node], least) {
				t.Fatalf("seed %d step %d: chose %s of %v", seed, step, best.Node, costs)
			}
			preemptions++
			if len(want) > 1 {
				several++
			}
		}
	}
	if preemptions < 500 || several < 200 || violating < 100 {
		t.Errorf("%d preemptions, %d with a choice, %d candidates against budgets: the clusters show too little",
			preemptions, several, violating)
	}
}

func (w *twin) budgets(d dice) (out []*policyv1.PodDisruptionBudget) {
	for i := range d.IntN(6) {
		out = append(out,
			&policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Namespace: d.one(namespaceNames...),
				Name: fmt.Sprint("b", i)},
				Spec: policyv1.PodDisruptionBudgetSpec{
					Selector: &metav1.LabelSelector{MatchLabels: map[string]string{
						d.one(podKeys...): d.one(podValues...)}}},
				Status: policyv1.PodDisruptionBudgetStatus{DisruptionsAllowed: int32(d.IntN(2))}})
	}
	return out
}

// small makes nodes that are soon full.
func small(n *v1.Node) {
	n.Status.Allocatable = v1.ResourceList{v1.ResourceCPU: resource.MustParse("3"),
		v1.ResourceMemory: resource.MustParse("64Gi"), v1.ResourcePods: resource.MustParse("110")}
}
