// Package nodeaffinity is the plugin NodeAffinity. It filters nodes by the pod's node selector and
// required node affinity, and scores them by its preferred node affinity.
package nodeaffinity

import (
	"context"
	"encoding/json"
	"slices"

	v1 "k8s.io/api/core/v1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"

	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// Name is the name of the plugin in a KubeSchedulerConfiguration.
const Name = "NodeAffinity"

var (
	refused  = framework.RefuseForGood(Name, "node(s) didn't match Pod's node affinity/selector")
	enforced = framework.RefuseForGood(Name, "node(s) didn't match scheduler-enforced node affinity")
)

// Plugin filters and scores nodes by the pod's node selector and node affinity. The zero value is
// the default configuration.
type Plugin struct {
	// Added is addedAffinity: node affinity that applies to every pod in addition to the pod's own;
	// nil means none. It must be valid.
	Added *v1.NodeAffinity
}

// state caches, for each node, whether the node matches the pod's node selector and node affinity,
// and its score. PreFilter and PreScore prepare it for Filter and Score.
type state struct {
	required  *framework.PerNode // 1 for a node that matches the pod's own required rules, otherwise 0
	added     *framework.PerNode
	matches   func(n *v1.Node) (bool, error)
	preferred *framework.PerNode // score of each node: sum of the weights of the matching preferred terms
}

// Name implements framework.Plugin: it returns the name of the plugin.
func (Plugin) Name() string { return Name }

// PreFilter implements framework.PreFilter. If every required node affinity term of the pod
// contains node names, it returns these nodes, so that no others are filtered.
func (p Plugin) PreFilter(_ context.Context, c *framework.Cycle) (map[string]struct{}, *framework.Status) {
	spec := &c.Pod.Pod.Spec
	terms := requiredTerms(spec)
	own := len(spec.NodeSelector) > 0 || terms != nil
	st := &state{}
	if p.Added != nil && p.Added.RequiredDuringSchedulingIgnoredDuringExecution != nil {
		st.added = requiredNodes(c, nil, p.Added.RequiredDuringSchedulingIgnoredDuringExecution)
	}
	switch {
	case !own && st.added == nil:
		return nil, framework.SkipStatus
	case !own:
		c.Put(Name, st)
		return nil, nil
	}
	only := nodesByName(terms)
	if only == nil { // a pod with node names in its affinity is rarely tried twice, so its matches are not cached
		st.required = requiredNodes(c, spec.NodeSelector, terms)
	}
	if st.required == nil {
		r := nodeaffinity.GetRequiredNodeAffinity(c.Pod.Pod)
		st.matches = r.Match
	}
	c.Put(Name, st)
	return only, nil
}

// requiredNodes returns a cache that contains 1 for each node that matches both the node selector
// and the required node affinity terms, and
// 0 for each other node. It returns nil if the terms are invalid.
func requiredNodes(c *framework.Cycle, selector map[string]string, terms *v1.NodeSelector) *framework.PerNode {
	return c.Snapshot.Index.PerNode(Name+" required "+ruleID(selector, terms), func() (func(*v1.Node) int32, bool) {
		if terms != nil {
			if _, err := nodeaffinity.NewNodeSelector(terms); err != nil {
				return nil, false
			}
		}
		// The cache is shared by pods with the same ID, so only fields that are part of the ID may
		// be used.
		r := nodeaffinity.GetRequiredNodeAffinity(&v1.Pod{Spec: v1.PodSpec{NodeSelector: selector,
			Affinity: &v1.Affinity{
				NodeAffinity: &v1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: terms}}}})
		return func(n *v1.Node) int32 {
			if fits, err := r.Match(n); err == nil && fits {
				return 1
			}
			return 0
		}, true
	})
}

// ruleID returns a text that is equal for equal node selectors and affinity terms, for the ID of a
// framework.PerNode. rules must be API types, so that encoding cannot fail.
func ruleID(rules ...any) string {
	b, err := json.Marshal(rules)
	if err != nil {
		panic(err)
	}
	return string(b)
}

func requiredTerms(spec *v1.PodSpec) *v1.NodeSelector {
	if spec.Affinity == nil || spec.Affinity.NodeAffinity == nil {
		return nil
	}
	return spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution
}

