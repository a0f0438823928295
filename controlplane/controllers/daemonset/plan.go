// Package daemonset maintains one pod of a DaemonSet on every eligible node.
package daemonset

import (
	"cmp"
	"slices"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

var kind = appsv1.SchemeGroupVersion.WithKind("DaemonSet")

func ownerRef(set *appsv1.DaemonSet) metav1.OwnerReference {
	return *metav1.NewControllerRef(set, kind)
}

// Snapshot is the input of PlanDaemonSet: a DaemonSet, its pods, and the nodes.
type Snapshot struct {
	Set   *appsv1.DaemonSet
	Nodes []*corev1.Node
	Pods  []*corev1.Pod // pods that the DaemonSet controls
	Going func(*corev1.Pod) bool
	Hash  string // revision hash of the current template
	Now   time.Time
}

// Step is the result of PlanDaemonSet: the pods to create and to delete.
type Step struct {
	Create []string      // nodes for which a pod must be created
	Delete []*corev1.Pod // excess pods, pods of an older template, and pods on nodes that are not eligible
	Failed []*corev1.Pod // terminal pods that are deleted and will be replaced
	Again  time.Duration // time until a ready pod becomes available; 0 means that no pod waits for that
}

// nodePods is the state of one node for a DaemonSet: its pods on the node, and whether one of its
// pods must or may run there.
type nodePods struct {
	name        string
	run, stay   bool
	terminating bool          // a pod of the DaemonSet is terminating
	recent, old *corev1.Pod   // oldest pod of the newest template, and oldest pod of an older template
	excess      []*corev1.Pod // further pods, beyond recent and old
	failed      []*corev1.Pod
}

// podsByNode returns the state of every node with its pods, sorted by the node's name.
func (s Snapshot) podsByNode() []*nodePods {
	t := podTemplate(s.Set)
	nodes := make(map[string]*nodePods, len(s.Nodes))
	for _, n := range s.Nodes {
		run, stay := ShouldRun(t, n)
		nodes[n.Name] = &nodePods{name: n.Name, run: run, stay: stay}
	}
	pods := slices.Clone(s.Pods)
	slices.SortFunc(pods, func(a, b *corev1.Pod) int { // prefer the pod that is bound, then the older pod
		return cmp.Or(engine.TrueFirst(a.Spec.NodeName != "", b.Spec.NodeName != ""),
			a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
	for _, p := range pods {
		node := nodes[nodeOf(p)]
		switch {
		case node == nil: // other controllers delete the pods of deleted nodes
		case s.Going(p):
			node.terminating = true
		case api.IsPodTerminal(p):
			node.failed = append(node.failed, p)
		case p.Labels[appsv1.ControllerRevisionHashLabelKey] == s.Hash && node.recent == nil:
			node.recent = p
		case p.Labels[appsv1.ControllerRevisionHashLabelKey] != s.Hash && node.old == nil:
			node.old = p
		default:
			node.excess = append(node.excess, p)
		}
	}
	out := make([]*nodePods, 0, len(nodes))
	for _, node := range nodes {
		out = append(out, node)
	}
	slices.SortFunc(out, func(a, b *nodePods) int { return cmp.Compare(a.name, b.name) })
	return out
}

// PlanDaemonSet returns the next writes for a DaemonSet. Missing pods are created. Pods on nodes
// that are not eligible are deleted. Pods of older templates are replaced as the update strategy
// permits.
func PlanDaemonSet(s Snapshot) Step {
	var step Step
	if s.Set.DeletionTimestamp != nil {
		return step
	}
	nodes := s.podsByNode()
	maxSurge, maxUnavailable := rollingUpdateBounds(s.Set, nodes)
	for _, node := range nodes {
		s.planNode(&step, node, maxSurge > 0)
	}
	if s.Set.Spec.UpdateStrategy.Type != appsv1.RollingUpdateDaemonSetStrategyType {
		return step
	}
	if maxSurge > 0 {
		s.planSurge(&step, nodes, maxSurge)
	} else {
		s.planReplacements(&step, nodes, maxUnavailable)
	}
	return step
}

// planNode adds to step the writes for one node: an eligible node has one pod, and other nodes have
// none. If surges is true, a pod of the old and a pod of the new template may run at the same time.
func (s Snapshot) planNode(step *Step, node *nodePods, surges bool) {
	switch {
	case !node.stay:
		step.Delete = append(step.Delete, node.allPods()...)
		step.Delete = append(step.Delete, node.failed...)
		return
	case node.recent == nil && node.old == nil && len(node.failed) == 0:
		if node.run && !node.terminating {
			step.Create = append(step.Create, node.name)
		}
		return
	}
	step.Failed = append(step.Failed, node.failed...)
	step.Delete = append(step.Delete, node.excess...)
	if node.recent == nil || node.old == nil {
		return
	}
	ok, wait := engine.IsPodAvailable(node.recent, s.Set.Spec.MinReadySeconds, s.Now)
	if !surges || ok || !api.IsPodReady(node.old) {
		step.Delete = append(step.Delete, node.old)
		return
	}
	step.requestRetry(wait)
}

func (node *nodePods) allPods() []*corev1.Pod {
	out := slices.Clone(node.excess)
	for _, p := range []*corev1.Pod{node.recent, node.old} {
		if p != nil {
			out = append(out, p)
		}
	}
	return out
}

func (step *Step) requestRetry(d time.Duration) {
	if d > 0 && (step.Again == 0 || d < step.Again) {
		step.Again = d
	}
}

// planReplacements adds to step the deletion of pods of older templates, so that at most
// maxUnavailable nodes lack an available pod. Unavailable pods of older templates are always
// deleted.
func (s Snapshot) planReplacements(step *Step, nodes []*nodePods, maxUnavailable int) {
	var candidates []*corev1.Pod
	gone := 0
	for _, node := range nodes {
		if !node.stay || !node.run && node.recent == nil && node.old == nil {
			continue
		}
		only := node.old
		if node.recent != nil {
			only = node.recent
		}
		available := false
		if only != nil {
			var wait time.Duration
			available, wait = engine.IsPodAvailable(only, s.Set.Spec.MinReadySeconds, s.Now)
			step.requestRetry(wait)
		}
		switch {
		case !available:
			gone++
			if node.recent == nil && node.old != nil {
				step.Delete = append(step.Delete, node.old)
			}
		case node.recent == nil:
			candidates = append(candidates, node.old)
		}
	}
	step.Delete = append(step.Delete, candidates[:min(len(candidates), max(0, maxUnavailable-gone))]...)
}

// planSurge adds to step pods of the new template for nodes that still have a pod of an older
// template. At most maxSurge nodes have two pods at a time. A node always gets a new pod if its old
// pod is unavailable.
func (s Snapshot) planSurge(step *Step, nodes []*nodePods, maxSurge int) {
	var candidates []string
	for _, node := range nodes {
		if !node.run || node.terminating {
			continue
		}
		switch {
		case node.old == nil:
		case node.recent != nil:
			maxSurge--
		default:
			ok, wait := engine.IsPodAvailable(node.old, s.Set.Spec.MinReadySeconds, s.Now)
			step.requestRetry(wait)
			if ok {
				candidates = append(candidates, node.name)
			} else {
				step.Create = append(step.Create, node.name)
			}
		}
	}
	step.Create = append(step.Create, candidates[:min(len(candidates), max(0, maxSurge))]...)
}

// rollingUpdateBounds returns maxSurge and maxUnavailable of a DaemonSet as numbers of nodes. At
// most maxSurge nodes may have an additional pod, and at most maxUnavailable nodes may lack an
// available pod. At least one of the numbers is positive.
func rollingUpdateBounds(set *appsv1.DaemonSet, nodes []*nodePods) (maxSurge, maxUnavailable int) {
	wanted := 0
	for _, node := range nodes {
		if node.run {
			wanted++
		}
	}
	u := set.Spec.UpdateStrategy.RollingUpdate
	if u == nil {
		return 0, 1
	}
	scaled := func(v *intstr.IntOrString, otherwise int) int {
		if v == nil {
			return otherwise
		}
		n, err := intstr.GetScaledValueFromIntOrPercent(v, wanted, true)
		if err != nil {
			return otherwise
		}
		return n
	}
	maxSurge, maxUnavailable = scaled(u.MaxSurge, 0), scaled(u.MaxUnavailable, 1)
	if maxSurge == 0 && maxUnavailable == 0 {
		maxUnavailable = 1
	}
	return maxSurge, maxUnavailable
}

// Status returns the new status of a DaemonSet. again is the time until a ready pod becomes
// available, or zero.
func Status(s Snapshot, collisions *int32) (out appsv1.DaemonSetStatus, again time.Duration) {
	out = appsv1.DaemonSetStatus{ObservedGeneration: s.Set.Generation, CollisionCount: collisions,
		Conditions: s.Set.Status.Conditions}
	var step Step
	for _, node := range s.podsByNode() {
		here := node.allPods()
		if !node.run {
			if len(here) > 0 {
				out.NumberMisscheduled++
			}
			continue
		}
		out.DesiredNumberScheduled++
		if len(here) == 0 {
			continue
		}
		out.CurrentNumberScheduled++
		ready, available := false, false
		for _, p := range here {
			if !api.IsPodReady(p) {
				continue
			}
			ready = true
			ok, wait := engine.IsPodAvailable(p, s.Set.Spec.MinReadySeconds, s.Now)
			available = available || ok
			step.requestRetry(wait)
		}
		if ready {
			out.NumberReady++
		}
		if available {
			out.NumberAvailable++
		}
		if node.recent != nil {
			out.UpdatedNumberScheduled++
		}
	}
	out.NumberUnavailable = out.DesiredNumberScheduled - out.NumberAvailable
	return out, step.Again
}
