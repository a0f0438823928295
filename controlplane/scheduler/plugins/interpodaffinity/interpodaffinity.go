// Package interpodaffinity implements inter-pod affinity and anti-affinity: required and preferred
// terms of the pod itself, and terms of pods on nodes.
package interpodaffinity

import (
	"context"
	"math"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// Name is the name of the plugin in a KubeSchedulerConfiguration.
const Name = "InterPodAffinity"

var (
	noPeers  = framework.RefuseForGood(Name, "node(s) didn't match pod affinity rules")
	shunned  = framework.Refuse(Name, "node(s) didn't match pod anti-affinity rules")
	unwanted = framework.Refuse(Name, "node(s) didn't satisfy existing pods anti-affinity rules")
)

// defaultHardWeight is the default of Plugin.HardWeight.
const defaultHardWeight = 1

// Plugin filters and scores nodes by inter-pod affinity and anti-affinity. The zero value is the
// default.
type Plugin struct {
	// HardWeight is the weight for scores of a required affinity term of a pod on a node that
	// matches the new pod; nil means 1.
	HardWeight *int32
	// OwnOnly disables scoring for pods that have no preferred terms of their own.
	OwnOnly bool
}

// Name implements framework.Plugin: it returns the name of the plugin.
func (Plugin) Name() string { return Name }

// state is the plugin's data of one scheduling attempt.
type state struct {
	required []rule // the pod's required terms; the counted pods match all of these terms
	founder  bool   // the pod matches its own required terms, so it may be the first of its group
	avoided  []rule
	existing []*framework.Carried

	weights  []rule
	weighing []*framework.Carried
}

// rule is an affinity term with the counts, per topology domain, of the pods that it selects.
type rule struct {
	framework.Term
	domains *framework.Domains
}

// PreFilter implements framework.PreFilter: it looks up the counts for the pod's required terms and
// the anti-affinity terms of other pods that select the pod.
func (Plugin) PreFilter(_ context.Context, c *framework.Cycle) (map[string]struct{}, *framework.Status) {
	x, pod := c.Snapshot.Index, c.Pod.Pod
	st := &state{existing: x.Avoiding(pod)}
	if a := c.Pod.Affinity; a != nil {
		if len(a.Required) > 0 {
			peers := make([]*framework.Peers, 0, len(a.Required))
			for _, t := range a.Required {
				peers = append(peers, t.Peers)
			}
			set := x.Set(peers...)
			for _, t := range a.Required {
				st.required = append(st.required, rule{t, x.Domains(set, t.Key, framework.EveryNode)})
			}
			st.founder = meetsAll(c.Pod.Affinity.Required, pod, x.Namespaces())
		}
		for _, t := range a.Avoided {
			st.avoided = append(st.avoided, rule{t, x.Domains(x.Set(t.Peers), t.Key, framework.EveryNode)})
		}
	}
	// A nominated pod without a node may refuse this pod too.
	if len(st.existing)+len(st.required)+len(st.avoided)+len(c.Snapshot.Nominated) == 0 {
		return nil, framework.SkipStatus
	}
	c.Put(Name, st)
	return nil, nil
}

func meetsAll(terms []framework.Term, pod *v1.Pod, namespaces framework.Namespaces) bool {
	for _, t := range terms {
		if !t.Has(pod, namespaces) {
			return false
		}
	}
	return true
}

// Filter implements framework.Filter: it refuses a node on which the pod's required affinity or
// anti-affinity, or the required anti-affinity of another pod, would be violated.
func (Plugin) Filter(_ context.Context, c *framework.Cycle, n *framework.NodeInfo) *framework.Status {
	st, ok := c.Get(Name).(*state)
	if !ok {
		return nil
	}
	switch {
	case !st.satisfiesAffinity(c, n):
		return noPeers
	case !st.satisfiesAntiAffinity(c, n):
		return shunned
	case !st.satisfiesExistingAntiAffinity(c, n):
		return unwanted
	}
	return nil
}

// satisfiesAffinity reports whether, for each required affinity term, the node's topology domain
// contains a pod that matches all these terms. If no such pod exists anywhere, the pod itself must
// match all terms.
func (st *state) satisfiesAffinity(c *framework.Cycle, n *framework.NodeInfo) bool {
	if len(st.required) == 0 {
		return true
	}
	more := 0
	if len(c.With)+len(c.Without) > 0 {
		more = c.More(func(pod *framework.PodInfo) bool {
			return meetsAll(c.Pod.Affinity.Required, pod.Pod, c.Snapshot.Index.Namespaces())
		})
	}
	there, any := true, false
	for i := range st.required {
		r := &st.required[i]
		at := r.domains.At(n)
		if at == framework.NoDomain {
			return false
		}
		there = there && r.domains.Pods(at)+more > 0
		any = any || r.domains.All()+more > 0
	}
	return there || !any && st.founder
}

// satisfiesAntiAffinity reports whether the node's topology domains contain no pod that the pod's
// required anti-affinity terms select.
func (st *state) satisfiesAntiAffinity(c *framework.Cycle, n *framework.NodeInfo) bool {
	changed := len(c.With)+len(c.Without) > 0
	for i := range st.avoided {
		r := &st.avoided[i]
		at := r.domains.At(n)
		if at == framework.NoDomain {
			continue
		}
		pods := r.domains.Pods(at)
		if changed {
			pods += c.More(func(pod *framework.PodInfo) bool { return r.Has(pod.Pod, c.Snapshot.Index.Namespaces()) })
		}
		if pods > 0 {
			return false
		}
	}
	return true
}

// satisfiesExistingAntiAffinity reports whether no other pod has a required anti-affinity term that
// selects this pod and applies to the node's topology domain.
func (st *state) satisfiesExistingAntiAffinity(c *framework.Cycle, n *framework.NodeInfo) bool {
	for _, e := range st.existing {
		at := e.At(n)
		if at == framework.NoDomain {
			continue
		}
		pods := e.Pods(at)
		for _, pod := range c.Without {
			pods -= countAntiAffinityTerm(pod, e.Term())
		}
		if pods > 0 {
			return false
		}
	}
	for _, pod := range c.With {
		if pod.Affinity == nil {
			continue
		}
		for _, t := range pod.Affinity.Avoided {
			if _, ok := n.Node.Labels[t.Key]; ok && t.Has(c.Pod.Pod, c.Snapshot.Index.Namespaces()) {
				return false
			}
		}
	}
	return true
}

// countAntiAffinityTerm returns how often the pod has the given term among its required
// anti-affinity terms.
func countAntiAffinityTerm(pod *framework.PodInfo, term framework.Term) int {
	if pod.Affinity == nil {
		return 0
	}
	n := 0
	for _, t := range pod.Affinity.Avoided {
		if t.ID == term.ID && t.Key == term.Key {
			n++
		}
	}
	return n
}

// PreScore implements framework.PreScore. It skips scoring if no term of the pod or of other pods
// affects the score.
func (p Plugin) PreScore(_ context.Context, c *framework.Cycle, _ []*framework.NodeInfo) *framework.Status {
	x := c.Snapshot.Index
	if p.OwnOnly && (c.Pod.Affinity == nil || len(c.Pod.Affinity.Preferred) == 0) {
		return framework.SkipStatus
	}
	weighing := x.Weighing(c.Pod.Pod)
	var weights []rule
	if a := c.Pod.Affinity; a != nil {
		for _, t := range a.Preferred {
			if d := x.Domains(x.Set(t.Peers), t.Key, framework.EveryNode); d.All() > 0 {
				weights = append(weights, rule{t, d})
			}
		}
	}
	if len(weights)+len(weighing) == 0 {
		return framework.SkipStatus
	}
	st, ok := c.Get(Name).(*state)
	if !ok {
		st = &state{}
		c.Put(Name, st)
	}
	st.weights, st.weighing = weights, weighing
	return nil
}

// Score implements framework.Score: a sum of term weights over the pods in the node's topology
// domains. For each of them, the weights of two kinds of terms are added: this pod's preferred
// terms that select the other pod, and the other pod's terms that select this pod.
func (p Plugin) Score(_ context.Context, c *framework.Cycle, n *framework.NodeInfo) (int64, *framework.Status) {
	st, ok := c.Get(Name).(*state)
	if !ok {
		return 0, nil
	}
	var sum, hard int64 = 0, defaultHardWeight
	if p.HardWeight != nil {
		hard = int64(*p.HardWeight)
	}
	for i := range st.weights {
		r := &st.weights[i]
		if at := r.domains.At(n); at != framework.NoDomain {
			sum += r.Weight * int64(r.domains.Pods(at))
		}
	}
	for _, e := range st.weighing {
		if at := e.At(n); at != framework.NoDomain {
			sum += e.Weight(hard) * int64(e.Pods(at))
		}
	}
	return sum, nil
}

// NormalizeScore implements framework.NormalizeScore: the lowest score, which may be negative,
// becomes 0, and the highest framework.MaxScore.
func (Plugin) NormalizeScore(_ context.Context, _ *framework.Cycle, scores []int64) *framework.Status {
	least, most := int64(math.MaxInt64), int64(math.MinInt64)
	for _, s := range scores {
		least, most = min(least, s), max(most, s)
	}
	for i, s := range scores {
		if scores[i] = 0; most > least {
			scores[i] = int64(float64(framework.MaxScore) * (float64(s-least) / float64(most-least)))
		}
	}
	return nil
}

// MayHelp implements framework.Requeue. A pod may help that a required term selects and that was
// added. So may the removal of a pod that anti-affinity kept apart, and a node that was added or
// changed. Changed labels of a namespace may change the selected pods.
func (Plugin) MayHelp(e framework.Event, pod *v1.Pod, obj any) bool {
	own := framework.AffinityOf(pod)
	switch o := obj.(type) {
	case *v1.Pod:
		switch e {
		case framework.PodAdded:
			return wants(own, o)
		case framework.PodRemoved:
			// After the last pod of its group is removed, a pod may be the first again.
			return parts(own, pod, o) || wants(own, o)
		}
	case framework.PodUpdate:
		return o.Old == nil || !wants(own, o.Old) && wants(own, o.Now) || parts(own, pod, o.Old) && !parts(own, pod, o.Now)
	case *v1.Node:
		return e == framework.NodeAdded || e == framework.NodeLabels || e == framework.NodeTaints
	case *v1.Namespace:
		return e == framework.NamespaceLabels
	}
	return false
}

// wants reports whether a required affinity term in own may select the other pod. A namespace
// selector is assumed to match.
func wants(own *framework.Affinity, other *v1.Pod) bool {
	if own == nil {
		return false
	}
	for _, t := range own.Required {
		if t.MayMean(other) {
			return true
		}
	}
	return false
}

// parts reports whether a required anti-affinity term of pod may select the other pod, or a term of
// the other pod may select pod. own contains the terms of pod.
func parts(own *framework.Affinity, pod, other *v1.Pod) bool {
	if own != nil {
		for _, t := range own.Avoided {
			if t.MayMean(other) {
				return true
			}
		}
	}
	if theirs := framework.AffinityOf(other); theirs != nil {
		for _, t := range theirs.Avoided {
			if t.MayMean(pod) {
				return true
			}
		}
	}
	return false
}
