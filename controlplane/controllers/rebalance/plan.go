// Package rebalance evicts pods of workloads that request it, slowly, so that the scheduler places
// them on better nodes.
package rebalance

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/controllers"
)

// MinGain is the minimum score difference for a move that no rule requires. MinFuller is the
// minimum difference of node utilization, in percentage points, for a move that only improves
// utilization.
const (
	MinGain   = 10
	MinFuller = 10.0
)

// MostWeighed is the maximum number of pods that are evaluated in one round.
const MostWeighed = 64

// systemCritical is the minimum priority of pods that the cluster itself needs.
const systemCritical = 2_000_000_000

// Verdict is the scheduler's result for a running pod, as if it were pending and its node did not
// have it. Utilizations are percentages of the scarcer of CPU and memory.
type Verdict struct {
	// Passed is why the pod was not evaluated, or "".
	Passed string
	// Stays is why its node would not accept the pod again, or "".
	Stays string
	// Best are the nodes with the highest score. Gain is the difference between that score and the
	// score of the pod's node.
	Best []string
	Gain int64
	// Full is the utilization of the pod's node with the pod, and Left without it. There is the
	// highest utilization of the best nodes with the pod.
	Full, Left, There float64
}

// Trial evaluates moves in a simulated cluster.
type Trial interface {
	// Weigh returns where the scheduler would place the pod if it were pending.
	Weigh(ctx context.Context, pod *corev1.Pod) (Verdict, error)
	// Harms returns the name of a pod with rules that the move would break, or "".
	Harms(ctx context.Context, pod *corev1.Pod, to string) (string, error)
}

// Workload is a workload that requests rebalancing and can spare a pod now.
type Workload struct {
	Kind   string
	Object api.Object
	Pods   []*corev1.Pod
}

// Move is one pod to evict.
type Move struct {
	Workload Workload
	Pod      *corev1.Pod
	To       string // the node where the scheduler would place it
	Why      string
}

// Surroundings are the inputs of Choose other than the scheduler's results.
type Surroundings struct {
	Now      time.Time
	Interval time.Duration // minimum time for which a pod must have been ready
	Budgets  []*policyv1.PodDisruptionBudget
	Zone     func(node string) string
	Skip     map[types.UID]time.Time // pods that must not be moved before a time
}

// Choose returns the pod that gains most by moving, or nil. Pods that their node would not accept
// again come first, then pods of workloads that are spread unevenly.
//
// A cluster that does not change reaches a stable state, because each move decreases a measure. The
// measures are, in this order: the number of pods that their node would not accept again, the
// unevenness of workloads over zones, then over nodes, and the utilization of nodes, the highest
// first.
func Choose(ctx context.Context, t Trial, list []Workload, s Surroundings) (*Move, error) {
	type rated struct {
		move Move
		best []string
		rank int
		gain int64
	}
	var found []rated
	weighed := 0
	for _, w := range list {
		for _, p := range w.Pods {
			if weighed == MostWeighed {
				break
			}
			if Unmovable(p, s) != "" {
				continue
			}
			weighed++
			v, err := t.Weigh(ctx, p)
			if err != nil {
				return nil, err
			}
			if to, why, rank := Judge(w, p, v, s.Zone); to != "" {
				found = append(found, rated{Move{w, p, to, why}, v.Best, rank, v.Gain})
			}
		}
	}
	slices.SortStableFunc(found, func(a, b rated) int { return cmp.Or(cmp.Compare(a.rank, b.rank), cmp.Compare(b.gain, a.gain)) })
	for i := range found {
		m := &found[i].move
		if harms, err := wouldHarm(ctx, t, m.Pod, found[i].best); err != nil || !harms {
			return m, err
		}
	}
	return nil, nil
}

// wouldHarm reports whether the move would break another pod's rules on one of the nodes that the
// scheduler may choose.
func wouldHarm(ctx context.Context, t Trial, p *corev1.Pod, nodes []string) (bool, error) {
	for _, node := range nodes {
		if harmed, err := t.Harms(ctx, p, node); err != nil || harmed != "" {
			return true, err
		}
	}
	return false, nil
}

