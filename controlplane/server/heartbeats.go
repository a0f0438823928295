package server

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
)

// heartbeats knows when nodes were heard last. A heartbeat is known to the replica that has the node's session alone,
// and never stored; readers of a Node or of its Lease see it all the same: they are told what all replicas know, at
// most heartbeatAge old.
type heartbeats struct {
	own    func() map[string]time.Time
	others func(ctx context.Context) []map[string]time.Time

	mu    sync.Mutex
	asked time.Time
	known map[string]time.Time
}

const (
	heartbeatAge      = time.Second            // an answer of the other replicas is used for so long
	heartbeatPatience = 300 * time.Millisecond // for their answers: a reader waits no longer for a replica that is gone
	heartbeatKept     = time.Hour              // how long a heartbeat is kept after its replica stopped answering
)

// leaseSeconds is what kubelets write as the duration of their Lease.
const leaseSeconds = 40

// all returns the time of each node's last heartbeat: the newest that this replica or any other replica received. The
// times of other replicas are at most heartbeatAge old, unless a replica did not answer in time: the times of its last
// answer are used then, so that a slow replica never makes a heartbeat disappear or go back. An entry is dropped after
// heartbeatKept. all waits for other replicas for at most heartbeatPatience.
func (h *heartbeats) all(ctx context.Context) map[string]time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	if time.Since(h.asked) >= heartbeatAge || h.known == nil {
		// The answers are shared by all readers: a reader that closes its connection does not end the requests.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), heartbeatPatience)
		defer cancel()
		if h.known == nil {
			h.known = map[string]time.Time{}
		}
		for _, part := range h.others(ctx) {
			merge(h.known, part)
		}
		h.asked = time.Now()
		maps.DeleteFunc(h.known, func(_ string, t time.Time) bool { return h.asked.Sub(t) > heartbeatKept })
	}
	out := h.own()
	merge(out, h.known)
	return out
}

func merge(into, from map[string]time.Time) {
	for node, t := range from {
		if t.After(into[node]) {
			into[node] = t
		}
	}
}

// live puts the last heartbeat into what a reader gets: a Node, a node's Lease, or a list of these. Other objects, and
// those of nodes of which nothing was heard, are returned as they are. What is stored is never modified.
func (h *heartbeats) live(ctx context.Context, kind *api.Kind, items []api.Object) []api.Object {
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
			known, out = h.all(ctx), slices.Clone(items)
		}
		if t, ok := known[o.GetName()]; ok {
			out[i] = heardAt(o, t)
		}
	}
	return out
}

// heardAt returns a copy of a Node or Lease whose heartbeat is at t or later. Conditions that the control plane set to
// Unknown get the time too: it is the time of the last heartbeat before the node became silent.
func heardAt(o api.Object, t time.Time) api.Object {
	switch o := o.(type) {
	case *v1.Node:
		n := *o
		n.Status.Conditions = slices.Clone(o.Status.Conditions)
		for i := range n.Status.Conditions {
			if c := &n.Status.Conditions[i]; nodeSays(c.Type) && c.LastHeartbeatTime.Time.Before(t) {
				c.LastHeartbeatTime = metav1.NewTime(t)
			}
		}
		return &n
	case *coordinationv1.Lease:
		l := *o
		renewed, seconds := metav1.NewMicroTime(t), int32(leaseSeconds)
		l.Spec.RenewTime = &renewed
		if l.Spec.LeaseDurationSeconds == nil {
			l.Spec.LeaseDurationSeconds = &seconds
		}
		return &l
	}
	return o
}

// nodeSays says whether a condition is the node's own.
func nodeSays(t v1.NodeConditionType) bool {
	switch t {
	case v1.NodeReady, v1.NodeMemoryPressure, v1.NodeDiskPressure, v1.NodePIDPressure:
		return true
	}
	return false
}

// serveHeartbeats answers GET /cluster/heartbeats: when this replica heard each node last, in milliseconds since 1970.
func (r *Replica) serveHeartbeats(w http.ResponseWriter, req *http.Request) {
	if !only(w, req, http.MethodGet) {
		return
	}
	out := map[string]int64{}
	for node, t := range r.fleet.Heard() {
		out[node] = t.UnixMilli()
	}
	answer(w, out)
}

// maxHeartbeats bounds the answer of a replica: a node takes its name and some 20 bytes.
const maxHeartbeats = 4 << 20

// Heartbeats asks the other ready replicas whom they have heard.
func (r *replicas) Heartbeats(ctx context.Context) []map[string]time.Time {
	list, _ := r.List()
	parts := make([]map[string]time.Time, len(list))
	var wg sync.WaitGroup
	for i, m := range list {
		if m.Name == r.self || !r.Alive(m.Name) {
			continue
		}
		wg.Go(func() {
			part, err := r.heartbeatsOf(ctx, m.ApiAddress)
			if err != nil {
				r.log.Debug("asking a replica for heartbeats", "replica", m.Name, "err", err)
			}
			parts[i] = part
		})
	}
	wg.Wait()
	return parts
}

func (r *replicas) heartbeatsOf(ctx context.Context, address string) (map[string]time.Time, error) {
	resp, err := r.get(ctx, address, api.PathClusterHeartbeats)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %s", api.PathClusterHeartbeats, resp.Status)
	}
	var millis map[string]int64
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxHeartbeats)).Decode(&millis); err != nil {
		return nil, fmt.Errorf("%s: %w", api.PathClusterHeartbeats, err)
	}
	out := make(map[string]time.Time, len(millis))
	for node, m := range millis {
		out[node] = time.UnixMilli(m)
	}
	return out, nil
}
