// Package podtopologyspread is the plugin PodTopologySpread. It spreads pods over topology domains
// such as zones and nodes. No domain may (DoNotSchedule), or should (ScheduleAnyway), have more
// than maxSkew pods above the domain with the fewest. Pods without constraints that belong to a
// Service, ReplicaSet, StatefulSet or ReplicationController are spread over nodes and zones by
// default, as in kube-scheduler.
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

// Plugin filters and scores nodes by topology spread constraints. The zero value is the default
// configuration.
type Plugin struct {
	// Defaults are the default constraints, for pods without topology spread constraints. If Listed
	// is false, the default constraints of kube-scheduler apply instead. Defaults have no
	// selectors: these are derived from the pod's Services and controller.
	Listed   bool
	Defaults []v1.TopologySpreadConstraint
}

// Name implements framework.Plugin: it returns the name of the plugin.
func (Plugin) Name() string { return Name }

// state is the data of PodTopologySpread for one scheduling attempt: the DoNotSchedule (hard) and
// ScheduleAnyway (soft) constraints.
type state struct {
	hard []countedConstraint
	soft *softState
}

// countedConstraint is a topology spread constraint with the number of pods that it selects in each
// topology domain.
type countedConstraint struct {
	constraint
	set     *framework.PodSet
	domains *framework.Domains
	self    int // 1 if the constraint selects the pod to schedule itself, otherwise 0
	least   int // lowest number of selected pods in a domain; 0 if there are fewer domains than minDomains
}

// PreFilter implements framework.PreFilter: it looks up how many pods each DoNotSchedule constraint
// of the pod selects in each topology domain. It returns Skip, which disables Filter, if the pod
// has no such constraint.
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

// countPods returns the constraints in list with the number of pods that they select in each
// topology domain. If requireAllKeys is true, only nodes that have the topology keys of all
// constraints in the list are included.
func countPods(c *framework.Cycle, list []constraint, requireAllKeys bool) []countedConstraint {
	pod, x := c.Pod.Pod, c.Snapshot.Index
	var keys []string
	if requireAllKeys {
		for i := range list {
			keys = append(keys, list[i].key)
		}
	}
	out := make([]countedConstraint, 0, len(list))
	for _, one := range list {
		set := x.Set(one.podSelector)
		k := countedConstraint{constraint: one, set: set,
			domains: x.Domains(set, one.key, one.eligibleNodes(pod, keys))}
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

// Filter implements framework.Filter: it refuses a node on which the pod would make the skew of a
// constraint exceed maxSkew. It also refuses a node that lacks the topology key of a constraint.
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
			more = c.More(func(pod *framework.PodInfo) bool { return k.podSelector.Has(pod.Pod, nil) })
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

// softState is the result of PreScore: the ScheduleAnyway constraints of the pod, with their pod
// counts and weights.
type softState struct {
	list           []countedConstraint
	weights        []float64 // factor for the pod count of each constraint; it increases with the number of domains
	requireAllKeys bool      // nodes that lack a topology key of a constraint get the lowest score
}

// PreScore implements framework.PreScore: it looks up how many pods each ScheduleAnyway constraint
// of the pod selects in each topology domain. For a pod without constraints it uses the default
// constraints. It returns Skip, which disables Score, if there are none.
func (p Plugin) PreScore(_ context.Context, c *framework.Cycle, nodes []*framework.NodeInfo) *framework.Status {
	list := constraintsOf(c.Pod.Pod, v1.ScheduleAnyway)
	own := len(c.Pod.Pod.Spec.TopologySpreadConstraints) > 0
	switch {
	case own:
	case p.Listed:
		list = defaultConstraints(c, p.Defaults, v1.ScheduleAnyway)
	default:
		list = defaultConstraints(c, systemConstraints, v1.ScheduleAnyway)
	}
	requireAllKeys := own || p.Listed
	if len(list) == 0 {
		return framework.SkipStatus
	}
	st := &softState{list: countPods(c, list, requireAllKeys), requireAllKeys: requireAllKeys,
		weights: make([]float64, len(list))}
	rated := nodes
	if requireAllKeys && slices.ContainsFunc(nodes, st.lacksTopologyKey) {
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

// lacksTopologyKey reports whether the node does not have the topology key of one of the
// ScheduleAnyway constraints.
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

// unrated is the result of Score for a node that lacks a topology key of a constraint.
// NormalizeScore turns it into the lowest score.
const unrated = -1

// Score implements framework.Score: it returns the number of pods that the ScheduleAnyway
// constraints select in the node's topology domains, weighted by constraint. A lower result is
// better; NormalizeScore reverses the order.
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
			if st.soft.requireAllKeys {
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

// NormalizeScore implements framework.NormalizeScore: the nodes with the lowest result of Score get
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

// MayHelp implements framework.Requeue. It returns true if a pod that one of the pod's constraints
// selects was added, removed or changed, and for a new or changed node that may belong to a
// topology domain of the constraints.
func (p Plugin) MayHelp(e framework.Event, pod *v1.Pod, obj any) bool {
	if p.Listed && len(pod.Spec.TopologySpreadConstraints) == 0 {
		return true // default constraints select pods through the pod's Services and controller, which may have changed
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
		case framework.NodeLabels: // a node that loses its topology key removes its domain
			return true
		}
	}
	return false
}
