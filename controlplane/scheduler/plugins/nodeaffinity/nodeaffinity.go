// Package nodeaffinity keeps a pod to the nodes that its node selector and required node affinity
// match, and prefers those that its preferred terms match.
package nodeaffinity

import (
	"context"

	v1 "k8s.io/api/core/v1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"

	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// Name of the plugin.
const Name = "NodeAffinity"

var refused = framework.RefuseForGood(Name, "node(s) didn't match Pod's node affinity/selector")

// Plugin filters and scores by node labels.
type Plugin struct{}

// state is what PreFilter and PreScore work out once.
type state struct {
	required  nodeaffinity.RequiredNodeAffinity
	preferred *nodeaffinity.PreferredSchedulingTerms
}

// Name implements framework.Plugin.
func (Plugin) Name() string { return Name }

// PreFilter implements framework.PreFilter.
func (Plugin) PreFilter(_ context.Context, c *framework.Cycle) (map[string]struct{}, *framework.Status) {
	spec := &c.Pod.Pod.Spec
	terms := requiredTerms(spec)
	if len(spec.NodeSelector) == 0 && terms == nil {
		return nil, framework.SkipStatus
	}
	c.Put(Name, &state{required: nodeaffinity.GetRequiredNodeAffinity(c.Pod.Pod)})
	return named(terms), nil
}

func requiredTerms(spec *v1.PodSpec) *v1.NodeSelector {
	if spec.Affinity == nil || spec.Affinity.NodeAffinity == nil {
		return nil
	}
	return spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution
}

// named is the set of nodes when every term names some (a DaemonSet's pods do); nil when not.
func named(s *v1.NodeSelector) map[string]struct{} {
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

// Filter implements framework.Filter.
func (Plugin) Filter(_ context.Context, c *framework.Cycle, n *framework.NodeInfo) *framework.Status {
	st, ok := c.Get(Name).(*state)
	if !ok {
		return nil
	}
	fits, err := st.required.Match(n.Node)
	if err != nil {
		return framework.RefuseForGood(Name, err.Error())
	}
	if !fits {
		return refused
	}
	return nil
}

// PreScore implements framework.PreScore.
func (Plugin) PreScore(_ context.Context, c *framework.Cycle, _ []*framework.NodeInfo) *framework.Status {
	a := c.Pod.Pod.Spec.Affinity
	if a == nil || a.NodeAffinity == nil || len(a.NodeAffinity.PreferredDuringSchedulingIgnoredDuringExecution) == 0 {
		return framework.SkipStatus
	}
	terms, err := nodeaffinity.NewPreferredSchedulingTerms(a.NodeAffinity.PreferredDuringSchedulingIgnoredDuringExecution)
	if err != nil {
		return framework.Fail(Name, err)
	}
	st, ok := c.Get(Name).(*state)
	if !ok {
		st = &state{}
		c.Put(Name, st)
	}
	st.preferred = terms
	return nil
}

// Score implements framework.Score: the sum of the weights of the preferred terms that match.
func (Plugin) Score(_ context.Context, c *framework.Cycle, n *framework.NodeInfo) (int64, *framework.Status) {
	if st, ok := c.Get(Name).(*state); ok && st.preferred != nil {
		return st.preferred.Score(n.Node), nil
	}
	return 0, nil
}

// NormalizeScore implements framework.NormalizeScore.
func (Plugin) NormalizeScore(_ context.Context, _ *framework.Cycle, scores []int64) *framework.Status {
	framework.Normalize(scores, false)
	return nil
}

// MayHelp implements framework.Requeue.
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
