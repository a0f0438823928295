// Package interpodaffinity is the plugin InterPodAffinity. It implements inter-pod affinity and
// anti-affinity: the required and preferred terms of the pod to schedule, and the terms of pods on
// nodes that select this pod.
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

// defaultHardWeight is the weight that applies if Plugin.HardWeight is nil.
const defaultHardWeight = 1

// Plugin filters and scores nodes by inter-pod affinity and anti-affinity. The zero value is the
// default configuration.
type Plugin struct {
	// HardWeight is hardPodAffinityWeight: the weight in scores of a required affinity term of a
	// pod on a node that selects the pod to schedule. nil means 1.
	HardWeight *int32
	// OwnOnly is ignorePreferredTermsOfExistingPods: a pod without preferred terms of its own is
	// not scored.
	OwnOnly bool
}

// Name implements framework.Plugin: it returns the name of the plugin.
func (Plugin) Name() string { return Name }

// state is the data of InterPodAffinity for one scheduling attempt. PreFilter and PreScore store it
// in the Cycle.
type state struct {
	required []rule // the pod's required affinity terms; the rules count the pods that match all of them
	founder  bool   // the pod matches its own required affinity terms, so it may be placed first
	avoided  []rule
	existing []*framework.TermCount

	weights  []rule
	weighing []*framework.TermCount
}

// rule is an affinity or anti-affinity term of the pod to schedule, with the number of pods that it
// selects in each topology domain.
type rule struct {
	framework.Term
	domains *framework.Domains
}

// PreFilter implements framework.PreFilter. It looks up how many pods the pod's required terms
// select in each topology domain, and the required anti-affinity terms of pods on nodes that select
// the pod.
func (Plugin) PreFilter(_ context.Context, c *framework.Cycle) (map[string]struct{}, *framework.Status) {
	x, pod := c.Snapshot.Index, c.Pod.Pod
	st := &state{existing: x.AntiAffinityTerms(pod)}
	if a := c.Pod.Affinity; a != nil {
		if len(a.Required) > 0 {
			selectors := make([]*framework.PodSelector, 0, len(a.Required))
			for _, t := range a.Required {
				selectors = append(selectors, t.PodSelector)
			}
			set := x.Set(selectors...)
			for _, t := range a.Required {
				st.required = append(st.required, rule{t, x.Domains(set, t.Key, framework.EveryNode)})
			}
			st.founder = meetsAll(c.Pod.Affinity.Required, pod, x.Namespaces())
		}
		for _, t := range a.Avoided {
			st.avoided = append(st.avoided, rule{t, x.Domains(x.Set(t.PodSelector), t.Key, framework.EveryNode)})
		}
	}
	// A nominated pod, which is on no node yet, may have an anti-affinity term that selects this
	// pod.
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

// Filter implements framework.Filter: it refuses a node on which the pod would violate its own
// required affinity or anti-affinity terms, or a required anti-affinity term of another pod.
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

// satisfiesAffinity reports whether the node satisfies the pod's required affinity terms: for each
// of them, the node's topology domain contains a pod that matches all of these terms. If no pod in
// the cluster matches them, the pod to schedule must itself match them.
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
	there, anyPods := true, false
	for i := range st.required {
		r := &st.required[i]
		at := r.domains.At(n)
		if at == framework.NoDomain {
			return false
		}
		there = there && r.domains.Pods(at)+more > 0
		anyPods = anyPods || r.domains.All()+more > 0
	}
	return there || !anyPods && st.founder
}

// satisfiesAntiAffinity reports whether the node satisfies the pod's required anti-affinity terms:
// the node's topology domains contain no pod that one of these terms selects.
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

// satisfiesExistingAntiAffinity reports whether placing the pod on the node n violates no required
// anti-affinity term of other pods: the node's topology domains contain no pod with such a term
// that selects the pod.
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

// countAntiAffinityTerm returns the number of the pod's required anti-affinity terms that are equal
// to the given term.
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

// PreScore implements framework.PreScore. It looks up the terms that affect the scores: the pod's
// preferred terms, and terms of other pods that select the pod. It returns Skip if there are none.
func (p Plugin) PreScore(_ context.Context, c *framework.Cycle, _ []*framework.NodeInfo) *framework.Status {
	x := c.Snapshot.Index
	if p.OwnOnly && (c.Pod.Affinity == nil || len(c.Pod.Affinity.Preferred) == 0) {
		return framework.SkipStatus
	}
	weighing := x.ScoringTerms(c.Pod.Pod)
	var weights []rule
	if a := c.Pod.Affinity; a != nil {
		for _, t := range a.Preferred {
			if d := x.Domains(x.Set(t.PodSelector), t.Key, framework.EveryNode); d.All() > 0 {
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

// Score implements framework.Score: it returns a sum of term weights over the pods in the node's
// topology domains. For each of these pods, the weights of two kinds of terms are added: preferred
// terms of the pod to schedule that select the other pod, and terms of the other pod that select
// the pod to schedule.
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

// NormalizeScore implements framework.NormalizeScore: it scales the scores so that the lowest,
// which may be negative, becomes 0 and the highest becomes framework.MaxScore.
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

// MayHelp implements framework.Requeue. It returns true if a pod that one of the pod's required
// affinity terms selects was added or removed, and if a pod that anti-affinity kept apart from the
// pod was removed. It also returns true for an update of a pod's labels with one of these effects,
// for a new or changed node, and for changed labels of a namespace, because terms may then select
// other pods. Other events do not help.
func (Plugin) MayHelp(e framework.Event, pod *v1.Pod, obj any) bool {
	own := framework.AffinityOf(pod)
	switch o := obj.(type) {
	case *v1.Pod:
		switch e {
		case framework.PodAdded:
			return maySelect(own, o)
		case framework.PodRemoved:
			// If the last pod that its affinity terms select is removed, a pod that matches its own
			// terms may be placed anywhere.
			return maySeparate(own, pod, o) || maySelect(own, o)
		}
	case framework.PodUpdate:
		return o.Old == nil || !maySelect(own, o.Old) && maySelect(own, o.Now) ||
			maySeparate(own, pod, o.Old) && !maySeparate(own, pod, o.Now)
	case *v1.Node:
		return e == framework.NodeAdded || e == framework.NodeLabels || e == framework.NodeTaints
	case *v1.Namespace:
		return e == framework.NamespaceLabels
	}
	return false
}

// maySelect reports whether one of the required affinity terms in own may select the pod other.
// Namespace selectors are assumed to match.
func maySelect(own *framework.Affinity, other *v1.Pod) bool {
	if own == nil {
		return false
	}
	for _, t := range own.Required {
		if t.MaySelect(other) {
			return true
		}
	}
	return false
}

// maySeparate reports whether a required anti-affinity term of one of the two pods may select the
// other one. own contains the terms of pod.
func maySeparate(own *framework.Affinity, pod, other *v1.Pod) bool {
	if own != nil {
		for _, t := range own.Avoided {
			if t.MaySelect(other) {
				return true
			}
		}
	}
	if theirs := framework.AffinityOf(other); theirs != nil {
		for _, t := range theirs.Avoided {
			if t.MaySelect(pod) {
				return true
			}
		}
	}
	return false
}
