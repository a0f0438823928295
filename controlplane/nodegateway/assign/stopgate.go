package assign

import (
	"sync"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
)

// StopGate delays the SIGTERM of terminating pods until no live node's proxy routes to them. A pod
// may be stopped when every live node has applied the revision at which the pod's last ready
// endpoint was removed. The delay is limited.
//
// Its inputs are EndpointSlices, the revisions that proxies have applied, and the readiness of
// nodes. All methods are safe for concurrent use.
type StopGate struct {
	limit time.Duration

	mu           sync.Mutex
	slicesByPod  map[types.UID]map[key]struct{} // EndpointSlices in which a pod is ready, by pod
	podsBySlice  map[key][]types.UID            // ready pods, by EndpointSlice
	applied      map[string]uint64              // revision applied by each connected node's proxy, by node
	readyNodes   map[string]struct{}            // nodes with a true Ready condition
	waiting      map[types.UID]*stopRequest
	removed      map[types.UID]sliceRemoval // pods that were removed from their last EndpointSlice before RequestStop
	removalOrder []sliceRemoval             // values of removed, oldest first; may contain outdated entries
}

// sliceRemoval records that a pod was removed from its last EndpointSlice. It is kept for the
// maximum delay of a stop.
type sliceRemoval struct {
	uid      types.UID
	revision uint64
	time     time.Time
}

// stopRequest is a terminating pod whose stop is delayed.
type stopRequest struct {
	allow    func()
	timer    *time.Timer
	revision uint64              // revision that nodes must apply; 0 while an EndpointSlice lists the pod as ready
	pending  map[string]struct{} // nodes that have not applied the revision yet
}

// NewStopGate returns a StopGate that delays the stop of a pod by at most limit.
func NewStopGate(limit time.Duration) *StopGate {
	return &StopGate{
		limit:       limit,
		slicesByPod: make(map[types.UID]map[key]struct{}),
		podsBySlice: make(map[key][]types.UID),
		applied:     make(map[string]uint64),
		readyNodes:  make(map[string]struct{}),
		waiting:     make(map[types.UID]*stopRequest),
		removed:     make(map[types.UID]sliceRemoval),
	}
}

// updateSlice records the current state of the EndpointSlice id, at a store revision. slice is nil
// after its deletion.
func (g *StopGate) updateSlice(id key, slice *discoveryv1.EndpointSlice, revision uint64) {
	ready := readyPods(slice)
	g.mu.Lock()
	defer g.mu.Unlock()
	before := g.podsBySlice[id]
	if len(ready) == 0 {
		delete(g.podsBySlice, id)
	} else {
		g.podsBySlice[id] = ready
	}
	for _, uid := range ready {
		if g.slicesByPod[uid] == nil {
			g.slicesByPod[uid] = make(map[key]struct{})
		}
		g.slicesByPod[uid][id] = struct{}{}
		delete(g.removed, uid)
	}
	isReady := make(map[types.UID]struct{}, len(ready))
	for _, uid := range ready {
		isReady[uid] = struct{}{}
	}
	for _, uid := range before {
		if _, ok := isReady[uid]; ok {
			continue
		}
		delete(g.slicesByPod[uid], id)
		if len(g.slicesByPod[uid]) > 0 {
			continue
		}
		delete(g.slicesByPod, uid)
		if w := g.waiting[uid]; w != nil {
			g.awaitRevision(uid, w, revision)
		} else {
			g.recordRemoval(sliceRemoval{uid, revision, time.Now()})
		}
	}
}

// recordRemoval records that a pod was removed from its last EndpointSlice before RequestStop was
// called for it. Slices and pods are watched independently, so the removal may be received before
// the pod's deletion timestamp. The lock must be held.
func (g *StopGate) recordRemoval(d sliceRemoval) {
	old := 0
	for old < len(g.removalOrder) && d.time.Sub(g.removalOrder[old].time) > g.limit {
		if expired := g.removalOrder[old]; g.removed[expired.uid] == expired {
			delete(g.removed, expired.uid)
		}
		old++
	}
	g.removalOrder = append(g.removalOrder[old:], d)
	g.removed[d.uid] = d
}

