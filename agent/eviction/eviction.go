// Package eviction decides which pods of a node with memory or disk pressure are evicted, and when.
// It has no side effects. The caller reads the node's available resources every Interval, passes
// them to State.Next, and performs the actions of the returned Verdict.
//
// The rules are those of Kubernetes. If a resource is below its threshold, the node is under
// pressure; its condition stays true for PressureTransition after the last shortage. Pods are
// evicted one at a time. The next pod is evicted only after the previous pod has ended and the
// resources were read again. On a full disk, unused data is removed before pods are evicted.
package eviction

import (
	"cmp"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
)

// Signal is an eviction signal: a resource of which a node may have a shortage.
type Signal int

// Signals in the order in which shortages are handled: memory runs out faster.
const (
	Memory Signal = iota
	Disk
	Inodes  // inodes of the disk
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

// IsDisk reports whether the signal is about the disk, so that removing data from the disk ends the
// shortage.
func (s Signal) IsDisk() bool { return s == Disk || s == Inodes }

const (
	// Interval is the time between two readings, and the minimum between two evictions.
	Interval = 10 * time.Second
	// PressureTransition is how long a pressure condition stays true after the last shortage, so
	// that it does not oscillate.
	PressureTransition = 5 * time.Minute
	// EvictionTimeout is how long to wait for the end of an evicted pod before another pod is
	// evicted.
	EvictionTimeout = 30 * time.Second
	// ReclaimTimeout is how long to wait for the removal of unused data before a pod is evicted.
	ReclaimTimeout = 2 * time.Minute
)

// Level is the available amount of a resource on the node (Left), and the threshold (Floor) below
// which there is a shortage. The zero value means that the amount is unknown, which is never a
// shortage.
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
	// Ended reports whether the pod that was evicted last has ended completely. The caller
	// determines it before it reads the levels.
	Ended bool
	// Reclaiming is the time since the caller started to remove unused data for Verdict.Reclaim.
	// Reclaimed reports whether the removal is complete.
	Reclaiming time.Duration
	Reclaimed  bool
}

// State is the state of the eviction decisions between two readings. The zero value is the initial
// state.
type State struct {
	last    [Signals]time.Time // time of the last shortage; zero = never
	victim  types.UID          // the last evicted pod, until it has ended or EvictionTimeout has passed
	evicted time.Time
}

// LastShort returns when the resource of a signal last had a shortage, or the zero time if it never
// had one.
func (s State) LastShort(signal Signal) time.Time { return s.last[signal] }

// WithShortage returns the state with a shortage of the signal's resource at seenAt, which a
// previous agent process recorded.
func (s State) WithShortage(signal Signal, seenAt time.Time) State {
	s.last[signal] = seenAt
	return s
}

// Verdict contains the pressure conditions after a reading, and the actions that the caller of Next
// must perform.
type Verdict struct {
	Pressure [Signals]bool
	// Reclaim is true if unused data must be removed from the disk.
	Reclaim bool
	// Evict is true if a pod must be evicted because of Signal.
	Evict  bool
	Signal Signal
}

// Next returns the state after a reading, and the actions that the reading requires.
func (s State) Next(reading Reading) (State, Verdict) {
	var v Verdict
	for i := range Signals {
		if reading.Levels[i].IsShort() {
			s.last[i] = reading.At
		}
		v.Pressure[i] = !s.last[i].IsZero() && reading.At.Sub(s.last[i]) < PressureTransition
	}
	v.Reclaim = reading.Levels[Disk].IsShort() || reading.Levels[Inodes].IsShort()
	if s.victim != "" && !reading.Ended && reading.At.Sub(s.evicted) < EvictionTimeout {
		return s, v
	}
	s.victim = ""
	if !s.evicted.IsZero() && reading.At.Sub(s.evicted) < Interval {
		return s, v
	}
	switch {
	case reading.Levels[Memory].IsShort():
		v.Evict, v.Signal = true, Memory
	case v.Reclaim && reading.Reclaiming > 0 && (reading.Reclaimed || reading.Reclaiming >= ReclaimTimeout):
		v.Evict, v.Signal = true, Disk
		if !reading.Levels[Disk].IsShort() {
			v.Signal = Inodes
		}
	}
	return s, v
}

// WithEvicted returns the state after a pod was evicted at evictedAt. Next then waits for the end
// of this pod.
func (s State) WithEvicted(pod types.UID, evictedAt time.Time) State {
	s.victim, s.evicted = pod, evictedAt
	return s
}

// Victim returns the UID of the evicted pod that Next waits for, or "" if Next does not wait for a
// pod.
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

// Rank returns the pods of list in the order in which they are evicted. Pods that use more than
// they requested come first, then pods of lower priority, then pods that exceed their request most.
// Critical pods are omitted.
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