// Unmovable returns why a pod must not be moved, regardless of the scheduler's result, or "".
func Unmovable(p *corev1.Pod, s Surroundings) string {
	ready := controllers.PodCondition(p, corev1.PodReady)
	switch {
	case p.Spec.NodeName == "" || p.DeletionTimestamp != nil || controllers.IsPodTerminal(p):
		return "it does not run"
	case ready == nil || ready.Status != corev1.ConditionTrue:
		return "it is not ready"
	case s.Now.Sub(ready.LastTransitionTime.Time) < s.Interval:
		return "it has only just become ready"
	case metav1.GetControllerOf(p) == nil:
		return "nothing would replace it"
	case p.Annotations[corev1.MirrorPodAnnotationKey] != "":
		return "it is its node's own"
	case p.Spec.SchedulingGroup != nil:
		return "it runs with the others of its group, which one that goes would hold up"
	case p.Spec.Priority != nil && *p.Spec.Priority >= systemCritical:
		return "the cluster needs it"
	case s.Skip[p.UID].After(s.Now):
		return "its eviction was refused lately"
	}
	for i := range p.Spec.Volumes {
		if v := &p.Spec.Volumes[i]; v.EmptyDir != nil || v.HostPath != nil || v.Ephemeral != nil {
			return "volume " + v.Name + " holds data that would stay behind"
		}
	}
	return blockingBudget(p, s.Budgets)
}

// blockingBudget returns which PodDisruptionBudget prevents the move, or "".
func blockingBudget(p *corev1.Pod, budgets []*policyv1.PodDisruptionBudget) string {
	covering := 0
	for _, b := range budgets {
		sel, err := metav1.LabelSelectorAsSelector(b.Spec.Selector)
		if b.Namespace != p.Namespace || err != nil || !sel.Matches(labels.Set(p.Labels)) {
			continue
		}
		if covering++; covering > 1 {
			return "more than one PodDisruptionBudget covers it"
		}
		if b.Status.ObservedGeneration < b.Generation || b.Status.DisruptionsAllowed < 1 {
			return "PodDisruptionBudget " + b.Name + " allows no disruption"
		}
	}
	return ""
}

// Ranks of reasons, the most important first.
const (
	rankRule = iota
	rankSpread
	rankRoom
)

// Judge returns where a pod should move, and why. to is "" if the pod stays. All nodes that the
// scheduler may choose must be better.
func Judge(w Workload, p *corev1.Pod, v Verdict, zone func(string) string) (to, why string, rank int) {
	here := p.Spec.NodeName
	if v.Passed != "" || len(v.Best) == 0 || slices.Contains(v.Best, here) {
		return "", "", 0
	}
	to = v.Best[0]
	if v.Stays != "" {
		return to, fmt.Sprintf("node %s would not take it again: %s", here, v.Stays), rankRule
	}
	if v.Gain < MinGain {
		return "", "", 0
	}
	even := false // the spread stays equal on at least one of the nodes
	for _, node := range v.Best {
		switch compareSpread(w.Pods, here, node, zone) {
		case 1:
			return "", "", 0
		case 0:
			even = true
		}
	}
	if !even {
		return to, fmt.Sprintf("more pods of %s %s are beside it than on node %s", w.Kind, w.Object.GetName(), to), rankSpread
	}
	if v.Left < v.Full && v.Full-v.There >= MinFuller {
		return to, fmt.Sprintf("node %s is %.0f%% full, node %s would be %.0f%% full with it", here, v.Full, to, v.There), rankRoom
	}
	return "", "", 0
}

// compareSpread returns whether a move makes the spread of a workload's pods more even (-1), equal
// (0) or less even (1). It compares zones first, then nodes.
func compareSpread(pods []*corev1.Pod, from, to string, zone func(string) string) int {
	level := func(of func(string) string) int {
		a, b := of(from), of(to)
		if a == b {
			return 0
		}
		more := 0 // number of pods at a minus number of pods at b
		for _, p := range pods {
			switch of(p.Spec.NodeName) {
			case a:
				more++
			case b:
				more--
			}
		}
		return cmp.Compare(1, more)
	}
	return cmp.Or(level(zone), level(func(node string) string { return node }))
}