// readyPods returns the UIDs of the pods of the slice's ready endpoints.
func readyPods(slice *discoveryv1.EndpointSlice) []types.UID {
	if slice == nil {
		return nil
	}
	var out []types.UID
	for i := range slice.Endpoints {
		e := &slice.Endpoints[i]
		isReady := e.Conditions.Ready == nil || *e.Conditions.Ready
		if isReady && e.TargetRef != nil && e.TargetRef.Kind == "Pod" {
			out = append(out, e.TargetRef.UID)
		}
	}
	return out
}

// RequestStop registers a terminating pod. allow is called once, from any goroutine, when the pod
// may be stopped. It is called before RequestStop returns if no EndpointSlice lists the pod and no
// live node can still route to it.
func (g *StopGate) RequestStop(uid types.UID, allow func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if w := g.waiting[uid]; w != nil { // a resumed session repeats the request
		w.allow = allow
		return
	}
	limit := g.limit
	removal, removed := g.removed[uid]
	if removed {
		limit -= time.Since(removal.time)
	}
	if len(g.slicesByPod[uid]) == 0 && (!removed || limit <= 0) {
		allow()
		return
	}
	w := &stopRequest{allow: allow}
	w.timer = time.AfterFunc(limit, func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		if g.waiting[uid] == w {
			g.allowStop(uid, w)
		}
	})
	g.waiting[uid] = w
	if removed {
		delete(g.removed, uid)
		g.awaitRevision(uid, w, removal.revision)
	}
}

// awaitRevision delays the stop w until all live nodes have applied the revision. The lock must be
// held.
func (g *StopGate) awaitRevision(uid types.UID, w *stopRequest, revision uint64) {
	w.revision, w.pending = revision, make(map[string]struct{})
	for node, have := range g.applied {
		if have < revision {
			w.pending[node] = struct{}{}
		}
	}
	// A node that is Ready but not connected to this replica may still route to the pod. Waiting
	// until the limit is better than losing a request.
	for node := range g.readyNodes {
		if _, connected := g.applied[node]; !connected {
			w.pending[node] = struct{}{}
		}
	}
	if len(w.pending) == 0 {
		g.allowStop(uid, w)
	}
}

// allowStop calls allow of the request w and deletes the request. The lock must be held.
func (g *StopGate) allowStop(uid types.UID, w *stopRequest) {
	w.timer.Stop()
	delete(g.waiting, uid)
	w.allow()
}

// RecordApplied records that a node's proxy has applied the Service rules of a store revision, and
// allows the stops that this node has delayed.
func (g *StopGate) RecordApplied(node string, revision uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if have, ok := g.applied[node]; ok && have >= revision {
		return
	}
	g.applied[node] = revision
	for uid, w := range g.waiting {
		if w.revision == 0 || revision < w.revision {
			continue
		}
		if _, ok := w.pending[node]; ok {
			delete(w.pending, node)
			if len(w.pending) == 0 {
				g.allowStop(uid, w)
			}
		}
	}
}

// RecordDisconnect records that the node is no longer connected to this replica.
func (g *StopGate) RecordDisconnect(node string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.applied, node)
	if _, ready := g.readyNodes[node]; !ready {
		g.skipNode(node)
	}
}

// setNodeReady records a node's Ready condition.
func (g *StopGate) setNodeReady(node string, ready bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if ready {
		g.readyNodes[node] = struct{}{}
		return
	}
	delete(g.readyNodes, node)
	if _, connected := g.applied[node]; !connected {
		g.skipNode(node)
	}
}

// skipNode removes a node from all requests, so that it delays no stop. The lock must be held.
func (g *StopGate) skipNode(node string) {
	for uid, w := range g.waiting {
		if _, ok := w.pending[node]; ok {
			delete(w.pending, node)
			if len(w.pending) == 0 {
				g.allowStop(uid, w)
			}
		}
	}
}
