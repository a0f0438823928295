package podtopologyspread

import (
	"encoding/json"
	"strings"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"

	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// constraint is a TopologySpreadConstraint made ready.
type constraint struct {
	key                 string
	maxSkew, minDomains int
	selector            labels.Selector
	peers               *framework.Peers
	ignoreAffinity      bool
	honorTaints         bool
}

// The constraints of pods that have none of their own.
var system = []v1.TopologySpreadConstraint{
	{TopologyKey: v1.LabelHostname, WhenUnsatisfiable: v1.ScheduleAnyway, MaxSkew: 3},
	{TopologyKey: v1.LabelTopologyZone, WhenUnsatisfiable: v1.ScheduleAnyway, MaxSkew: 5},
}

func podLabels(p *v1.Pod) labels.Set { return labels.Set(p.Labels) }

// constraintsOf makes the pod's constraints of one kind ready.
func constraintsOf(p *v1.Pod, action v1.UnsatisfiableConstraintAction) []constraint {
	var out []constraint
	for i := range p.Spec.TopologySpreadConstraints {
		if c := &p.Spec.TopologySpreadConstraints[i]; c.WhenUnsatisfiable == action {
			out = append(out, ready(p, c, selectorOf(p, c)))
		}
	}
	return out
}

func ready(p *v1.Pod, c *v1.TopologySpreadConstraint, selector labels.Selector) constraint {
	out := constraint{key: c.TopologyKey, maxSkew: int(c.MaxSkew), minDomains: 1, selector: selector,
		peers: framework.PeersIn(p.Namespace, selector)}
	if c.MinDomains != nil {
		out.minDomains = int(*c.MinDomains)
	}
	out.ignoreAffinity = c.NodeAffinityPolicy != nil && *c.NodeAffinityPolicy == v1.NodeInclusionPolicyIgnore
	out.honorTaints = c.NodeTaintsPolicy != nil && *c.NodeTaintsPolicy == v1.NodeInclusionPolicyHonor
	return out
}

// selectorOf is the constraint's selector with the pod's values of matchLabelKeys, which the API server has put there
// already for pods that were made through it.
func selectorOf(p *v1.Pod, c *v1.TopologySpreadConstraint) labels.Selector {
	sel, err := metav1.LabelSelectorAsSelector(c.LabelSelector)
	if err != nil {
		return labels.Nothing()
	}
	for _, key := range c.MatchLabelKeys {
		if value, ok := p.Labels[key]; ok {
			if r, err := labels.NewRequirement(key, selection.In, []string{value}); err == nil {
				sel = sel.Add(*r)
			}
		}
	}
	return sel
}

// nodes are those that take part: with all the keys, and such as the pod's node affinity and tolerations allow,
// where the policies say so.
func (c *constraint) nodes(p *v1.Pod, keys []string) framework.Nodes {
	var id strings.Builder
	id.WriteString(strings.Join(keys, "\x00"))
	affinity := !c.ignoreAffinity && (len(p.Spec.NodeSelector) > 0 ||
		p.Spec.Affinity != nil && p.Spec.Affinity.NodeAffinity != nil &&
			p.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution != nil)
	var required nodeaffinity.RequiredNodeAffinity
	if affinity {
		required = nodeaffinity.GetRequiredNodeAffinity(p)
		describe(&id, "affinity", p.Spec.NodeSelector)
		if p.Spec.Affinity != nil {
			describe(&id, "terms", p.Spec.Affinity.NodeAffinity)
		}
	}
	if c.honorTaints {
		describe(&id, "taints", p.Spec.Tolerations)
	}
	honorTaints := c.honorTaints
	return framework.Nodes{ID: id.String(), Has: func(n *v1.Node) bool {
		for _, key := range keys {
			if _, ok := n.Labels[key]; !ok {
				return false
			}
		}
		if affinity {
			if fits, err := required.Match(n); err != nil || !fits {
				return false
			}
		}
		return !honorTaints || tolerated(n, p.Spec.Tolerations)
	}}
}

// describe adds what a choice of nodes depends on. These are plain API types: they can be written.
func describe(id *strings.Builder, what string, v any) {
	id.WriteString("\x01" + what + "\x01")
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	id.Write(b)
}

func tolerated(n *v1.Node, tolerations []v1.Toleration) bool {
	for i := range n.Spec.Taints {
		t := &n.Spec.Taints[i]
		if t.Effect != v1.TaintEffectPreferNoSchedule && !framework.Tolerated(tolerations, t) {
			return false
		}
	}
	return true
}

// defaults are the constraints of one kind of a pod that has none: by what the Services that select it and its owner
// select.
func defaults(c *framework.Cycle, list []v1.TopologySpreadConstraint, action v1.UnsatisfiableConstraintAction) []constraint {
	p, w := c.Pod.Pod, &c.Snapshot.Workloads
	merged := labels.Set{}
	if w.Services != nil {
		for _, selector := range w.Services(p) {
			merged = labels.Merge(merged, selector)
		}
	}
	selector := labels.NewSelector()
	if len(merged) > 0 {
		selector = merged.AsSelector()
	}
	if owner := metav1.GetControllerOfNoCopy(p); owner != nil && w.Owner != nil {
		if more := w.Owner(p.Namespace, owner); more != nil {
			if requirements, ok := more.Requirements(); ok {
				selector = selector.Add(requirements...)
			}
		}
	}
	if selector.Empty() {
		return nil
	}
	out := make([]constraint, 0, len(list))
	for i := range list {
		if list[i].WhenUnsatisfiable == action {
			out = append(out, ready(p, &list[i], selector))
		}
	}
	return out
}
