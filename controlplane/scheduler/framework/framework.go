// Package framework contains the types of the scheduling framework: the extension points as
// interfaces, the cluster state that plugins read, and Profile.Schedule, which chooses a node as a
// pure function of a snapshot and a pod. Plugins depend only on this package.
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

// Code is the kind of result that a plugin returned for a pod, for example Success or
// Unschedulable.
type Code uint8

const (
	Success Code = iota
	// Error means that the plugin itself failed. The pod is tried again after its backoff.
	Error
	// Unschedulable means that the plugin refuses the pod. After a change in the cluster, or after
	// preemption of other pods, it may accept the pod.
	Unschedulable
	// Unresolvable is like Unschedulable, but preemption of other pods cannot help
	// (UnschedulableAndUnresolvable in kube-scheduler).
	Unresolvable
	// Wait is returned by Permit plugins only: it delays the binding of the pod.
	Wait
	// Skip is returned by PreFilter, PreScore and Bind: the plugin has nothing to do for the pod.
	Skip
)

// Status is the result of a plugin for a pod. A nil *Status means success. A Status is immutable,
// so a plugin may return the same *Status for many nodes and pods.
type Status struct {
	Code    Code
	Reasons []string
	Err     error  // cause of a status with the code Error; otherwise nil
	Plugin  string // name of the plugin that returned the status; set by the framework if empty
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

// Is reports whether the status has the code c. A nil status has the code Success.
func (s *Status) Is(c Code) bool {
	if s == nil {
		return c == Success
	}
	return s.Code == c
}

// Refused reports whether the plugin refused the pod. It is false for a failure of the plugin.
func (s *Status) Refused() bool { return s.Is(Unschedulable) || s.Is(Unresolvable) }

// Message returns the reasons of the status, joined by commas.
func (s *Status) Message() string {
	if s == nil {
		return ""
	}
	return strings.Join(s.Reasons, ", ")
}

// AsError converts the status to an error. It returns nil for a status that is success.
func (s *Status) AsError() error {
	if s.OK() {
		return nil
	}
	if s.Err != nil {
		return fmt.Errorf("%s: %w", s.Plugin, s.Err)
	}
	return fmt.Errorf("%s: %s", s.Plugin, s.Message())
}

// Plugin is a scheduler plugin. A plugin also implements the interface of each extension point at
// which it can run, for example Filter and Score.
type Plugin interface{ Name() string }

// PreEnqueue is an extension point that decides whether a pod may enter the active queue. A pod
// that it refuses is not scheduled until the pod is updated.
type PreEnqueue interface {
	Plugin
	PreEnqueue(ctx context.Context, pod *v1.Pod) *Status
}

// QueueSort is the extension point that defines the order of the active queue. A profile has
// exactly one QueueSort plugin.
type QueueSort interface {
	Plugin
	Less(a, b *QueuedPod) bool
}

// QueuedPod is a pod in the scheduling queue, as passed to QueueSort.
type QueuedPod struct {
	*PodInfo
	Added    time.Time // time at which the pod was first added to the queue
	Attempts int
}

// PreFilter is an extension point that runs once per scheduling attempt, before Filter. If nodes is
// not nil, only the nodes in it are filtered. If the status is Skip, the plugin's Filter does not
// run for this pod. If it is a refusal, no node fits the pod.
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

// PostFilter is an extension point that runs if no node fits the pod, for example to preempt other
// pods. If a plugin returns success, the remaining PostFilter plugins are not run. The message of
// the status becomes part of the reported reason.
type PostFilter interface {
	Plugin
	PostFilter(ctx context.Context, c *Cycle, why *FitError) (nominatedNode string, s *Status)
}

// PreemptionPlugin is a PostFilter plugin that evicts pods of lower priority.
type PreemptionPlugin interface {
	PostFilter
	// Order returns possible victims in the order in which preemption tries to keep them. Pods that
	// a PodDisruptionBudget protects come first, then pods with higher priority.
	Order(pods []*PodInfo) []*PodInfo
}

// PreScore is an extension point that runs once per scheduling attempt, with the nodes that fit the
// pod. If it returns Skip, the plugin's Score does not run for this pod.
type PreScore interface {
	Plugin
	PreScore(ctx context.Context, c *Cycle, nodes []*NodeInfo) *Status
}

// MaxScore is the highest score that a Score plugin may give to a node after normalization.
const MaxScore int64 = 100

// Score is an extension point that returns a score for a node that fits the pod. The final score,
// after NormalizeScore if the plugin implements it, must be from 0 to MaxScore.
type Score interface {
	Plugin
	Score(ctx context.Context, c *Cycle, n *NodeInfo) (int64, *Status)
}

// NormalizeScore is an extension point that runs after the plugin's Score has run for all nodes. It
// changes the scores in place to the range from 0 to MaxScore.
type NormalizeScore interface {
	Score
	NormalizeScore(ctx context.Context, c *Cycle, scores []int64) *Status
}

// Reserve is an extension point that reserves resources for the pod on the node that was chosen for
// it, such as volumes. Unreserve reverts Reserve if the pod is not bound. It is also called for a
// plugin whose Reserve has not run or has failed.
type Reserve interface {
	Plugin
	Reserve(ctx context.Context, c *Cycle, node string) *Status
	Unreserve(ctx context.Context, c *Cycle, node string)
}

// Permit is an extension point that allows, refuses or delays the binding of the pod. To delay it,
// Permit returns the code Wait and the maximum delay. The plugin later ends the delay through
// Handle.Waiting.
type Permit interface {
	Plugin
	Permit(ctx context.Context, c *Cycle, node string) (*Status, time.Duration)
}

// PreBind is an extension point that runs before the pod is bound, for example to provision
// volumes. It may block for a long time.
type PreBind interface {
	Plugin
	PreBind(ctx context.Context, c *Cycle, node string) *Status
}

// Bind is an extension point that binds the pod to the node. If it returns Skip, the next Bind
// plugin is tried.
type Bind interface {
	Plugin
	Bind(ctx context.Context, c *Cycle, node string) *Status
}

// PostBind is an extension point that runs after the pod was bound.
type PostBind interface {
	Plugin
	PostBind(ctx context.Context, c *Cycle, node string)
}

// Event is a kind of change in the cluster after which an unschedulable pod may fit.
type Event string

const (
	NodeAdded          Event = "NodeAdded"
	NodeAllocatable    Event = "NodeAllocatable" // allocatable resources of a node changed
	NodeLabels         Event = "NodeLabels"
	NodeTaints         Event = "NodeTaints"   // taints or spec.unschedulable of a node changed
	NodeFeatures       Event = "NodeFeatures" // declared features of a node changed
	PodRemoved         Event = "PodRemoved"   // a pod on a node has terminated, was deleted, or lost its assumed node
	PodAdded           Event = "PodAdded"     // a pod was bound to a node
	PodUpdated         Event = "PodUpdated"   // labels or resources of a pod on a node changed; a PodUpdate
	NamespaceLabels    Event = "NamespaceLabels"
	ClaimChanged       Event = "ClaimChanged"
	VolumeChanged      Event = "VolumeChanged"
	StorageClassChange Event = "StorageClassChanged"
	DriversChanged     Event = "DriversChanged" // CSI drivers on a node changed
	DeviceClaimChanged Event = "DeviceClaimChanged"
	SliceChanged       Event = "SliceChanged" // the devices that a driver publishes changed (ResourceSlice)
	DeviceClassChanged Event = "DeviceClassChanged"
	GroupChanged       Event = "GroupChanged" // a PodGroup or the set of its pods changed; the object is a GroupKey
)

// PodUpdate is the object of the event PodUpdated: a pod on a node, before and after the change.
// Old is nil if the previous version is unknown.
type PodUpdate struct{ Old, Now *v1.Pod }

// Requeue is implemented by plugins that decide after which events a pod that they refused is tried
// again. A pod that was refused by a plugin without this method is tried again after every event.
type Requeue interface {
	Plugin
	// MayHelp reports whether the plugin, which refused the pod in its last attempt, may accept the
	// pod after the event. obj is the changed object; for a deletion it is the last version of the
	// object.
	MayHelp(e Event, pod *v1.Pod, obj any) bool
}

// Cycle is the state of one scheduling attempt (CycleState in kube-scheduler): the pod, the
// snapshot, and data that a plugin stores at one extension point for a later one. One goroutine at
// a time uses it. The snapshot may be used until Permit has returned; later extension points use
// only data stored with Put.
type Cycle struct {
	Pod      *PodInfo
	Snapshot *Snapshot
	// With and Without are the pods that were added to and removed from a node of the snapshot, in
	// order to find out whether the pod fits that modified node. Filter receives the modified node.
	// The counts of the snapshot's Index do not include the modification; More returns the
	// difference.
	With, Without []*PodInfo
	// Durations receives the duration of each extension point; nil = durations are not measured.
	Durations DurationObserver

	data    []pluginData
	skip    uint64 // bit set of the indexes of the Filter plugins that PreFilter has disabled
	noScore uint64
}

// NewCycle returns a new Cycle, the state of one attempt to schedule the pod on the snapshot.
func NewCycle(pod *PodInfo, s *Snapshot) *Cycle { return &Cycle{Pod: pod, Snapshot: s} }

// Put stores the value v for the given plugin. Get returns it at later extension points of the
// attempt.
func (c *Cycle) Put(plugin string, v any) {
	for i := range c.data {
		if c.data[i].plugin == plugin {
			c.data[i].value = v
			return
		}
	}
	c.data = append(c.data, pluginData{plugin, v})
}

// pluginData is the value that one plugin has stored in a Cycle. A Cycle keeps these values in a
// list and not in a map, because few plugins store a value and Filter reads it for every node.
type pluginData struct {
	plugin string
	value  any
}

// More returns the number of pods in c.With for which match returns true, minus the number of such
// pods in c.Without. Filter adds the result to the pod counts that the Index returns for the node.
func (c *Cycle) More(match func(*PodInfo) bool) int {
	n := 0
	for _, pod := range c.With {
		if match(pod) {
			n++
		}
	}
	for _, pod := range c.Without {
		if match(pod) {
			n--
		}
	}
	return n
}

// Get returns the value that the plugin has stored with Put, or nil.
func (c *Cycle) Get(plugin string) any {
	for i := range c.data {
		if c.data[i].plugin == plugin {
			return c.data[i].value
		}
	}
	return nil
}
