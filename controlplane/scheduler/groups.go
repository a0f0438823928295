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

// groupTracker tracks the pods that belong to a PodGroup, by group. Each change of a pod updates
// the counts, so the cost does not depend on the number of pods. No other lock is acquired while
// its lock is held.
type groupTracker struct {
	mu  sync.Mutex
	all map[framework.GroupKey]*groupState
}

// groupState is the state of one PodGroup: its pods, the counts of them, and the results of
// scheduling attempts. The latter are reset when Run starts on a new leader.
type groupState struct {
	pods        map[types.UID]*groupMember
	schedulable int            // number of pods that have a node or have no scheduling gates
	placed      int            // number of pods that are bound or assumed
	schedulers  map[string]int // number of pods by scheduler name

	failures       int       // number of consecutive attempts that placed too few pods
	notBefore      time.Time // earliest time of the next attempt
	reportedStatus string    // the group status that was reported last
	preempting     bool      // pods are being evicted for the group
}

// groupMember is a pod of a PodGroup. Terminal and terminating pods are not members.
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

// countMember adds a pod to the counts of the group if by is 1, and removes it if by is -1.
func (g *groupState) countMember(m *groupMember, by int) {
	if m.hasNode() {
		g.placed += by
	}
	if m.isSchedulable() {
		g.schedulable += by
	}
	name := schedulerOf(m.pod)
	if g.schedulers[name] += by; g.schedulers[name] == 0 {
		delete(g.schedulers, name)
	}
}

// observePod records the current state of a pod in its group. gone means that the pod is terminal,
// terminating or deleted. agree is true if the group's pods named different schedulers before this
// change, and no longer do.
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

// setAssumed records whether a pod is assumed on a node. It ignores pods without a group and pods
// that observePod has not recorded.
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

// groupFor returns the state of a group for plugins, with the policy of its PodGroup object. spec
// is nil if that object does not exist.
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

// pendingMembers returns the UIDs of the group's pods that have neither a node nor scheduling
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

// nextAttempt returns the earliest time of the next attempt to place the group.
func (s *groupTracker) nextAttempt(key framework.GroupKey) time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	if g := s.all[key]; g != nil {
		return g.notBefore
	}
	return time.Time{}
}

// recordAttempt records the result of an attempt to place a group. If too few pods were placed,
// rest is called with the number of consecutive failures, and returns the earliest time of the next
// attempt.
func (s *groupTracker) recordAttempt(key framework.GroupKey, placed bool, rest func(failures int) time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	g := s.all[key]
	switch {
	case g == nil:
	case placed:
		g.failures, g.notBefore = 0, time.Time{}
	default:
		g.failures++
		g.notBefore = rest(g.failures)
	}
}

// recordStatus records the status that is about to be reported for a group. It returns false if the
// last recorded status is equal.
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

// resetAttempts clears the results of earlier attempts for all groups, when Run starts.
func (s *groupTracker) resetAttempts() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, g := range s.all {
		g.failures, g.notBefore, g.reportedStatus, g.preempting = 0, time.Time{}, "", false
	}
}

// setPreempting records whether pods of lower priority are being evicted for a group.
func (s *groupTracker) setPreempting(key framework.GroupKey, is bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if g := s.all[key]; g != nil {
		g.preempting = is
	}
}

func (s *groupTracker) isPreempting(key framework.GroupKey) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	g := s.all[key]
	return g != nil && g.preempting
}
