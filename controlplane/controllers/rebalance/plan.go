// Package rebalance moves pods, on request and slowly, to where the scheduler would place them now.
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

// How much better another node must be for a pod that may stay where it is: by the scheduler's score, and by hundredths
// of the node in use where it is only about room.
const (
	MinGain   = 10
	MinFuller = 10.0
)

// MostWeighed is how many pods are weighed in one round.
const MostWeighed = 64

// systemCritical is the least priority of pods that the cluster itself needs.
const systemCritical = 2_000_000_000

// Verdict is what the scheduler says of a pod that runs, were it pending and not where it is. Parts of a node in use are
// in hundredths of what it has, of processor or memory, whichever is scarcer.
type Verdict struct {
	// Passed over: why nothing is said of the pod; "" = it was weighed.
	Passed string
	// Stays is why its node would not take it again; "" = it would.
	Stays string
	// Best are the nodes that are as good as any, and Gain how much higher than its node they are rated.
	Best []string
	Gain int64
	// Full is the pod's node in use with it, and Left without it; There is the fullest of the best with it.
	Full, Left, There float64
}

// Trial is the cluster in thought.
type Trial interface {
	// Weigh says where the pod would go if it were pending.
	Weigh(ctx context.Context, pod *corev1.Pod) (Verdict, error)
	// Harms names a pod whose rules would be broken by the move; "" = none.
	Harms(ctx context.Context, pod *corev1.Pod, to string) (string, error)
}

// Workload is something that asks to be rebalanced, at a time when one of its pods may go.
type Workload struct {
	Kind   string
	Object api.Object
	Pods   []*corev1.Pod
}

// Move is one pod that is to be evicted.
type Move struct {
	Workload Workload
	Pod      *corev1.Pod
	To       string // where the scheduler would place it
	Why      string
}

// Surroundings are what a choice goes by besides the scheduler's word.
type Surroundings struct {
	Now      time.Time
	Interval time.Duration // for how long a pod must have been ready
	Budgets  []*policyv1.PodDisruptionBudget
	Zone     func(node string) string
	Skip     map[types.UID]time.Time // pods that are left alone until then
}

// Choose finds the pod that gains most by moving: those that may not be where they are before the others, then those
// whose like are many at one place. It is nil when no pod shall move.
//
// A cluster that does not change comes to rest, because each move makes the first of these less that it changes: the
// number of pods that their node would not take again, how uneven the replicas of a workload lie over zones, then over
// nodes, and how full nodes are, the fullest compared first.
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
		if harms, err := harmful(ctx, t, m.Pod, found[i].best); err != nil || !harms {
			return m, err
		}
	}
	return nil, nil
}

// harmful says whether the move would break another pod's rules at one of the nodes that the scheduler may choose.
func harmful(ctx context.Context, t Trial, p *corev1.Pod, nodes []string) (bool, error) {
	for _, node := range nodes {
		if harmed, err := t.Harms(ctx, p, node); err != nil || harmed != "" {
			return true, err
		}
	}
	return false, nil
}

// Unmovable says why a pod stays where it is, whatever the scheduler says; "" = it may move.
func Unmovable(p *corev1.Pod, s Surroundings) string {
	ready := controllers.PodCondition(p, corev1.PodReady)
	switch {
	case p.Spec.NodeName == "" || p.DeletionTimestamp != nil || controllers.PodEnded(p):
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
	return unaffordable(p, s.Budgets)
}

// unaffordable says which disruption budget keeps the pod.
func unaffordable(p *corev1.Pod, budgets []*policyv1.PodDisruptionBudget) string {
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

// Ranks of reasons, the weightiest first.
const (
	rankRule = iota
	rankSpread
	rankRoom
)

// Judge says where a pod shall go and why; "" = it stays. Each of the nodes that the scheduler may choose must be better.
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
	even := false // spread as before, at one of the nodes
	for _, node := range v.Best {
		switch crowd(w.Pods, here, node, zone) {
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

// crowd says whether a workload's pods are more even (-1), as even (0) or less even (1) over zones, and if these are
// as before over nodes, when one moves.
func crowd(pods []*corev1.Pod, from, to string, zone func(string) string) int {
	level := func(of func(string) string) int {
		a, b := of(from), of(to)
		if a == b {
			return 0
		}
		more := 0 // how many more are at a
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
