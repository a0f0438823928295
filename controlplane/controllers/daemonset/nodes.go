package daemonset

import (
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"

	"keelson.dev/keelson/controlplane/controllers/engine"
)

// daemonTolerations returns the tolerations that are added to every pod of a DaemonSet, so that it
// runs regardless of the conditions of its node. hostNetwork adds the toleration for a missing pod
// network.
func daemonTolerations(hostNetwork bool) []corev1.Toleration {
	out := []corev1.Toleration{
		{Key: corev1.TaintNodeNotReady, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute},
		{Key: corev1.TaintNodeUnreachable, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute},
		{Key: corev1.TaintNodeDiskPressure, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule},
		{Key: corev1.TaintNodeMemoryPressure, Operator: corev1.TolerationOpExists,
			Effect: corev1.TaintEffectNoSchedule},
		{Key: corev1.TaintNodePIDPressure, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule},
		{Key: corev1.TaintNodeUnschedulable, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule},
	}
	if hostNetwork {
		out = append(out, corev1.Toleration{
			Key: corev1.TaintNodeNetworkUnavailable, Operator: corev1.TolerationOpExists,
			Effect: corev1.TaintEffectNoSchedule})
	}
	return out
}

// podTemplate returns the pod template of a DaemonSet with daemonTolerations.
func podTemplate(set *appsv1.DaemonSet) *corev1.PodTemplateSpec {
	t := set.Spec.Template.DeepCopy()
	for _, add := range daemonTolerations(t.Spec.HostNetwork) {
		has := false
		for i := range t.Spec.Tolerations {
			has = has || t.Spec.Tolerations[i].MatchToleration(&add)
		}
		if !has {
			t.Spec.Tolerations = append(t.Spec.Tolerations, add)
		}
	}
	return t
}

// newPod returns the pod of a DaemonSet for a node, from template t with this revision hash. The
// scheduler can bind the pod only to that node.
func newPod(set *appsv1.DaemonSet, t *corev1.PodTemplateSpec, hash, node string) *corev1.Pod {
	p := engine.PodFrom(set, ownerRef(set), t)
	if p.Labels == nil {
		p.Labels = map[string]string{}
	}
	p.Labels[appsv1.ControllerRevisionHashLabelKey] = hash
	if g := set.Annotations[appsv1.DeprecatedTemplateGeneration]; g != "" {
		p.Labels[extensionsTemplateGeneration] = g
	}
	pinToNode(p, node)
	return p
}

// extensionsTemplateGeneration is the pod label that identified the template before
// ControllerRevisions existed.
const extensionsTemplateGeneration = "pod-template-generation"

// pinToNode sets the required node affinity of pod p to this node. It replaces the terms of the
// template, which ShouldRun has already evaluated.
func pinToNode(p *corev1.Pod, node string) {
	if p.Spec.Affinity == nil {
		p.Spec.Affinity = &corev1.Affinity{}
	}
	a := p.Spec.Affinity
	if a.NodeAffinity == nil {
		a.NodeAffinity = &corev1.NodeAffinity{}
	}
	a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution =
		&corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
			MatchFields: []corev1.NodeSelectorRequirement{{Key: metav1.ObjectNameField,
				Operator: corev1.NodeSelectorOpIn,
				Values:   []string{node}}},
		}}}
}

// nodeOf returns the node of pod p of a DaemonSet: the node to which it is bound or, before that,
// the node for which it was created.
func nodeOf(p *corev1.Pod) string {
	if p.Spec.NodeName != "" {
		return p.Spec.NodeName
	}
	if a := p.Spec.Affinity; a != nil && a.NodeAffinity != nil &&
		a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution != nil {
		for _, t := range a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms {
			for _, f := range t.MatchFields {
				if f.Key == metav1.ObjectNameField && f.Operator == corev1.NodeSelectorOpIn && len(f.Values) == 1 {
					return f.Values[0]
				}
			}
		}
	}
	return ""
}

// ShouldRun reports whether a pod of template t must run on node n. stay reports whether an
// existing pod may stay there. A taint with effect NoSchedule only prevents new pods.
func ShouldRun(t *corev1.PodTemplateSpec, n *corev1.Node) (run, stay bool) {
	if t.Spec.NodeName != "" && t.Spec.NodeName != n.Name {
		return false, false
	}
	ok, err := nodeaffinity.GetRequiredNodeAffinity(&corev1.Pod{Spec: t.Spec}).Match(n)
	if err != nil || !ok {
		return false, false
	}
	run, stay = true, true
	for i := range n.Spec.Taints {
		taint := &n.Spec.Taints[i]
		if taint.Effect == corev1.TaintEffectPreferNoSchedule || isTaintTolerated(t.Spec.Tolerations, taint) {
			continue
		}
		run = false
		if taint.Effect == corev1.TaintEffectNoExecute {
			stay = false
		}
	}
	return run, stay
}

func isTaintTolerated(list []corev1.Toleration, taint *corev1.Taint) bool {
	return slices.ContainsFunc(list, func(tol corev1.Toleration) bool { return engine.ToleratesTaint(&tol, taint) })
}
