// Package daemonset keeps one pod of a DaemonSet on every node that it is meant for.
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

// Snapshot is what a plan is made of.
type Snapshot struct {
	Set   *appsv1.DaemonSet
	Nodes []*corev1.Node
	Pods  []*corev1.Pod // that it controls
	Going func(*corev1.Pod) bool
	Hash  string // of the template as it is now
	Now   time.Time
}

// Step is what to do next.
type Step struct {
	Create []string      // nodes to make a pod for
	Delete []*corev1.Pod // that are too many, of an older template, or where none belongs
	Failed []*corev1.Pod // that have ended, for whom a successor will be made
	Again  time.Duration // when a pod will have been ready for long enough; 0 = nothing to wait for
}

// place is one node and what is there.
type place struct {
	name        string
	run, stay   bool
	going       bool          // a pod of the set is on its way out
	recent, old *corev1.Pod   // of the newest template, and of an older one: the oldest of each
	excess      []*corev1.Pod // further ones
	failed      []*corev1.Pod
}

// look says what is on each node of which there is anything to say, in the order of the names.
func (s Snapshot) look() []*place {
	t := template(s.Set)
	places := make(map[string]*place, len(s.Nodes))
	for _, n := range s.Nodes {
		run, stay := Wants(t, n)
		places[n.Name] = &place{name: n.Name, run: run, stay: stay}
	}
	pods := slices.Clone(s.Pods)
	slices.SortFunc(pods, func(a, b *corev1.Pod) int { // of two the one that runs, then the older
		return cmp.Or(controllers.TrueFirst(a.Spec.NodeName != "", b.Spec.NodeName != ""),
			a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
	for _, p := range pods {
		at := places[nodeOf(p)]
		switch {
		case at == nil: // the pods of nodes that are gone are collected by others
		case s.Going(p):
			at.going = true
		case controllers.PodEnded(p):
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

// Plan decides the next step: pods where they are missing, none where they do not belong, and of a newer template as
// far as the strategy lets it.
func Plan(s Snapshot) Step {
	var step Step
	if s.Set.DeletionTimestamp != nil {
		return step
	}
	places := s.look()
	surge, away := bounds(s.Set, places)
	for _, at := range places {
		s.keep(&step, at, surge > 0)
	}
	if s.Set.Spec.UpdateStrategy.Type != appsv1.RollingUpdateDaemonSetStrategyType {
		return step
	}
	if surge > 0 {
		s.surge(&step, places, surge)
	} else {
		s.replace(&step, places, away)
	}
	return step
}

// keep sees to it that a node has one pod, or none. Where an update surges, one of each template may be there.
func (s Snapshot) keep(step *Step, at *place, surges bool) {
	switch {
	case !at.stay:
		step.Delete = append(step.Delete, at.all()...)
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
	ok, wait := controllers.PodAvailable(at.recent, s.Set.Spec.MinReadySeconds, s.Now)
	if !surges || ok || !controllers.PodReady(at.old) {
		step.Delete = append(step.Delete, at.old)
		return
	}
	step.wait(wait)
}

func (at *place) all() []*corev1.Pod {
	out := slices.Clone(at.excess)
	for _, p := range []*corev1.Pod{at.recent, at.old} {
		if p != nil {
			out = append(out, p)
		}
	}
	return out
}

func (step *Step) wait(d time.Duration) {
	if d > 0 && (step.Again == 0 || d < step.Again) {
		step.Again = d
	}
}

// replace deletes old pods, so that not more than away nodes are without an available one. Those that are not
// available cost nothing.
func (s Snapshot) replace(step *Step, places []*place, away int) {
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
			available, wait = controllers.PodAvailable(only, s.Set.Spec.MinReadySeconds, s.Now)
			step.wait(wait)
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

// surge makes new pods beside old ones, on so many nodes at a time. An old one that is not available makes room for
// its successor at once.
func (s Snapshot) surge(step *Step, places []*place, most int) {
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
			ok, wait := controllers.PodAvailable(at.old, s.Set.Spec.MinReadySeconds, s.Now)
			step.wait(wait)
			if ok {
				candidates = append(candidates, at.name)
			} else {
				step.Create = append(step.Create, at.name)
			}
		}
	}
	step.Create = append(step.Create, candidates[:min(len(candidates), max(0, most))]...)
}

// bounds are how many pods an update may add and take away at a time, of so many nodes; at least one of both.
func bounds(set *appsv1.DaemonSet, places []*place) (surge, away int) {
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

// Status is the status of a set with these pods. again says when a ready pod will have become available.
func Status(s Snapshot, collisions *int32) (out appsv1.DaemonSetStatus, again time.Duration) {
	out = appsv1.DaemonSetStatus{ObservedGeneration: s.Set.Generation, CollisionCount: collisions, Conditions: s.Set.Status.Conditions}
	var step Step
	for _, at := range s.look() {
		here := at.all()
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
			if !controllers.PodReady(p) {
				continue
			}
			ready = true
			ok, wait := controllers.PodAvailable(p, s.Set.Spec.MinReadySeconds, s.Now)
			available = available || ok
			step.wait(wait)
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
