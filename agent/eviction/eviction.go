// Package eviction decides which pods of a node go that is short of memory or of disk, and when: pure. Who asks it looks
// at the node every Interval, tells what was found, and does what the verdict says.
//
// The rules are Kubernetes': below a threshold the node is under pressure, and is called so for Hold after that is over.
// While it is short one pod at a time goes, and the next one only when that one has ended and the node has been looked at
// again. Of the disk whatever nobody needs goes first.
package eviction

import (
	"cmp"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
)

// Signal is what a node may be short of.
type Signal int

// The signals, in the order in which a shortage is met: memory runs out faster.
const (
	Memory Signal = iota
	Disk
	Inodes  // of the disk
	Signals // how many there are
)

// String is Kubernetes' name of the signal.
func (s Signal) String() string {
	return [...]string{"memory.available", "nodefs.available", "nodefs.inodesFree"}[s]
}

// Resource is what pods request of it. Inodes nobody can request.
func (s Signal) Resource() v1.ResourceName {
	return [...]v1.ResourceName{v1.ResourceMemory, v1.ResourceEphemeralStorage, "inodes"}[s]
}

// OfDisk says that it comes back when something goes of the disk.
func (s Signal) OfDisk() bool { return s == Disk || s == Inodes }

const (
	// Interval is the time between two looks, and the least between two evictions.
	Interval = 10 * time.Second
	// Hold is how long a node is called under pressure after it was short last, so that pods do not come and go with it.
	Hold = 5 * time.Minute
	// EndPatience is how long a pod that was told to go is waited for.
	EndPatience = 30 * time.Second
	// ReclaimPatience is how long is waited for all that goes of a disk without an eviction.
	ReclaimPatience = 2 * time.Minute
)

// Level is how much is left of something, and how much has to be. The zero value is that of something unknown, of which
// a node is never short.
type Level struct {
	Left, Floor int64 // bytes, or how many
	Known       bool
}

// Short says that there is less left than has to be.
func (l Level) Short() bool { return l.Known && l.Left < l.Floor }

// Reading is one look at a node.
type Reading struct {
	At     time.Time
	Levels [Signals]Level
	// Ended says that nothing is left of the pod that was evicted last. It was asked before the levels were read.
	Ended bool
	// Reclaiming is for how long what nobody needs has been going of the disk, after Verdict.Reclaim; Reclaimed says that all has.
	Reclaiming time.Duration
	Reclaimed  bool
}

// State is what is remembered from one look to the next. The zero value remembers nothing.
type State struct {
	last    [Signals]time.Time // when the node was short; zero = never
	victim  types.UID          // evicted last, and waited for
	evicted time.Time
}

// Short is when the node was short of something last; zero = never.
func (s State) Short(of Signal) time.Time { return s.last[of] }

// WasShort notes that the node was short of something at a time, as an earlier life of the agent has seen it.
func (s State) WasShort(of Signal, at time.Time) State {
	s.last[of] = at
	return s
}

// Verdict is what is to be done after a look.
type Verdict struct {
	Pressure [Signals]bool
	// Reclaim: whatever nobody needs is to go of the disk.
	Reclaim bool
	// Evict: a pod has to go for Signal.
	Evict  bool
	Signal Signal
}

// Next judges a look.
func (s State) Next(r Reading) (State, Verdict) {
	var v Verdict
	for i := range Signals {
		if r.Levels[i].Short() {
			s.last[i] = r.At
		}
		v.Pressure[i] = !s.last[i].IsZero() && r.At.Sub(s.last[i]) < Hold
	}
	v.Reclaim = r.Levels[Disk].Short() || r.Levels[Inodes].Short()
	if s.victim != "" && !r.Ended && r.At.Sub(s.evicted) < EndPatience {
		return s, v
	}
	s.victim = ""
	if !s.evicted.IsZero() && r.At.Sub(s.evicted) < Interval {
		return s, v
	}
	switch {
	case r.Levels[Memory].Short():
		v.Evict, v.Signal = true, Memory
	case v.Reclaim && r.Reclaiming > 0 && (r.Reclaimed || r.Reclaiming >= ReclaimPatience):
		v.Evict, v.Signal = true, Disk
		if !r.Levels[Disk].Short() {
			v.Signal = Inodes
		}
	}
	return s, v
}

// Evicted notes that a pod was told to go.
func (s State) Evicted(uid types.UID, now time.Time) State {
	s.victim, s.evicted = uid, now
	return s
}

// Victim is the pod that was told to go and is waited for; "" = none.
func (s State) Victim() types.UID { return s.victim }

// Candidate is a pod and what it has of what the node is short of.
type Candidate struct {
	Pod           *v1.Pod
	Used, Request int64 // bytes, or how many
	Containers    []Container
}

// Container is the share of one of its containers.
type Container struct {
	Name          string
	Used, Request int64
}

// Rank returns those that may go, who goes first first: pods that use more than they requested, then those of less
// priority, then those that are furthest above their request. Pods without which a cluster does not work stay.
func Rank(list []Candidate) []Candidate {
	out := slices.DeleteFunc(slices.Clone(list), func(c Candidate) bool { return agent.IsCritical(c.Pod) })
	slices.SortFunc(out, func(a, b Candidate) int {
		return cmp.Or(
			cmp.Compare(within(a), within(b)),
			cmp.Compare(priority(a.Pod), priority(b.Pod)),
			cmp.Compare(b.Used-b.Request, a.Used-a.Request),
			b.Pod.CreationTimestamp.Compare(a.Pod.CreationTimestamp.Time), // the younger has done less
			cmp.Compare(a.Pod.UID, b.Pod.UID))
	})
	return out
}

// within is 1 for a pod that keeps to its request.
func within(c Candidate) int {
	if c.Used > c.Request {
		return 0
	}
	return 1
}

func priority(p *v1.Pod) int32 {
	if p.Spec.Priority == nil {
		return 0
	}
	return *p.Spec.Priority
}
