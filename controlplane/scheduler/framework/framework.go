// Package framework is the vocabulary of the scheduler: the extension points as interfaces, the
// cluster state that plugins read, and Schedule, a pure function of a snapshot and a pod. Plugins
// depend only on this package.
//
// A pod passes the extension points in this order:
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

// Code is the kind of a plugin's result.
type Code uint8

const (
	Success Code = iota
	// Error is a failure of the plugin itself. The pod is tried again.
	Error
	// Unschedulable means that the pod does not fit. A change of the cluster may resolve it.
	Unschedulable
	// Unresolvable is like Unschedulable, and removing other pods cannot resolve it.
	Unresolvable
	// Wait is returned by Permit: delay the binding.
	Wait
	// Skip is returned by PreFilter, PreScore and Bind: the plugin has nothing to do for the pod.
	Skip
)

// Status is a plugin's result. A nil *Status is success. A Status is immutable, so plugins may
// return the same one often.
type Status struct {
	Code    Code
	Reasons []string
	Err     error  // for Error
	Plugin  string // the plugin that returned it; set by the framework if empty
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

// OK reports whether the status is success.
func (s *Status) OK() bool { return s == nil || s.Code == Success }

// Is reports whether the status has the code.
func (s *Status) Is(c Code) bool {
	if s == nil {
		return c == Success
	}
	return s.Code == c
}

// Refused reports whether the plugin refused the pod. It is false for a failure of the plugin.
func (s *Status) Refused() bool { return s.Is(Unschedulable) || s.Is(Unresolvable) }

// Message returns the joined reasons.
func (s *Status) Message() string {
	if s == nil {
		return ""
	}
	return strings.Join(s.Reasons, ", ")
}

// AsError returns the status as an error; nil if it is success.
func (s *Status) AsError() error {
	if s.OK() {
		return nil
	}
	if s.Err != nil {
		return fmt.Errorf("%s: %w", s.Plugin, s.Err)
	}
	return fmt.Errorf("%s: %s", s.Plugin, s.Message())
}

// Plugin is a named plugin. It implements the interfaces of its extension points.
type Plugin interface{ Name() string }

// PreEnqueue decides whether a pod may enter the queue.
type PreEnqueue interface {
	Plugin
	PreEnqueue(ctx context.Context, pod *v1.Pod) *Status
}

// QueueSort orders the queue. A profile has exactly one.
type QueueSort interface {
	Plugin
	Less(a, b *QueuedPod) bool
}

// QueuedPod is a pod in the queue, for QueueSort.
type QueuedPod struct {
	*PodInfo
	Added    time.Time // time when it was first added to the queue
	Attempts int
}

// PreFilter inspects the pod once per cycle. Skip disables the plugin's Filter for this pod. A
// refusal ends the cycle. A non-nil set restricts the nodes.
type PreFilter interface {
	Plugin
	PreFilter(ctx context.Context, c *Cycle) (nodes map[string]struct{}, s *Status)
}

// Filter reports whether the pod fits a node. It runs once per node, so it must be fast and must
// not block.
type Filter interface {
	Plugin
	Filter(ctx context.Context, c *Cycle, n *NodeInfo) *Status
}

// PostFilter runs if no node fits, to free capacity. The first success ends the search. Its message
// becomes part of the explanation.
type PostFilter interface {
	Plugin
	PostFilter(ctx context.Context, c *Cycle, why *FitError) (nominatedNode string, s *Status)
}

// Preempts is a PostFilter that evicts pods of lower priority.
type Preempts interface {
	PostFilter
	// Order returns the pods in the order in which they are spared: pods that a budget protects
	// first, then the important ones.
	Order(pods []*PodInfo) []*PodInfo
}

// PreScore inspects the feasible nodes once per cycle. Skip disables the plugin's Score.
type PreScore interface {
	Plugin
	PreScore(ctx context.Context, c *Cycle, nodes []*NodeInfo) *Status
}

// MaxScore is the highest normalized score.
const MaxScore int64 = 100

// Score scores a feasible node, from 0 to MaxScore after normalization.
type Score interface {
	Plugin
	Score(ctx context.Context, c *Cycle, n *NodeInfo) (int64, *Status)
}

// NormalizeScore scales the scores of all nodes to 0 to MaxScore.
type NormalizeScore interface {
	Score
	NormalizeScore(ctx context.Context, c *Cycle, scores []int64) *Status
}

// Reserve reserves what the pod needs on the node. Unreserve reverts it, and is also called if
// Reserve was not.
type Reserve interface {
	Plugin
	Reserve(ctx context.Context, c *Cycle, node string) *Status
	Unreserve(ctx context.Context, c *Cycle, node string)
}

// Permit allows, refuses, or delays (Wait) the binding, at most for the returned time. A delayed
// pod is allowed or rejected through Handle.Waiting.
type Permit interface {
	Plugin
	Permit(ctx context.Context, c *Cycle, node string) (*Status, time.Duration)
}

// PreBind does the work that must precede the binding. It may take long.
type PreBind interface {
	Plugin
	PreBind(ctx context.Context, c *Cycle, node string) *Status
}

// Bind binds the pod. Skip leaves the binding to the next plugin.
type Bind interface {
	Plugin
	Bind(ctx context.Context, c *Cycle, node string) *Status
}

// PostBind is called after a pod was bound.
type PostBind interface {
	Plugin
	PostBind(ctx context.Context, c *Cycle, node string)
}

// Event is a change of the cluster that may make an unschedulable pod fit.
type Event string

const (
	NodeAdded          Event = "NodeAdded"
	NodeAllocatable    Event = "NodeAllocatable" // allocatable changed
	NodeLabels         Event = "NodeLabels"
	NodeTaints         Event = "NodeTaints" // taints or unschedulable
	PodRemoved         Event = "PodRemoved" // an assigned pod terminated or was deleted
	PodAdded           Event = "PodAdded"   // a pod was assigned
	PodUpdated         Event = "PodUpdated" // an assigned pod's labels or resources changed; the object is a PodUpdate
	NamespaceLabels    Event = "NamespaceLabels"
	ClaimChanged       Event = "ClaimChanged"
	VolumeChanged      Event = "VolumeChanged"
	StorageClassChange Event = "StorageClassChanged"
	DriversChanged     Event = "DriversChanged" // drivers of a node
	DeviceClaimChanged Event = "DeviceClaimChanged"
	SliceChanged       Event = "SliceChanged" // devices that a driver publishes
	DeviceClassChanged Event = "DeviceClassChanged"
	GroupChanged       Event = "GroupChanged" // a PodGroup, or a property that its pods share; the object is a GroupKey
)

// PodUpdate is the object of PodUpdated. Old is nil if it is unknown.
type PodUpdate struct{ Old, Now *v1.Pod }

// Requeue determines which events may resolve a refusal by this plugin. A plugin without Requeue is
// retried on every event.
type Requeue interface {
	Plugin
	// MayHelp evaluates one event for a pod that this plugin refused. obj is the current object, or
	// the last state of a deleted one.
	MayHelp(e Event, pod *v1.Pod, obj any) bool
}

// Cycle is the state of one scheduling attempt: the pod, the snapshot, and data that plugins share
// between their extension points. It is used by one goroutine at a time. The snapshot is valid up
// to Permit; data for later points is stored with Put.
type Cycle struct {
	Pod      *PodInfo
	Snapshot *Snapshot
	// With and Without are the pods by which the node that Filter receives differs from the
	// snapshot: pods that are added and pods that are removed. The node's own lists and sums
	// include the difference; the counts of the Index do not.
	With, Without []*PodInfo

	data    []pluginData
	skip    uint64 // filters that PreFilter disabled, as a bit set of indexes
	noScore uint64
}

// NewCycle starts an attempt.
func NewCycle(pod *PodInfo, s *Snapshot) *Cycle { return &Cycle{Pod: pod, Snapshot: s} }

// Put stores a value for the plugin.
func (c *Cycle) Put(plugin string, v any) {
	for i := range c.data {
		if c.data[i].plugin == plugin {
			c.data[i].value = v
			return
		}
	}
	c.data = append(c.data, pluginData{plugin, v})
}

// pluginData is the value of one plugin. A list is used because few plugins store one, and they
// read it for every node.
type pluginData struct {
	plugin string
	value  any
}

// More returns by how many matching pods the node that Filter receives exceeds the counts of the
// Index.
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

// Get returns the value that the plugin stored, or nil.
func (c *Cycle) Get(plugin string) any {
	for i := range c.data {
		if c.data[i].plugin == plugin {
			return c.data[i].value
		}
	}
	return nil
}