// nodesByName returns the node names in the required terms s, if every term requires node names
// (metadata.name), as for the pods of a DaemonSet. Otherwise it returns nil.
func nodesByName(s *v1.NodeSelector) map[string]struct{} {
	if s == nil || len(s.NodeSelectorTerms) == 0 {
		return nil
	}
	out := make(map[string]struct{})
	for _, t := range s.NodeSelectorTerms {
		names := 0
		for _, f := range t.MatchFields {
			if f.Key == "metadata.name" && f.Operator == v1.NodeSelectorOpIn {
				for _, v := range f.Values {
					out[v] = struct{}{}
					names++
				}
			}
		}
		if names == 0 {
			return nil
		}
	}
	return out
}

// Filter implements framework.Filter: it refuses a node that does not match the pod's node
// selector, its required node affinity, or the required affinity in Plugin.Added.
func (Plugin) Filter(_ context.Context, c *framework.Cycle, n *framework.NodeInfo) *framework.Status {
	st, ok := c.Get(Name).(*state)
	if !ok {
		return nil
	}
	if st.added != nil && st.added.Of(n) != 1 {
		return enforced
	}
	fits := st.required == nil && st.matches == nil
	if st.required != nil {
		fits = st.required.Of(n) == 1
	} else if st.matches != nil {
		var err error
		if fits, err = st.matches(n.Node); err != nil {
			return framework.RefuseForGood(Name, err.Error())
		}
	}
	if !fits {
		return refused
	}
	return nil
}

// PreScore implements framework.PreScore. It returns Skip if neither the pod nor Plugin.Added has
// preferred node affinity terms.
func (p Plugin) PreScore(_ context.Context, c *framework.Cycle, _ []*framework.NodeInfo) *framework.Status {
	var terms []v1.PreferredSchedulingTerm
	if a := c.Pod.Pod.Spec.Affinity; a != nil && a.NodeAffinity != nil {
		terms = a.NodeAffinity.PreferredDuringSchedulingIgnoredDuringExecution
	}
	if p.Added != nil && len(p.Added.PreferredDuringSchedulingIgnoredDuringExecution) > 0 {
		terms = slices.Concat(terms, p.Added.PreferredDuringSchedulingIgnoredDuringExecution)
	}
	if len(terms) == 0 {
		return framework.SkipStatus
	}
	var failed error
	score := c.Snapshot.Index.PerNode(Name+" preferred "+ruleID(terms), func() (func(*v1.Node) int32, bool) {
		preferred, err := nodeaffinity.NewPreferredSchedulingTerms(terms)
		if failed = err; err != nil {
			return nil, false
		}
		return func(n *v1.Node) int32 { return int32(preferred.Score(n)) }, true
	})
	if score == nil {
		return framework.Fail(Name, failed)
	}
	st, ok := c.Get(Name).(*state)
	if !ok {
		st = &state{}
		c.Put(Name, st)
	}
	st.preferred = score
	return nil
}

// Score implements framework.Score: it returns the sum of the weights of the preferred node
// affinity terms that match the node.
func (Plugin) Score(_ context.Context, c *framework.Cycle, n *framework.NodeInfo) (int64, *framework.Status) {
	if st, ok := c.Get(Name).(*state); ok && st.preferred != nil {
		return int64(st.preferred.Of(n)), nil
	}
	return 0, nil
}

// NormalizeScore implements framework.NormalizeScore: the highest score becomes framework.MaxScore.
func (Plugin) NormalizeScore(_ context.Context, _ *framework.Cycle, scores []int64) *framework.Status {
	framework.Normalize(scores, false)
	return nil
}

// MayHelp implements framework.Requeue. It returns true if a node was added or its labels changed,
// and the node matches the pod's own node selector and required node affinity.
func (Plugin) MayHelp(e framework.Event, pod *v1.Pod, obj any) bool {
	if e != framework.NodeAdded && e != framework.NodeLabels {
		return false
	}
	n, ok := obj.(*v1.Node)
	if !ok {
		return true
	}
	fits, err := nodeaffinity.GetRequiredNodeAffinity(pod).Match(n)
	return err != nil || fits
}
