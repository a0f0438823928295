// Package eviction decides which pods of a node with memory or disk pressure are evicted, and when.
// It has no side effects. The caller reads the node's levels every Interval, passes them to
// State.Next, and executes the verdict.
//
// The rules are those of Kubernetes. Below a threshold, the node is under pressure; its condition
// stays true for PressureTransition after the last shortage. Pods are evicted one at a time. The
// next one is evicted only after the previous one has ended and the levels were read again. On a
// full disk, unused data is removed first.
package eviction

import (
	"cmp"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
)

// Signal is a resource of which a node may have a shortage.
type Signal int

// Signals in the order in which shortages are handled: memory runs out faster.
const (
	Memory Signal = iota
	Disk
	Inodes  // of the disk
	Signals // number of signals
)

// String returns the name of the Kubernetes eviction signal.
func (s Signal) String() string {
	return [...]string{"memory.available", "nodefs.available", "nodefs.inodesFree"}[s]
}

// Resource returns the name of the signal's resource: memory, ephemeral-storage or inodes. Pods
// cannot request inodes.
func (s Signal) Resource() v1.ResourceName {
	return [...]v1.ResourceName{v1.ResourceMemory, v1.ResourceEphemeralStorage, "inodes"}[s]
}

// IsDisk reports whether removing data from the disk ends the shortage.
func (s Signal) IsDisk() bool { return s == Disk || s == Inodes }

const (
	// Interval is the time between two readings, and the minimum between two evictions.
	Interval = 10 * time.Second
	// PressureTransition is how long a pressure condition stays true after the last shortage, so
	// that it does not oscillate.
	PressureTransition = 5 * time.Minute
	// EvictionTimeout is how long an evicted pod is waited for before another one is evicted.
	EvictionTimeout = 30 * time.Second
	// ReclaimTimeout is how long the removal of unused data is waited for before a pod is evicted.
	ReclaimTimeout = 2 * time.Minute
)

// Level is the available amount of a resource on the node, and the threshold below which there is a
// shortage. The zero value is unknown and never a shortage.
type Level struct {
	Left, Floor int64 // bytes or inodes
	Known       bool
}

// IsShort reports whether the available amount is known and below the threshold.
func (l Level) IsShort() bool { return l.Known && l.Left < l.Floor }

// Reading is one reading of the available resources of a node.
type Reading struct {
	At     time.Time
	Levels [Signals]Level
	// Ended reports whether the evicted pod has ended completely. It is determined before the
	// levels are read.
	Ended bool
	// Reclaiming is the time since the removal of unused data started after Verdict.Reclaim.
	// Reclaimed reports whether it is complete.
	Reclaiming time.Duration
	Reclaimed  bool
}

// State is the state of the eviction between two readings. The zero value is the initial state.
type State struct {
	last    [Signals]time.Time // time of the last shortage; zero = never
	victim  types.UID          // the last evicted pod, while it is waited for
	evicted time.Time
}

// LastShort returns the time of the last shortage of the resource of a signal. It is zero if there
// was none.
func (s State) LastShort(of Signal) time.Time { return s.last[of] }

// WithShortage returns the state with a shortage of a resource at the time at, which a previous
// agent process recorded.
func (s State) WithShortage(of Signal, at time.Time) State {
	s.last[of] = at
	return s
}

// Verdict tells the caller of Next which actions a reading requires.
type Verdict struct {
	Pressure [Signals]bool
	// Reclaim: unused data must be removed from the disk.
	Reclaim bool
	// Evict: a pod must be evicted because of Signal.
	Evict  bool
	Signal Signal
}

// Next returns the state after the reading r, and the actions that it requires.
func (s State) Next(r Reading) (State, Verdict) {
	var v Verdict
	for i := range Signals {
		if r.Levels[i].IsShort() {
			s.last[i] = r.At
		}
		v.Pressure[i] = !s.last[i].IsZero() && r.At.Sub(s.last[i]) < PressureTransition
	}
	v.Reclaim = r.Levels[Disk].IsShort() || r.Levels[Inodes].IsShort()
	if s.victim != "" && !r.Ended && r.At.Sub(s.evicted) < EvictionTimeout {
		return s, v
	}
	s.victim = ""
	if !s.evicted.IsZero() && r.At.Sub(s.evicted) < Interval {
		return s, v
	}
	switch {
	case r.Levels[Memory].IsShort():
		v.Evict, v.Signal = true, Memory
	case v.Reclaim && r.Reclaiming > 0 && (r.Reclaimed || r.Reclaiming >= ReclaimTimeout):
		v.Evict, v.Signal = true, Disk
		if !r.Levels[Disk].IsShort() {
			v.Signal = Inodes
		}
	}
	return s, v
}

// WithEvicted returns the state after the pod uid was evicted at the time now.
func (s State) WithEvicted(uid types.UID, now time.Time) State {
	s.victim, s.evicted = uid, now
	return s
}

// Victim returns the UID of the evicted pod that has not ended yet, or "" if none exists.
func (s State) Victim() types.UID { return s.victim }

// Candidate is a pod that may be evicted, with its usage of the scarce resource.
type Candidate struct {
	Pod           *v1.Pod
	Used, Request int64 // bytes or inodes
	Containers    []Container
}

// Container is the usage of one container of a candidate.
type Container struct {
	Name          string
	Used, Request int64
}

// Rank returns the pods that may be evicted, first victim first: pods that use more than they
// requested, then pods of lower priority, then pods that exceed their request most. Critical pods
// are omitted.
func Rank(list []Candidate) []Candidate {
	out := slices.DeleteFunc(slices.Clone(list), func(c Candidate) bool { return agent.IsCritical(c.Pod) })
	slices.SortFunc(out, func(a, b Candidate) int {
		return cmp.Or(
			cmp.Compare(withinRequest(a), withinRequest(b)),
			cmp.Compare(podPriority(a.Pod), podPriority(b.Pod)),
			cmp.Compare(b.Used-b.Request, a.Used-a.Request),
			b.Pod.CreationTimestamp.Compare(a.Pod.CreationTimestamp.Time), // the younger pod has done less work
			cmp.Compare(a.Pod.UID, b.Pod.UID))
	})
	return out
}

// withinRequest returns 1 for a pod that uses at most the amount it requested, and 0 otherwise. It
// is a sort key.
func withinRequest(c Candidate) int {
	if c.Used > c.Request {
		return 0
	}
	return 1
}

func podPriority(p *v1.Pod) int32 {
	if p.Spec.Priority == nil {
		return 0
	}
	return *p.Spec.Priority
}
