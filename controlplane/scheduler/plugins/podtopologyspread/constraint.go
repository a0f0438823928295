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

// constraint is a parsed topology spread constraint of a pod, or a default constraint.
type constraint struct {
	key                 string
	maxSkew, minDomains int
	selector            labels.Selector
	podSelector         *framework.PodSelector
	ignoreAffinity      bool
	honorTaints         bool
}

// systemConstraints are the default constraints of kube-scheduler for pods that have no topology
// spread constraints.
var systemConstraints = []v1.TopologySpreadConstraint{
	{TopologyKey: v1.LabelHostname, WhenUnsatisfiable: v1.ScheduleAnyway, MaxSkew: 3},
	{TopologyKey: v1.LabelTopologyZone, WhenUnsatisfiable: v1.ScheduleAnyway, MaxSkew: 5},
}

func podLabels(pod *v1.Pod) labels.Set { return labels.Set(pod.Labels) }

// constraintsOf returns the pod's own topology spread constraints whose whenUnsatisfiable is the
// given action: DoNotSchedule or ScheduleAnyway.
func constraintsOf(pod *v1.Pod, action v1.UnsatisfiableConstraintAction) []constraint {
	var out []constraint
	for i := range pod.Spec.TopologySpreadConstraints {
		if c := &pod.Spec.TopologySpreadConstraints[i]; c.WhenUnsatisfiable == action {
			out = append(out, newConstraint(pod, c, selectorOf(pod, c)))
		}
	}
	return out
}

func newConstraint(pod *v1.Pod, c *v1.TopologySpreadConstraint, selector labels.Selector) constraint {
	out := constraint{key: c.TopologyKey, maxSkew: int(c.MaxSkew), minDomains: 1, selector: selector,
		podSelector: framework.NewNamespacePodSelector(pod.Namespace, selector)}
	if c.MinDomains != nil {
		out.minDomains = int(*c.MinDomains)
	}
	out.ignoreAffinity = c.NodeAffinityPolicy != nil && *c.NodeAffinityPolicy == v1.NodeInclusionPolicyIgnore
	out.honorTaints = c.NodeTaintsPolicy != nil && *c.NodeTaintsPolicy == v1.NodeInclusionPolicyHonor
	return out
}

// selectorOf returns the label selector of the pod's constraint c, together with the pod's values
// of its matchLabelKeys. The API server has already added these values to the labelSelector of pods
// that were created through it; adding them again has no effect.
func selectorOf(pod *v1.Pod, c *v1.TopologySpreadConstraint) labels.Selector {
	sel, err := metav1.LabelSelectorAsSelector(c.LabelSelector)
	if err != nil {
		return labels.Nothing()
	}
	for _, key := range c.MatchLabelKeys {
		if value, ok := pod.Labels[key]; ok {
			if r, err := labels.NewRequirement(key, selection.In, []string{value}); err == nil {
				sel = sel.Add(*r)
			}
		}
	}
	return sel
}

// eligibleNodes returns the selection of the nodes on which the constraint counts pods. Such a node
// has all given keys as labels. According to nodeAffinityPolicy and nodeTaintsPolicy, it must also
// match the pod's node affinity and have no taints that the pod does not tolerate.
func (c *constraint) eligibleNodes(pod *v1.Pod, keys []string) framework.NodeSelection {
	var id strings.Builder
	id.WriteString(strings.Join(keys, "\x00"))
	affinity := !c.ignoreAffinity && (len(pod.Spec.NodeSelector) > 0 ||
		pod.Spec.Affinity != nil && pod.Spec.Affinity.NodeAffinity != nil &&
			pod.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution != nil)
	var required nodeaffinity.RequiredNodeAffinity
	if affinity {
		required = nodeaffinity.GetRequiredNodeAffinity(pod)
		appendID(&id, "affinity", pod.Spec.NodeSelector)
		if pod.Spec.Affinity != nil {
			appendID(&id, "terms", pod.Spec.Affinity.NodeAffinity)
		}
	}
	if c.honorTaints {
		appendID(&id, "taints", pod.Spec.Tolerations)
	}
	honorTaints := c.honorTaints
	return framework.NodeSelection{ID: id.String(), Has: func(n *v1.Node) bool {
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
		return !honorTaints || toleratesTaints(n, pod.Spec.Tolerations)
	}}
}

// appendID appends the value v to the ID of a framework.NodeSelection. label distinguishes
// different kinds of values. Pod counts are cached by that ID, so each value that affects the
// selected nodes must be appended. v must be an API type, so that encoding cannot fail.
func appendID(id *strings.Builder, label string, v any) {
	id.WriteString("\x01" + label + "\x01")
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	id.Write(b)
}

func toleratesTaints(n *v1.Node, tolerations []v1.Toleration) bool {
	for i := range n.Spec.Taints {
		t := &n.Spec.Taints[i]
		if t.Effect != v1.TaintEffectPreferNoSchedule && !framework.Tolerated(tolerations, t) {
			return false
		}
	}
	return true
}

// defaultConstraints returns those default constraints in list that have the given action, for a
// pod without constraints of its own. They select the pods that the pod's Services and its
// controller select. If the pod has neither Services nor a controller, the result is empty.
func defaultConstraints(
	c *framework.Cycle, list []v1.TopologySpreadConstraint, action v1.UnsatisfiableConstraintAction,
) []constraint {
	pod, w := c.Pod.Pod, &c.Snapshot.Workloads
	merged := labels.Set{}
	if w.Services != nil {
		for _, selector := range w.Services(pod) {
			merged = labels.Merge(merged, selector)
		}
	}
	selector := labels.NewSelector()
	if len(merged) > 0 {
		selector = merged.AsSelector()
	}
	if owner := metav1.GetControllerOfNoCopy(pod); owner != nil && w.Owner != nil {
		if more := w.Owner(pod.Namespace, owner); more != nil {
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
			out = append(out, newConstraint(pod, &list[i], selector))
		}
	}
	return out
}
