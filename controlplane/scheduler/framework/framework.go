// Package framework is the vocabulary of the scheduler: the extension points as interfaces, what
// plugins see of the cluster, and Schedule, which is a pure function of a snapshot and a pod.
// Plugins know this package and nothing else of the scheduler.
//
// One pod passes the points in this order:
//
//	PreEnqueue ▸ QueueSort ▸ PreFilter ▸ Filter ▸ (PostFilter when no node is left) ▸ PreScore ▸ Score ▸ NormalizeScore
//	▸ Reserve ▸ Permit ▸ PreBind ▸ Bind ▸ PostBind      (Unreserve in reverse order when one of these fails)
package framework

import (
	"context"
	"fmt"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
)

// Code says what a plugin decided.
type Code uint8

const (
	Success Code = iota
	// Error is a failure of the plugin itself; the pod is tried again.
	Error
	// Unschedulable: not now, not here; a change in the cluster may mend it.
	Unschedulable
	// Unresolvable is Unschedulable that not even removing other pods would mend.
	Unresolvable
	// Wait is Permit's: hold the pod before it is bound.
	Wait
	// Skip is PreFilter's, PreScore's and Bind's: there is nothing for this plugin to do.
	Skip
)

// Status is a plugin's answer. A nil *Status is success. It is immutable: plugins may keep and return one many times.
type Status struct {
	Code    Code
	Reasons []string
	Err     error  // for Error
	Plugin  string // who said so; filled in by the framework when empty
}

// Refuse returns an Unschedulable status.
func Refuse(plugin string, reasons ...string) *Status {
	return &Status{Code: Unschedulable, Reasons: reasons, Plugin: plugin}
}

// RefuseForGood returns an Unresolvable status.
func RefuseForGood(plugin string, reasons ...string) *Status {
	return &Status{Code: Unresolvable, Reasons: reasons, Plugin: plugin}
}

// Fail returns an Error status.
func Fail(plugin string, err error) *Status {
	return &Status{Code: Error, Reasons: []string{err.Error()}, Err: err, Plugin: plugin}
}

// SkipStatus says that a plugin has nothing to do for this pod.
var SkipStatus = &Status{Code: Skip}

// OK says whether the status is success.
func (s *Status) OK() bool { return s == nil || s.Code == Success }

// Is says whether the status has that code.
func (s *Status) Is(c Code) bool {
	if s == nil {
		return c == Success
	}
	return s.Code == c
}

// Refused says whether the status rejects, as opposed to fails.
func (s *Status) Refused() bool { return s.Is(Unschedulable) || s.Is(Unresolvable) }

// Message joins the reasons.
func (s *Status) Message() string {
	if s == nil {
		return ""
	}
	return strings.Join(s.Reasons, ", ")
}

// AsError is the status as an error; nil when it is success.
func (s *Status) AsError() error {
	if s.OK() {
		return nil
	}
	if s.Err != nil {
		return fmt.Errorf("%s: %w", s.Plugin, s.Err)
	}
	return fmt.Errorf("%s: %s", s.Plugin, s.Message())
}

// Plugin is anything with a name; what else it is, it shows by the interfaces that it implements.
type Plugin interface{ Name() string }

// PreEnqueue may keep a pod out of the queue.
type PreEnqueue interface {
	Plugin
	PreEnqueue(ctx context.Context, pod *v1.Pod) *Status
}

// QueueSort orders the queue. A profile has exactly one.
type QueueSort interface {
	Plugin
	Less(a, b *QueuedPod) bool
}

// QueuedPod is what QueueSort sees.
type QueuedPod struct {
	*PodInfo
	Added    time.Time // to the queue, first
	Attempts int
}

// PreFilter looks at the pod once per cycle. Skip spares the plugin's Filter for this pod; a refusal
// ends the cycle; a non-nil set restricts the nodes.
type PreFilter interface {
	Plugin
	PreFilter(ctx context.Context, c *Cycle) (nodes map[string]struct{}, s *Status)
}

// Filter says whether the pod fits a node. It runs per node: it must be quick and must not block.
type Filter interface {
	Plugin
	Filter(ctx context.Context, c *Cycle, n *NodeInfo) *Status
}

// PostFilter runs when no node fits, to make room. The first success ends the search. Its message
// becomes part of the explanation.
type PostFilter interface {
	Plugin
	PostFilter(ctx context.Context, c *Cycle, why *FitError) (nominatedNode string, s *Status)
}

// Preempts is a PostFilter that ends pods of lower priority, and says in which order these are spared.
type Preempts interface {
	PostFilter
	// Order are pods by how important they are, those first that a budget protects.
	Order(pods []*PodInfo) []*PodInfo
}

// PreScore looks at the nodes that fit once per cycle. Skip spares the plugin's Score.
type PreScore interface {
	Plugin
	PreScore(ctx context.Context, c *Cycle, nodes []*NodeInfo) *Status
}

