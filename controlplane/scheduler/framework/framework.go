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

// Code is the kind of a plugin's result for a pod.
type Code uint8

const (
	Success Code = iota
	// Error is a failure of the plugin itself. Scheduling of the pod is tried again.
	Error
	// Unschedulable means that the pod does not fit now. A change in the cluster, or preemption,
	// may help.
	Unschedulable
	// Unresolvable is like Unschedulable, but preemption of other pods cannot help.
	Unresolvable
	// Wait is returned by Permit to delay the binding.
	Wait
	// Skip is returned by PreFilter, PreScore and Bind: the plugin has nothing to do for the pod.
	Skip
)

// Status is a plugin's result for a pod. A nil *Status means success. A Status is immutable, so a
// plugin may return the same one repeatedly.
type Status struct {
	Code    Code
	Reasons []string
	Err     error  // for Error
	Plugin  string // the plugin that returned it; set by the framework if empty
}

// Refuse returns a status with the code Unschedulable: the plugin refuses the pod for the given
// reasons.
func Refuse(plugin string, reasons ...string) *Status {
	return &Status{Code: Unschedulable, Reasons: reasons, Plugin: plugin}
}

// RefuseForGood returns a status with the code Unresolvable: the plugin refuses the pod, and
// preemption cannot help.
func RefuseForGood(plugin string, reasons ...string) *Status {
	return &Status{Code: Unresolvable, Reasons: reasons, Plugin: plugin}
}

// Fail returns a status with the code Error.
func Fail(plugin string, err error) *Status {
	return &Status{Code: Error, Reasons: []string{err.Error()}, Err: err, Plugin: plugin}
}

// SkipStatus is the status with the code Skip: the plugin has nothing to do for the pod.
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

// Message returns the reasons, joined by commas.
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

// Plugin is a scheduler plugin. It also implements the interfaces of its extension points.
type Plugin interface{ Name() string }

// PreEnqueue is an extension point that decides whether a pod may enter the queue. A refused pod is
// not scheduled until it changes or an event may help.
type PreEnqueue interface {
	Plugin
	PreEnqueue(ctx context.Context, pod *v1.Pod) *Status
}

// QueueSort is the extension point that defines the order of the queue. A profile has exactly one
// such plugin.
type QueueSort interface {
	Plugin
	Less(a, b *QueuedPod) bool
}

// QueuedPod is a pod in the scheduling queue, as passed to QueueSort.
type QueuedPod struct {
	*PodInfo
	Added    time.Time // time when it was first added to the queue
	Attempts int
}

// PreFilter is an extension point that inspects the pod once per cycle. Skip disables the plugin's
// Filter for this pod. A refusal ends the cycle. If nodes is not nil, only these nodes are
// considered.
type PreFilter interface {
	Plugin
	PreFilter(ctx context.Context, c *Cycle) (nodes map[string]struct{}, s *Status)
}

// Filter is an extension point that decides whether the pod fits a node. It runs once per node, so
// it must be fast and must not block.
type Filter interface {
	Plugin
	Filter(ctx context.Context, c *Cycle, n *NodeInfo) *Status
}

// PostFilter is an extension point that runs if no node fits, to make room by preemption. The first
// plugin that returns success ends the search. The message of the status becomes part of the
// reported reason.
type PostFilter interface {
	Plugin
	PostFilter(ctx context.Context, c *Cycle, why *FitError) (nominatedNode string, s *Status)
}

// Preempts is a PostFilter plugin that evicts pods of lower priority.
type Preempts interface {
	PostFilter
	// Order returns the pods in the order in which preemption spares them. Pods that a
	// PodDisruptionBudget protects come first, then the more important ones.
	Order(pods []*PodInfo) []*PodInfo
}

// PreScore is an extension point that inspects the feasible nodes once per cycle. Skip disables the
// plugin's Score for this pod.
type PreScore interface {
	Plugin
	PreScore(ctx context.Context, c *Cycle, nodes []*NodeInfo) *Status
}

