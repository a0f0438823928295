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

	"keelson.dev/keelson/controlplane/controllers"
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
	Again  time.Duration // time until a ready pod becomes available; 0 means that no pod is about to
}

// place is one node with the pods of the DaemonSet on it.
type place struct {
	name        string
	run, stay   bool
	going       bool          // a pod of the DaemonSet is terminating
	recent, old *corev1.Pod   // oldest pod of the newest template, and oldest pod of an older template
	excess      []*corev1.Pod // further pods, beyond recent and old
	failed      []*corev1.Pod
}

// nodePlaces returns all nodes with their pods, sorted by name.
func (s Snapshot) nodePlaces() []*place {
	t := podTemplate(s.Set)
	places := make(map[string]*place, len(s.Nodes))
	for _, n := range s.Nodes {
		run, stay := Wants(t, n)
		places[n.Name] = &place{name: n.Name, run: run, stay: stay}
	}
	pods := slices.Clone(s.Pods)
	slices.SortFunc(pods, func(a, b *corev1.Pod) int { // prefer the pod that is bound, then the older pod
		return cmp.Or(controllers.TrueFirst(a.Spec.NodeName != "", b.Spec.NodeName != ""),
			a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
	for _, p := range pods {
		at := places[nodeOf(p)]
		switch {
		case at == nil: // other controllers delete the pods of deleted nodes
		case s.Going(p):
			at.going = true
		case controllers.IsPodTerminal(p):
			at.failed = append(at.failed, p)
		case p.Labels[appsv1.ControllerRevisionHashLabelKey] == s.Hash && at.recent == nil:
			at.recent = p
		case p.Labels[appsv1.ControllerRevisionHashLabelKey] != s.Hash && at.old == nil:
			at.old = p
		default:
			at.excess = append(at.excess, p)
		}
	}
	out := make([]*place, 0, len(places))
	for _, at := range places {
		out = append(out, at)
	}
	slices.SortFunc(out, func(a, b *place) int { return cmp.Compare(a.name, b.name) })
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
	places := s.nodePlaces()
	surge, away := rollingUpdateBounds(s.Set, places)
	for _, at := range places {
		s.planNode(&step, at, surge > 0)
	}
	if s.Set.Spec.UpdateStrategy.Type != appsv1.RollingUpdateDaemonSetStrategyType {
		return step
	}
	if surge > 0 {
		s.planSurge(&step, places, surge)
	} else {
		s.planReplacements(&step, places, away)
	}
	return step
}

// planNode adds to step the writes for one node: an eligible node has one pod, and other nodes have
// none. If surges is true, a pod of the old and a pod of the new template may run at the same time.
func (s Snapshot) planNode(step *Step, at *place, surges bool) {
	switch {
	case !at.stay:
		step.Delete = append(step.Delete, at.allPods()...)
		step.Delete = append(step.Delete, at.failed...)
		return
	case at.recent == nil && at.old == nil && len(at.failed) == 0:
		if at.run && !at.going {
			step.Create = append(step.Create, at.name)
		}
		return
	}
	step.Failed = append(step.Failed, at.failed...)
	step.Delete = append(step.Delete, at.excess...)
	if at.recent == nil || at.old == nil {
		return
	}
	ok, wait := controllers.IsPodAvailable(at.recent, s.Set.Spec.MinReadySeconds, s.Now)
	if !surges || ok || !controllers.IsPodReady(at.old) {
		step.Delete = append(step.Delete, at.old)
		return
	}
	step.requestRetry(wait)
}

func (at *place) allPods() []*corev1.Pod {
	out := slices.Clone(at.excess)
	for _, p := range []*corev1.Pod{at.recent, at.old} {
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

// planReplacements adds to step the deletion of pods of older templates. At most away nodes may
// lack an available pod. Unavailable pods of older templates are deleted at once.
func (s Snapshot) planReplacements(step *Step, places []*place, away int) {
	var candidates []*corev1.Pod
	gone := 0
	for _, at := range places {
		if !at.stay || !at.run && at.recent == nil && at.old == nil {
			continue
		}
		only := at.old
		if at.recent != nil {
			only = at.recent
		}
		available := false
		if only != nil {
			var wait time.Duration
			available, wait = controllers.IsPodAvailable(only, s.Set.Spec.MinReadySeconds, s.Now)
			step.requestRetry(wait)
		}
		switch {
		case !available:
			gone++
			if at.recent == nil && at.old != nil {
				step.Delete = append(step.Delete, at.old)
			}
		case at.recent == nil:
			candidates = append(candidates, at.old)
		}
	}
	step.Delete = append(step.Delete, candidates[:min(len(candidates), max(0, away-gone))]...)
}

// planSurge adds to step pods of the new template for nodes that still have a pod of an older
// template. At most most nodes have two pods at a time. A node with an unavailable old pod gets its
// new pod at once.
func (s Snapshot) planSurge(step *Step, places []*place, most int) {
	var candidates []string
	for _, at := range places {
		if !at.run || at.going {
			continue
		}
		switch {
		case at.old == nil:
		case at.recent != nil:
			most--
		default:
			ok, wait := controllers.IsPodAvailable(at.old, s.Set.Spec.MinReadySeconds, s.Now)
			step.requestRetry(wait)
			if ok {
				candidates = append(candidates, at.name)
			} else {
				step.Create = append(step.Create, at.name)
			}
		}
	}
	step.Create = append(step.Create, candidates[:min(len(candidates), max(0, most))]...)
}

// rollingUpdateBounds returns maxSurge and maxUnavailable of a DaemonSet as numbers of nodes: how
// many nodes may have an additional pod, and how many may lack an available pod. At least one is
// positive.
func rollingUpdateBounds(set *appsv1.DaemonSet, places []*place) (surge, away int) {
	wanted := 0
	for _, at := range places {
		if at.run {
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
	surge, away = scaled(u.MaxSurge, 0), scaled(u.MaxUnavailable, 1)
	if surge == 0 && away == 0 {
		away = 1
	}
	return surge, away
}

// Status returns the new status of a DaemonSet. again is the time until a ready pod becomes
// available, or
// 0.
func Status(s Snapshot, collisions *int32) (out appsv1.DaemonSetStatus, again time.Duration) {
	out = appsv1.DaemonSetStatus{ObservedGeneration: s.Set.Generation, CollisionCount: collisions, Conditions: s.Set.Status.Conditions}
	var step Step
	for _, at := range s.nodePlaces() {
		here := at.allPods()
		if !at.run {
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
			if !controllers.IsPodReady(p) {
				continue
			}
			ready = true
			ok, wait := controllers.IsPodAvailable(p, s.Set.Spec.MinReadySeconds, s.Now)
			available = available || ok
			step.requestRetry(wait)
		}
		if ready {
			out.NumberReady++
		}
		if available {
			out.NumberAvailable++
		}
		if at.recent != nil {
			out.UpdatedNumberScheduled++
		}
	}
	out.NumberUnavailable = out.DesiredNumberScheduled - out.NumberAvailable
	return out, step.Again
}
