// Package heartbeats adds the last heartbeats of nodes to Nodes and Leases when clients read them.
// Heartbeats are never stored.
package heartbeats

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
)

// Collector collects the heartbeats of nodes from all replicas. A heartbeat is never stored: only
// the replica with which the node has a session has it, in memory. Own returns the heartbeats of
// this replica, and Others requests those of the other replicas; both return times by node name. A
// Collector is safe for concurrent use.
type Collector struct {
	Own    func() map[string]time.Time
	Others func(ctx context.Context) []map[string]time.Time

	mu    sync.Mutex
	asked time.Time
	known map[string]time.Time
}

const (
	heartbeatAge       = time.Second            // how long responses of other replicas are cached
	heartbeatTimeout   = 300 * time.Millisecond // how long a request for Nodes waits for other replicas
	heartbeatRetention = time.Hour              // how long a heartbeat of an unreachable replica is kept
)

// leaseSeconds is the leaseDurationSeconds of a node's Lease, the same value that the kubelet sets.
const leaseSeconds = 40

// collectHeartbeats returns, by node name, the time of the last heartbeat that any replica has
// received. It requests the heartbeats of the other replicas if their last responses are older than
// heartbeatAge, and waits for at most heartbeatTimeout. If a replica does not respond in time, its
// last response is used, so that a heartbeat never disappears or goes back. Heartbeats older than
// heartbeatRetention are dropped.
func (h *Collector) collectHeartbeats(ctx context.Context) map[string]time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	if time.Since(h.asked) >= heartbeatAge || h.known == nil {
		// All readers share the responses: a reader that closes its connection must not cancel the
		// requests.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), heartbeatTimeout)
		defer cancel()
		if h.known == nil {
			h.known = map[string]time.Time{}
		}
		for _, part := range h.Others(ctx) {
			mergeInto(h.known, part)
		}
		h.asked = time.Now()
		maps.DeleteFunc(h.known, func(_ string, t time.Time) bool { return h.asked.Sub(t) > heartbeatRetention })
	}
	out := h.Own()
	mergeInto(out, h.known)
	return out
}

func mergeInto(into, from map[string]time.Time) {
	for node, t := range from {
		if t.After(into[node]) {
			into[node] = t
		}
	}
}

// AddTo returns items, in which Nodes and node Leases are replaced by copies with their last
// heartbeat. Other objects, and the objects of nodes without a heartbeat, are returned unchanged.
func (h *Collector) AddTo(ctx context.Context, kind *api.Kind, items []api.Object) []api.Object {
	if kind.Resource != "nodes" && kind.Resource != "leases" {
		return items
	}
	var known map[string]time.Time
	out := items
	for i, o := range items {
		if _, lease := o.(*coordinationv1.Lease); lease && o.GetNamespace() != v1.NamespaceNodeLease {
			continue
		}
		if known == nil {
			known, out = h.collectHeartbeats(ctx), slices.Clone(items)
		}
		if t, ok := known[o.GetName()]; ok {
			out[i] = withHeartbeat(o, t)
		}
	}
	return out
}

// withHeartbeat returns a copy of a Node or Lease with a heartbeat that was received at the time
// received. Newer times in a Node stay. It also changes conditions that the control plane has set
// to Unknown: they then show the last heartbeat before the node became unreachable.
func withHeartbeat(o api.Object, received time.Time) api.Object {
	switch o := o.(type) {
	case *v1.Node:
		n := *o
		n.Status.Conditions = slices.Clone(o.Status.Conditions)
		for i := range n.Status.Conditions {
			if c := &n.Status.Conditions[i]; isReportedByNode(c.Type) && c.LastHeartbeatTime.Time.Before(received) {
				c.LastHeartbeatTime = metav1.NewTime(received)
			}
		}
		return &n
	case *coordinationv1.Lease:
		l := *o
		renewed, seconds := metav1.NewMicroTime(received), int32(leaseSeconds)
		l.Spec.RenewTime = &renewed
		if l.Spec.LeaseDurationSeconds == nil {
			l.Spec.LeaseDurationSeconds = &seconds
		}
		return &l
	}
	return o
}

// isReportedByNode reports whether condition is a type that nodes report, and not the control
// plane.
func isReportedByNode(condition v1.NodeConditionType) bool {
	switch condition {
	case v1.NodeReady, v1.NodeMemoryPressure, v1.NodeDiskPressure, v1.NodePIDPressure:
		return true
	}
	return false
}
