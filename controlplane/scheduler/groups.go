package scheduler

import (
	"slices"
	"strings"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// groupTracker counts the pods of each PodGroup, for example those with a node. Each change of a
// pod updates the counts, so reading them does not depend on the number of pods. While its lock is
// held, no other lock is acquired.
type groupTracker struct {
	mu  sync.Mutex
	all map[framework.GroupKey]*groupState
}

// groupState is what a groupTracker stores about one PodGroup: the pods, their counts, and the
// results of attempts to place the group. The results are reset when Run starts.
type groupState struct {
	pods        map[types.UID]*groupMember
	schedulable int            // number of pods that have a node or have no scheduling gates
	placed      int            // number of pods that are bound to a node or assumed on one
	schedulers  map[string]int // number of pods by schedulerName

	failures       int       // number of consecutive attempts to place the group that placed too few pods
	notBefore      time.Time // earliest time of the next attempt to place the group
	reportedStatus string    // last status that was recorded with recordStatus
	preempting     bool      // pods of lower priority are being evicted for the group
}

// groupMember is a pod of a PodGroup that has not terminated and is not terminating.
type groupMember struct {
	pod            *v1.Pod
	bound, assumed bool
}

func (m *groupMember) hasNode() bool { return m.bound || m.assumed }
func (m *groupMember) isSchedulable() bool {
	return m.hasNode() || len(m.pod.Spec.SchedulingGates) == 0
}

func newGroupTracker() *groupTracker {
	return &groupTracker{all: make(map[framework.GroupKey]*groupState)}
}

// countMember adds the pod m to the counts of its group if delta is 1, and removes it from them if
// delta is -1.
func (g *groupState) countMember(m *groupMember, delta int) {
	if m.hasNode() {
		g.placed += delta
	}
	if m.isSchedulable() {
		g.schedulable += delta
	}
	name := schedulerOf(m.pod)
	if g.schedulers[name] += delta; g.schedulers[name] == 0 {
		delete(g.schedulers, name)
	}
}

// observePod records the current version of a pod in the counts of its PodGroup. gone means that
// the pod is deleted, terminating or terminated. It returns true if the schedulerNames of the
// group's pods differed before this change and are now equal.
func (s *groupTracker) observePod(pod *v1.Pod, gone bool) (agree bool) {
	key, ok := framework.GroupOf(pod)
	if !ok {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	g := s.all[key]
	if g == nil {
		if gone {
			return false
		}
		g = &groupState{pods: make(map[types.UID]*groupMember), schedulers: make(map[string]int)}
		s.all[key] = g
	}
	mixed := len(g.schedulers) > 1
	m := &groupMember{pod: pod, bound: pod.Spec.NodeName != ""}
	if have := g.pods[pod.UID]; have != nil {
		m.assumed = have.assumed
		g.countMember(have, -1)
		delete(g.pods, pod.UID)
	}
	if !gone {
		g.pods[pod.UID] = m
		g.countMember(m, 1)
	}
	if len(g.pods) == 0 {
		delete(s.all, key)
	}
	return mixed && len(g.schedulers) <= 1
}

// setAssumed records whether the pod is assumed on a node, in the counts of its PodGroup. It
// ignores pods without a PodGroup and pods that observePod has not recorded.
func (s *groupTracker) setAssumed(pod *v1.Pod, assumed bool) {
	key, ok := framework.GroupOf(pod)
	if !ok {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if g := s.all[key]; g != nil {
		if m := g.pods[pod.UID]; m != nil {
			g.countMember(m, -1)
			m.assumed = assumed
			g.countMember(m, 1)
		}
	}
}

// groupFor returns the state of the PodGroup with the given key, for plugins. spec is the PodGroup
// object, which contains the group's policy; nil if it does not exist.
func (s *groupTracker) groupFor(key framework.GroupKey, spec *schedulingv1beta1.PodGroup) framework.Group {
	out := framework.Group{GroupKey: key, Known: spec != nil, Least: 1}
	if spec != nil && spec.Spec.SchedulingPolicy.Gang != nil {
		out.Least = max(int(spec.Spec.SchedulingPolicy.Gang.MinCount), 1)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if g := s.all[key]; g != nil {
		out.Able, out.Placed, out.Mixed = g.schedulable, g.placed, len(g.schedulers) > 1
	}
	return out
}

// pendingMembers returns the UIDs of the pods of the PodGroup that have no node and no scheduling
// gates, sorted.
func (s *groupTracker) pendingMembers(key framework.GroupKey) []types.UID {
	s.mu.Lock()
	defer s.mu.Unlock()
	g := s.all[key]
	if g == nil {
		return nil
	}
	var out []types.UID
	for uid, m := range g.pods {
		if !m.hasNode() && m.isSchedulable() {
			out = append(out, uid)
		}
	}
	slices.SortFunc(out, func(a, b types.UID) int { return strings.Compare(string(a), string(b)) })
	return out
}

// nextAttempt returns the earliest time of the next attempt to place the PodGroup. It is later
// after each failure.
func (s *groupTracker) nextAttempt(key framework.GroupKey) time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	if g := s.all[key]; g != nil {
		return g.notBefore
	}
	return time.Time{}
}

// recordAttempt records the result of an attempt to place the PodGroup. If placed is false, the
// attempt has placed too few pods: backoffEnd is then called with the number of consecutive
// failures, and returns the earliest time of the next attempt.
func (s *groupTracker) recordAttempt(key framework.GroupKey, placed bool, backoffEnd func(failures int) time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	g := s.all[key]
	switch {
	case g == nil:
	case placed:
		g.failures, g.notBefore = 0, time.Time{}
	default:
		g.failures++
		g.notBefore = backoffEnd(g.failures)
	}
}

// recordStatus records the status that the caller is about to report for the PodGroup, and returns
// true. It returns false if the status is equal to the last recorded one, or the group has no pods;
// the caller must then report nothing.
func (s *groupTracker) recordStatus(key framework.GroupKey, status string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	g := s.all[key]
	if g == nil || g.reportedStatus == status {
		return false
	}
	g.reportedStatus = status
	return true
}

// resetAttempts clears the results of earlier attempts and reports for all PodGroups. Run calls it
// when it starts.
func (s *groupTracker) resetAttempts() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, g := range s.all {
		g.failures, g.notBefore, g.reportedStatus, g.preempting = 0, time.Time{}, "", false
	}
}

// setPreempting records whether pods of lower priority are being evicted for the PodGroup.
func (s *groupTracker) setPreempting(key framework.GroupKey, preempting bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if g := s.all[key]; g != nil {
		g.preempting = preempting
	}
}

func (s *groupTracker) isPreempting(key framework.GroupKey) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	g := s.all[key]
	return g != nil && g.preempting
}
