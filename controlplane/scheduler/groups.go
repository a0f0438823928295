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

// groupTracker are the pods that name a PodGroup, by group, kept change by change: what a pod costs does not depend on how many
// others there are. Its lock is the innermost one: nothing is called while it is held.
type groupTracker struct {
	mu  sync.Mutex
	all map[framework.GroupKey]*groupState
}

// groupState is what one leadership knows of a group.
type groupState struct {
	pods        map[types.UID]*groupMember
	schedulable int            // pods that have a node or may get one
	placed      int            // pods that have one, or were promised one
	schedulers  map[string]int // pods by the scheduler that they name

	failures       int       // turns that placed too few, one after the other
	notBefore      time.Time // no turn before
	reportedStatus string    // the status that was written last
	preempting     bool      // others are being ended for it
}

// groupMember is a live pod of a group.
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

// countMember adds a pod to the sums, or with -1 takes it out.
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

// observePod takes a pod as it is now; gone is one that has ended or is being deleted. It reports whether the others of its group
// name one scheduler now and did not before.
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

// setAssumed says whether a pod was promised a node. Pods that name no group, or have gone, are nothing to it.
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

// groupFor is what is known of a group, as its PodGroup says; nil when there is none.
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

// pendingMembers are the pods of a group that may get a node and have none.
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

// nextAttempt is when the next turn of the group may be.
func (s *groupTracker) nextAttempt(key framework.GroupKey) time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	if g := s.all[key]; g != nil {
		return g.notBefore
	}
	return time.Time{}
}

// recordAttempt notes how a turn of the group ended: after one that placed too few the group rests, longer each time.
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

// recordStatus remembers the status of a group that is to be written, and reports whether it is new.
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

// resetAttempts forgets what the last leadership knew besides the pods.
func (s *groupTracker) resetAttempts() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, g := range s.all {
		g.failures, g.notBefore, g.reportedStatus, g.preempting = 0, time.Time{}, "", false
	}
}

// setPreempting notes whether others are being ended for a group.
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
