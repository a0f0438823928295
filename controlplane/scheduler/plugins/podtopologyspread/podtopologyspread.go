// Package podtopologyspread spreads the pods of a group over topology domains such as zones and
// nodes. No domain may (DoNotSchedule), or should (ScheduleAnyway), have more than maxSkew pods
// above the domain with the fewest. Pods without constraints that belong to a Service, ReplicaSet,
// StatefulSet or ReplicationController are spread over nodes and zones by default, as in
// kube-scheduler.
package podtopologyspread

import (
	"context"
	"math"
	"slices"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// Name is the name of the plugin in a KubeSchedulerConfiguration.
const Name = "PodTopologySpread"

const unmatched = "node(s) didn't match pod topology spread constraints"

var (
	refused  = framework.Refuse(Name, unmatched)
	labelled = framework.RefuseForGood(Name, unmatched+" (missing required label)")
)

// Plugin filters and scores nodes by topology spread constraints. The zero value is the default.
type Plugin struct {
	// If Listed is set, Defaults are the constraints of pods that have none of their own, in place
	// of kube-scheduler's default constraints. Defaults have no selectors, because the selectors
	// are derived from the pod's Services and controller.
	Listed   bool
	Defaults []v1.TopologySpreadConstraint
}

// Name implements framework.Plugin: it returns the name of the plugin.
func (Plugin) Name() string { return Name }

// state is the plugin's data of one scheduling attempt.
type state struct {
	hard []counted
	soft *softState
}

// counted is a constraint with the counts, per topology domain, of the pods that it selects.
type counted struct {
	constraint
	set     *framework.PodSet
	domains *framework.Domains
	self    int // 1 if the pod matches its own selector
	least   int // lowest pod count of any eligible domain; 0 if there are fewer domains than minDomains
}

// PreFilter implements framework.PreFilter: it looks up the counts for the DoNotSchedule
// constraints of the pod. It skips the filter if none exist.
func (p Plugin) PreFilter(_ context.Context, c *framework.Cycle) (map[string]struct{}, *framework.Status) {
	list := constraintsOf(c.Pod.Pod, v1.DoNotSchedule)
	if p.Listed && len(c.Pod.Pod.Spec.TopologySpreadConstraints) == 0 {
		list = defaultConstraints(c, p.Defaults, v1.DoNotSchedule)
	}
	if len(list) == 0 {
		return nil, framework.SkipStatus
	}
	c.Put(Name, &state{hard: countPods(c, list, true)})
	return nil, nil
}

// countPods returns the constraints with the counts of the pods that they select. If whole is set,
// only nodes that have the topology keys of all constraints are counted.
func countPods(c *framework.Cycle, list []constraint, whole bool) []counted {
	pod, x := c.Pod.Pod, c.Snapshot.Index
	var keys []string
	if whole {
		for i := range list {
			keys = append(keys, list[i].key)
		}
	}
	out := make([]counted, 0, len(list))
	for _, one := range list {
		set := x.Set(one.peers)
		k := counted{constraint: one, set: set, domains: x.Domains(set, one.key, one.eligibleNodes(pod, keys))}
		if one.selector.Matches(podLabels(pod)) {
			k.self = 1
		}
		if k.domains.Size() >= k.minDomains {
			k.least = k.domains.Least()
		}
		out = append(out, k)
	}
	return out
}

// Filter implements framework.Filter: it refuses a node if the pod would make the skew of a
// constraint exceed maxSkew, or if the node lacks the topology key.
func (Plugin) Filter(_ context.Context, c *framework.Cycle, n *framework.NodeInfo) *framework.Status {
	st, ok := c.Get(Name).(*state)
	if !ok {
		return nil
	}
	changed := len(c.With)+len(c.Without) > 0
	for i := range st.hard {
		k := &st.hard[i]
		at := k.domains.At(n)
		if at == framework.NoDomain {
			return labelled
		}
		more := 0
		if changed && k.domains.Counts(n) {
			more = c.More(func(pod *framework.PodInfo) bool { return k.peers.Has(pod.Pod, nil) })
		}
		least := k.least
		if more != 0 && k.domains.Size() >= k.minDomains {
			least = k.domains.LeastWith(at, more)
		}
		if k.domains.Pods(at)+more+k.self-least > k.maxSkew {
			return refused
		}
	}
	return nil
}

// softState is the result of PreScore: the ScheduleAnyway constraints of the pod.
type softState struct {
	list    []counted
	weights []float64 // by constraint; a pod counts more if there are more domains
	whole   bool      // nodes that lack a topology key get the lowest score
}

// PreScore implements framework.PreScore: it looks up the counts for the ScheduleAnyway constraints
// of the pod, or the default constraints. It skips scoring if none exist.
func (p Plugin) PreScore(_ context.Context, c *framework.Cycle, nodes []*framework.NodeInfo) *framework.Status {
	list := constraintsOf(c.Pod.Pod, v1.ScheduleAnyway)
	own := len(c.Pod.Pod.Spec.TopologySpreadConstraints) > 0
	switch {
	case own:
	case p.Listed:
		list = defaultConstraints(c, p.Defaults, v1.ScheduleAnyway)
	default:
		list = defaultConstraints(c, system, v1.ScheduleAnyway)
	}
	whole := own || p.Listed
	if len(list) == 0 {
		return framework.SkipStatus
	}
	st := &softState{list: countPods(c, list, whole), whole: whole, weights: make([]float64, len(list))}
	rated := nodes
	if whole && slices.ContainsFunc(nodes, st.lacksTopologyKey) {
		rated = slices.DeleteFunc(slices.Clone(nodes), st.lacksTopologyKey)
	}
	for i := range st.list {
		size := len(rated)
		if list[i].key != v1.LabelHostname {
			size = st.list[i].domains.Distinct(rated)
		}
		st.weights[i] = math.Log(float64(size + 2))
	}
	have, ok := c.Get(Name).(*state)
	if !ok {
		have = &state{}
		c.Put(Name, have)
	}
	have.soft = st
	return nil
}

// lacksTopologyKey reports whether the node lacks the topology key of one of the constraints.
func (st *softState) lacksTopologyKey(n *framework.NodeInfo) bool {
	for i := range st.list {
		if st.list[i].domains.At(n) == framework.NoDomain {
			return true
		}
	}
	return false
}

func hasKeys(n *v1.Node, list []constraint) bool {
	for i := range list {
		if _, ok := n.Labels[list[i].key]; !ok {
			return false
		}
	}
	return true
}

// unrated is the score of a node that lacks a topology key, before normalization. Normalization
// turns it into the lowest score.
const unrated = -1

// Score implements framework.Score: the weighted number of matching pods in the node's topology
// domains. Lower is better before normalization.
func (Plugin) Score(_ context.Context, c *framework.Cycle, n *framework.NodeInfo) (int64, *framework.Status) {
	st, ok := c.Get(Name).(*state)
	if !ok || st.soft == nil {
		return 0, nil
	}
	var sum float64
	for i := range st.soft.list {
		k := &st.soft.list[i]
		at := k.domains.At(n)
		if at == framework.NoDomain {
			if st.soft.whole {
				return unrated, nil
			}
			continue
		}
		pods := 0
		if k.key == v1.LabelHostname {
			pods = k.set.OnNode(n)
		} else {
			pods = k.domains.Pods(at)
		}
		// A larger maxSkew makes differences between domains relatively smaller.
		sum += float64(pods)*st.soft.weights[i] + float64(k.maxSkew-1)
	}
	return int64(math.Round(sum)), nil
}

// NormalizeScore implements framework.NormalizeScore: nodes with the fewest matching pods get
// framework.MaxScore, and nodes that lack a topology key get 0.
func (Plugin) NormalizeScore(_ context.Context, _ *framework.Cycle, scores []int64) *framework.Status {
	least, most := int64(math.MaxInt64), int64(0)
	for _, s := range scores {
		if s != unrated {
			least, most = min(least, s), max(most, s)
		}
	}
	for i, s := range scores {
		switch {
		case s == unrated:
			scores[i] = 0
		case most == 0:
			scores[i] = framework.MaxScore
		default:
			scores[i] = framework.MaxScore * (most + least - s) / most
		}
	}
	return nil
}

// MayHelp implements framework.Requeue. It returns true if a pod that a constraint selects was
// added, removed or changed. It also does for a new or changed node that may be counted.
func (p Plugin) MayHelp(e framework.Event, pod *v1.Pod, obj any) bool {
	if p.Listed && len(pod.Spec.TopologySpreadConstraints) == 0 {
		return true // matching pods depend on the pod's owner, which may have changed
	}
	list := constraintsOf(pod, v1.DoNotSchedule)
	counts := func(p *v1.Pod) bool {
		if p == nil {
			return true
		}
		for i := range list {
			if p.Namespace == pod.Namespace && list[i].selector.Matches(podLabels(p)) {
				return true
			}
		}
		return false
	}
	switch o := obj.(type) {
	case *v1.Pod:
		return counts(o)
	case framework.PodUpdate:
		return counts(o.Old) || counts(o.Now)
	case *v1.Node:
		switch e {
		case framework.NodeAdded, framework.NodeTaints:
			return hasKeys(o, list)
		case framework.NodeLabels: // a node that loses a key removes its empty domain
			return true
		}
	}
	return false
}