// MaxScore is the best normalised score.
const MaxScore int64 = 100

// Score rates a node that fits, from 0 to MaxScore once normalised.
type Score interface {
	Plugin
	Score(ctx context.Context, c *Cycle, n *NodeInfo) (int64, *Status)
}

// NormalizeScore brings the scores of all nodes into 0 to MaxScore.
type NormalizeScore interface {
	Score
	NormalizeScore(ctx context.Context, c *Cycle, scores []int64) *Status
}

// Reserve keeps what the pod will need on the node. Unreserve undoes it, also without Reserve.
type Reserve interface {
	Plugin
	Reserve(ctx context.Context, c *Cycle, node string) *Status
	Unreserve(ctx context.Context, c *Cycle, node string)
}

// Permit allows, refuses, or delays (Wait) the binding, at most for the returned time. Whoever waits is
// let go through Handle.Waiting.
type Permit interface {
	Plugin
	Permit(ctx context.Context, c *Cycle, node string) (*Status, time.Duration)
}

// PreBind does what must be done before the pod is bound; it may take long.
type PreBind interface {
	Plugin
	PreBind(ctx context.Context, c *Cycle, node string) *Status
}

// Bind binds the pod. Skip leaves it to the next plugin.
type Bind interface {
	Plugin
	Bind(ctx context.Context, c *Cycle, node string) *Status
}

// PostBind is told after a pod was bound.
type PostBind interface {
	Plugin
	PostBind(ctx context.Context, c *Cycle, node string)
}

// Event is a change in the cluster that may make an unschedulable pod fit.
type Event string

const (
	NodeAdded          Event = "NodeAdded"
	NodeAllocatable    Event = "NodeAllocatable" // allocatable changed
	NodeLabels         Event = "NodeLabels"
	NodeTaints         Event = "NodeTaints" // taints or unschedulable
	PodRemoved         Event = "PodRemoved" // an assigned pod ended or went away
	PodAdded           Event = "PodAdded"   // a pod was assigned elsewhere
	PodUpdated         Event = "PodUpdated" // an assigned pod's labels or resources changed; the object is a PodUpdate
	NamespaceLabels    Event = "NamespaceLabels"
	ClaimChanged       Event = "ClaimChanged"
	VolumeChanged      Event = "VolumeChanged"
	StorageClassChange Event = "StorageClassChanged"
	DriversChanged     Event = "DriversChanged" // those of a node
	DeviceClaimChanged Event = "DeviceClaimChanged"
	SliceChanged       Event = "SliceChanged" // the devices that a driver tells of
	DeviceClassChanged Event = "DeviceClassChanged"
	GroupChanged       Event = "GroupChanged" // a PodGroup, or what its pods have in common; the object is a GroupKey
)

// PodUpdate is the object of PodUpdated. Old may be nil, when it is not known.
type PodUpdate struct{ Old, Now *v1.Pod }

// Requeue says which events may mend a refusal by this plugin. A plugin without it is retried on every event.
type Requeue interface {
	Plugin
	// MayHelp judges one event for a pod that this plugin refused; obj is the object as it is now (as it was, when gone).
	MayHelp(e Event, pod *v1.Pod, obj any) bool
}

// Cycle is the state of one scheduling attempt: the pod, the cluster as it is seen, and
// what plugins keep between their own points. One goroutine uses it at a time. The snapshot is valid up to Permit;
// what is needed later is kept with Put.
type Cycle struct {
	Pod      *PodInfo
	Snapshot *Snapshot
	// With and Without are pods by which the node handed to Filter differs from the snapshot: those it is tried with,
	// and those it is tried without. The node's own lists and sums say so already; what the Index counts does not.
	With, Without []*PodInfo

	data    []pluginData
	skip    uint64 // filters that PreFilter said to skip, by index
	noScore uint64
}

// NewCycle begins an attempt.
func NewCycle(pod *PodInfo, s *Snapshot) *Cycle { return &Cycle{Pod: pod, Snapshot: s} }

// Put keeps a value under the plugin's name.
func (c *Cycle) Put(plugin string, v any) {
	for i := range c.data {
		if c.data[i].plugin == plugin {
			c.data[i].value = v
			return
		}
	}
	c.data = append(c.data, pluginData{plugin, v})
}

// pluginData is what one plugin keeps. Few do, and they ask for every node.
type pluginData struct {
	plugin string
	value  any
}

// More is how many more of the pods are on the node handed to Filter than the Index counts.
func (c *Cycle) More(has func(*PodInfo) bool) int {
	n := 0
	for _, pod := range c.With {
		if has(pod) {
			n++
		}
	}
	for _, pod := range c.Without {
		if has(pod) {
			n--
		}
	}
	return n
}

// Get returns what the plugin kept; nil when nothing.
func (c *Cycle) Get(plugin string) any {
	for i := range c.data {
		if c.data[i].plugin == plugin {
			return c.data[i].value
		}
	}
	return nil
}
