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

// groups are the pods that name a PodGroup, by group, kept change by change: what a pod costs does not depend on how many
// others there are. Its lock is the innermost one: nothing is called while it is held.
type groups struct {
	mu  sync.Mutex
	all map[framework.GroupKey]*group
}

// group is what one leadership knows of a group.
type group struct {
	pods       map[types.UID]*member
	able       int            // pods that have a node or may get one
	placed     int            // pods that have one, or were promised one
	schedulers map[string]int // pods by the scheduler that they name

	failures int       // turns that placed too few, one after the other
	rest     time.Time // no turn before
	told     string    // the status that was written last
	clearing bool      // others are being ended for it
}

// member is a live pod of a group.
type member struct {
	pod            *v1.Pod
	bound, assumed bool
}

func (m *member) placed() bool { return m.bound || m.assumed }
func (m *member) able() bool   { return m.placed() || len(m.pod.Spec.SchedulingGates) == 0 }

func newGroups() *groups { return &groups{all: make(map[framework.GroupKey]*group)} }

// count adds a pod to the sums, or with -1 takes it out.
func (g *group) count(m *member, by int) {
	if m.placed() {
		g.placed += by
	}
	if m.able() {
		g.able += by
	}
	name := schedulerOf(m.pod)
	if g.schedulers[name] += by; g.schedulers[name] == 0 {
		delete(g.schedulers, name)
	}
}

// see takes a pod as it is now; gone is one that has ended or is being deleted. It reports whether the others of its group
// name one scheduler now and did not before.
func (s *groups) see(p *v1.Pod, gone bool) (agree bool) {
	key, ok := framework.GroupOf(p)
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
		g = &group{pods: make(map[types.UID]*member), schedulers: make(map[string]int)}
		s.all[key] = g
	}
	mixed := len(g.schedulers) > 1
	m := &member{pod: p, bound: p.Spec.NodeName != ""}
	if have := g.pods[p.UID]; have != nil {
		m.assumed = have.assumed
		g.count(have, -1)
		delete(g.pods, p.UID)
	}
	if !gone {
		g.pods[p.UID] = m
		g.count(m, 1)
	}
	if len(g.pods) == 0 {
		delete(s.all, key)
	}
	return mixed && len(g.schedulers) <= 1
}

// assume says whether a pod was promised a node. Pods that name no group, or have gone, are nothing to it.
func (s *groups) assume(p *v1.Pod, assumed bool) {
	key, ok := framework.GroupOf(p)
	if !ok {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if g := s.all[key]; g != nil {
		if m := g.pods[p.UID]; m != nil {
			g.count(m, -1)
			m.assumed = assumed
			g.count(m, 1)
		}
	}
}

// of is what is known of a group, as its PodGroup says; nil when there is none.
func (s *groups) of(key framework.GroupKey, spec *schedulingv1beta1.PodGroup) framework.Group {
	out := framework.Group{GroupKey: key, Known: spec != nil, Least: 1}
	if spec != nil && spec.Spec.SchedulingPolicy.Gang != nil {
		out.Least = max(int(spec.Spec.SchedulingPolicy.Gang.MinCount), 1)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if g := s.all[key]; g != nil {
		out.Able, out.Placed, out.Mixed = g.able, g.placed, len(g.schedulers) > 1
	}
	return out
}

// waiting are the pods of a group that may get a node and have none.
func (s *groups) waiting(key framework.GroupKey) []types.UID {
	s.mu.Lock()
	defer s.mu.Unlock()
	g := s.all[key]
	if g == nil {
		return nil
	}
	var out []types.UID
	for uid, m := range g.pods {
		if !m.placed() && m.able() {
			out = append(out, uid)
		}
	}
	slices.SortFunc(out, func(a, b types.UID) int { return strings.Compare(string(a), string(b)) })
	return out
}

// restsUntil is when the next turn of the group may be.
func (s *groups) restsUntil(key framework.GroupKey) time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	if g := s.all[key]; g != nil {
		return g.rest
	}
	return time.Time{}
}

// turned notes how a turn of the group ended: after one that placed too few the group rests, longer each time.
func (s *groups) turned(key framework.GroupKey, placed bool, rest func(failures int) time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	g := s.all[key]
	switch {
	case g == nil:
	case placed:
		g.failures, g.rest = 0, time.Time{}
	default:
		g.failures++
		g.rest = rest(g.failures)
	}
}

// says remembers the status of a group that is to be written, and reports whether it is new.
func (s *groups) says(key framework.GroupKey, status string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	g := s.all[key]
	if g == nil || g.told == status {
		return false
	}
	g.told = status
	return true
}

// restart forgets what the last leadership knew besides the pods.
func (s *groups) restart() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, g := range s.all {
		g.failures, g.rest, g.told, g.clearing = 0, time.Time{}, "", false
	}
}

// setClearing notes whether others are being ended for a group.
func (s *groups) setClearing(key framework.GroupKey, is bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if g := s.all[key]; g != nil {
		g.clearing = is
	}
}

func (s *groups) isClearing(key framework.GroupKey) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	g := s.all[key]
	return g != nil && g.clearing
}