// MaxScore is the highest score that a Score plugin may give to a node after normalization.
const MaxScore int64 = 100

// Score is an extension point that scores a feasible node. The score must be from 0 to MaxScore, if
// necessary after NormalizeScore.
type Score interface {
	Plugin
	Score(ctx context.Context, c *Cycle, n *NodeInfo) (int64, *Status)
}

// NormalizeScore is an extension point that scales the scores of the plugin for all nodes to the
// range from 0 to MaxScore, in place.
type NormalizeScore interface {
	Score
	NormalizeScore(ctx context.Context, c *Cycle, scores []int64) *Status
}

// Reserve is an extension point that reserves resources of the node for the pod after the node was
// chosen. Unreserve reverts it. Unreserve may also be called for a plugin that has not reserved
// anything.
type Reserve interface {
	Plugin
	Reserve(ctx context.Context, c *Cycle, node string) *Status
	Unreserve(ctx context.Context, c *Cycle, node string)
}

// Permit is an extension point that allows, refuses or delays the binding; it delays it with the
// code Wait. The duration is the maximum delay. A delayed pod is allowed or rejected through
// Handle.Waiting.
type Permit interface {
	Plugin
	Permit(ctx context.Context, c *Cycle, node string) (*Status, time.Duration)
}

// PreBind is an extension point for work that must precede the binding, such as provisioning
// volumes. It may take long.
type PreBind interface {
	Plugin
	PreBind(ctx context.Context, c *Cycle, node string) *Status
}

// Bind is an extension point that binds the pod to the node. Skip leaves the binding to the next
// plugin.
type Bind interface {
	Plugin
	Bind(ctx context.Context, c *Cycle, node string) *Status
}

// PostBind is an extension point that runs after the pod was bound.
type PostBind interface {
	Plugin
	PostBind(ctx context.Context, c *Cycle, node string)
}

// Event is a kind of change in the cluster that may make an unschedulable pod fit.
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

// PodUpdate is the object of the event PodUpdated. Old is nil if the previous state is unknown.
type PodUpdate struct{ Old, Now *v1.Pod }

// Requeue is implemented by plugins that select the events after which their refusal of a pod may
// no longer apply. If a plugin does not implement it, pods that the plugin refused are retried
// after every event.
type Requeue interface {
	Plugin
	// MayHelp reports whether the plugin may accept the pod after the event, which it refused
	// before. obj is the changed object, or the last state of a deleted one.
	MayHelp(e Event, pod *v1.Pod, obj any) bool
}

// Cycle is the state of one scheduling attempt: the pod, the snapshot, and data that plugins pass
// between their extension points. It is used by one goroutine at a time. The snapshot is valid
// until the end of Permit; data for later extension points is stored with Put.
type Cycle struct {
	Pod      *PodInfo
	Snapshot *Snapshot
	// With and Without are the pods by which the node that Filter receives differs from the same
	// node in the snapshot: added pods and removed pods. The node's own lists and sums include the
	// difference; the counts of the Index do not.
	With, Without []*PodInfo

	data    []pluginData
	skip    uint64 // filters that PreFilter disabled, as a bit set of indexes
	noScore uint64
}

// NewCycle returns the state of a new scheduling attempt for a pod on a snapshot.
func NewCycle(pod *PodInfo, s *Snapshot) *Cycle { return &Cycle{Pod: pod, Snapshot: s} }

// Put stores a value for the named plugin, which Get returns at later extension points.
func (c *Cycle) Put(plugin string, v any) {
	for i := range c.data {
		if c.data[i].plugin == plugin {
			c.data[i].value = v
			return
		}
	}
	c.data = append(c.data, pluginData{plugin, v})
}

// pluginData is the value that one plugin stored in a Cycle. A Cycle uses a list and not a map,
// because few plugins store a value, and they read it for every node.
type pluginData struct {
	plugin string
	value  any
}

// More returns the number of pods in With for which has returns true, minus the number of such pods
// in Without. A Filter adds it to the counts of the Index for the node.
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
