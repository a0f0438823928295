// Package rebalance evicts pods so that the scheduler places them on better nodes. It does this
// slowly, and only for workloads with the annotation that requests it.
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
)

// MinGain is the minimum difference of scheduler scores for a move, unless a scheduling rule
// requires the move. MinFuller is the minimum difference of node utilization, in percentage points,
// for a move that only improves utilization.
const (
	MinGain   = 10
	MinFuller = 10.0
)

// MaxEvaluated is the maximum number of pods for which the scheduler is simulated in one round.
const MaxEvaluated = 64

// systemCritical is the minimum priority of pods that the cluster itself needs.
const systemCritical = 2_000_000_000

// Verdict is the result of Trial.Evaluate for a running pod: the scheduler's decision if the pod
// were pending and not on its node. Utilizations are percentages of CPU or memory, whichever is
// scarcer.
type Verdict struct {
	// SkipReason is the reason why the pod was not evaluated, or "".
	SkipReason string
	// Refusal is the reason why the pod's node would not accept the pod again, or "" if the node
	// would accept it.
	Refusal string
	// Best are the nodes with the highest score. Gain is that score minus the score of the pod's
	// node.
	Best []string
	Gain int64
	// WithPod and WithoutPod are the utilizations of the pod's node with the pod and without it.
	// InBest is the highest utilization that a node in Best would have with the pod.
	WithPod, WithoutPod, InBest float64
}

// Trial simulates the scheduler on a copy of the cluster state.
type Trial interface {
	// Evaluate returns the scheduler's decision for a pod if it were pending.
	Evaluate(ctx context.Context, pod *corev1.Pod) (Verdict, error)
	// FindHarmedPod returns the name of another pod with scheduling rules that would be violated if
	// pod moved to this node. It returns "" if no such pod exists.
	FindHarmedPod(ctx context.Context, pod *corev1.Pod, node string) (string, error)
}

// Workload is a workload that requests rebalancing and can lose one pod now.
type Workload struct {
	Kind   string
	Object api.Object
	Pods   []*corev1.Pod
}

// Move is the decision to evict a pod, and the reason.
type Move struct {
	Workload Workload
	Pod      *corev1.Pod
	To       string // node on which the scheduler would place the pod
	Why      string
}

// Surroundings are the inputs of Choose besides the workloads and the scheduler's decisions.
type Surroundings struct {
	Now      time.Time
	Interval time.Duration // time for which a pod must have been ready before it is moved
	Budgets  []*policyv1.PodDisruptionBudget
	Zone     func(node string) string
	Skip     map[types.UID]time.Time // by UID: time until which a pod must not be moved
}

// Choose returns the best move of a pod in list, or nil. A pod that its node would not accept again
// has precedence, then a pod of a workload that is spread unevenly.
//
// A cluster that does not otherwise change reaches a stable state, because each move decreases a
// measure. The measures are, in this order: the number of pods that their node would not accept
// again, the unevenness of workloads over zones, that over nodes, and the utilization of nodes, the
// highest first.
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
			if weighed == MaxEvaluated {
				break
			}
			if Unmovable(p, s) != "" {
				continue
			}
			weighed++
			v, err := t.Evaluate(ctx, p)
			if err != nil {
				return nil, err
			}
			if to, why, rank := Judge(w, p, v, s.Zone); to != "" {
				found = append(found, rated{Move{w, p, to, why}, v.Best, rank, v.Gain})
			}
		}
	}
	slices.SortStableFunc(found, func(a, b rated) int {
		return cmp.Or(cmp.Compare(a.rank, b.rank), cmp.Compare(b.gain, a.gain))
	})
	for i := range found {
		m := &found[i].move
		if harms, err := wouldHarm(ctx, t, m.Pod, found[i].best); err != nil || !harms {
			return m, err
		}
	}
	return nil, nil
}

// wouldHarm reports whether the scheduling rules of another pod would be violated if p moved to one
// of the nodes.
func wouldHarm(ctx context.Context, t Trial, p *corev1.Pod, nodes []string) (bool, error) {
	for _, node := range nodes {
		if harmed, err := t.FindHarmedPod(ctx, p, node); err != nil || harmed != "" {
			return true, err
		}
	}
	return false, nil
}

// Unmovable returns why pod p must not be evicted, whatever the scheduler's decision is. It returns
// "" if p may be evicted.
func Unmovable(p *corev1.Pod, s Surroundings) string {
	ready := api.PodCondition(p, corev1.PodReady)
	switch {
	case p.Spec.NodeName == "" || p.DeletionTimestamp != nil || api.IsPodTerminal(p):
		return "it does not run"
	case ready == nil || ready.Status != corev1.ConditionTrue:
		return "it is not ready"
	case s.Now.Sub(ready.LastTransitionTime.Time) < s.Interval:
		return "it has only just become ready"
	case metav1.GetControllerOf(p) == nil:
		return "no controller would replace it"
	case p.Annotations[corev1.MirrorPodAnnotationKey] != "":
		return "it is bound to its node"
	case p.Spec.SchedulingGroup != nil:
		return "its group would stop working without it"
	case p.Spec.Priority != nil && *p.Spec.Priority >= systemCritical:
		return "the cluster needs it"
	case s.Skip[p.UID].After(s.Now):
		return "its eviction was refused recently"
	}
	for i := range p.Spec.Volumes {
		if v := &p.Spec.Volumes[i]; v.EmptyDir != nil || v.HostPath != nil || v.Ephemeral != nil {
			return "volume " + v.Name + " holds data that would stay behind"
		}
	}
	return blockingBudget(p, s.Budgets)
}

// blockingBudget returns a description of the PodDisruptionBudget that forbids the eviction of p,
// or "".
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

// Ranks of the reasons for a move. A lower rank has precedence.
const (
	rankRule = iota
	rankSpread
	rankRoom
)

// Judge returns the node to which pod p of workload w should move, the reason, and the rank of the
// reason. The node is "" if p should stay. All nodes that the scheduler may choose (v.Best) must be
// better than the current node. zone returns the zone of a node.
func Judge(w Workload, p *corev1.Pod, v Verdict, zone func(string) string) (to, why string, rank int) {
	here := p.Spec.NodeName
	if v.SkipReason != "" || len(v.Best) == 0 || slices.Contains(v.Best, here) {
		return "", "", 0
	}
	to = v.Best[0]
	if v.Refusal != "" {
		return to, fmt.Sprintf("node %s would not accept it again: %s", here, v.Refusal), rankRule
	}
	if v.Gain < MinGain {
		return "", "", 0
	}
	even := false // the move to at least one of the nodes does not change the spread
	for _, node := range v.Best {
		switch compareSpread(w.Pods, here, node, zone) {
		case 1:
			return "", "", 0
		case 0:
			even = true
		}
	}
	if !even {
		return to, fmt.Sprintf("its node runs more pods of %s %s than node %s", w.Kind, w.Object.GetName(), to),
			rankSpread
	}
	if v.WithoutPod < v.WithPod && v.WithPod-v.InBest >= MinFuller {
		return to, fmt.Sprintf("node %s is %.0f%% full, node %s would be %.0f%% full with it", here, v.WithPod, to,
			v.InBest), rankRoom
	}
	return "", "", 0
}

// compareSpread returns how a move between two nodes changes the spread of a workload's pods: -1
// means more even, 0 unchanged, and 1 less even. It compares zones first, then nodes.
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
