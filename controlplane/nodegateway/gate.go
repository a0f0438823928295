package nodegateway

import (
	"sync"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
)

// gate decides when a terminating pod may get its SIGTERM: when no live node's proxy routes to it
// any more. That is when every live node has applied the revision at which the pod's last ready
// endpoint was removed. A time limit bounds the wait.
//
// Its inputs are EndpointSlices, the revisions that proxies have applied, and the readiness of
// nodes. All methods are safe for concurrent use.
type gate struct {
	limit time.Duration

	mu      sync.Mutex
	ready   map[types.UID]map[key]struct{} // pod → EndpointSlices in which it is ready
	members map[key][]types.UID            // EndpointSlice → its ready pods
	applied map[string]uint64              // node → applied proxy revision, for nodes connected to this replica
	alive   map[string]struct{}            // nodes with a true Ready condition
	waiting map[types.UID]*gateWait
	left    map[types.UID]departure // pods removed from their last EndpointSlice before ask was called
	leaving []departure             // the same departures, oldest first; may contain entries no longer in left
}

// departure records the removal of a pod from its last EndpointSlice. It is kept as long as a pod
// may have to wait.
type departure struct {
	uid types.UID
	rev uint64
	at  time.Time
}

// gateWait is a terminating pod that waits for the gate.
type gateWait struct {
	open    func()
	timer   *time.Timer
	rev     uint64              // revision to reach; 0 while an EndpointSlice lists the pod as ready
	pending map[string]struct{} // nodes that have not applied rev
}

func newGate(limit time.Duration) *gate {
	return &gate{
		limit:   limit,
		ready:   make(map[types.UID]map[key]struct{}),
		members: make(map[key][]types.UID),
		applied: make(map[string]uint64),
		alive:   make(map[string]struct{}),
		waiting: make(map[types.UID]*gateWait),
		left:    make(map[types.UID]departure),
	}
}

// slice updates the gate with the present state of an EndpointSlice; s is nil after its deletion.
// rev is the revision of the change.
func (g *gate) slice(id key, s *discoveryv1.EndpointSlice, rev uint64) {
	now := readyPods(s)
	g.mu.Lock()
	defer g.mu.Unlock()
	before := g.members[id]
	if len(now) == 0 {
		delete(g.members, id)
	} else {
		g.members[id] = now
	}
	for _, uid := range now {
		if g.ready[uid] == nil {
			g.ready[uid] = make(map[key]struct{})
		}
		g.ready[uid][id] = struct{}{}
		delete(g.left, uid)
	}
	keep := make(map[types.UID]struct{}, len(now))
	for _, uid := range now {
		keep[uid] = struct{}{}
	}
	for _, uid := range before {
		if _, ok := keep[uid]; ok {
			continue
		}
		delete(g.ready[uid], id)
		if len(g.ready[uid]) > 0 {
			continue
		}
		delete(g.ready, uid)
		if w := g.waiting[uid]; w != nil {
			g.await(uid, w, rev)
		} else {
			g.depart(departure{uid, rev, time.Now()})
		}
	}
}

// depart records that a pod was removed from its last EndpointSlice before ask was called for it.
// Slices and pods are watched independently, so the removal may be seen before the pod's deletion.
// The lock must be held.
func (g *gate) depart(d departure) {
	old := 0
	for old < len(g.leaving) && d.at.Sub(g.leaving[old].at) > g.limit {
		if gone := g.leaving[old]; g.left[gone.uid] == gone {
			delete(g.left, gone.uid)
		}
		old++
	}
	g.leaving = append(g.leaving[old:], d)
	g.left[d.uid] = d
}

// readyPods returns the UIDs of the pods of the ready endpoints.
func readyPods(s *discoveryv1.EndpointSlice) []types.UID {
	if s == nil {
		return nil
	}
	var out []types.UID
	for i := range s.Endpoints {
		e := &s.Endpoints[i]
		isReady := e.Conditions.Ready == nil || *e.Conditions.Ready
		if isReady && e.TargetRef != nil && e.TargetRef.Kind == "Pod" {
			out = append(out, e.TargetRef.UID)
		}
	}
	return out
}

// ask registers a terminating pod. The gate calls open once, from any goroutine, when the pod may
// be stopped. It does so before ask returns if no EndpointSlice lists the pod and no live node can
// still route to it.
func (g *gate) ask(uid types.UID, open func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if w := g.waiting[uid]; w != nil { // a resumed session asks again
		w.open = open
		return
	}
	limit := g.limit
	d, left := g.left[uid]
	if left {
		limit -= time.Since(d.at)
	}
	if len(g.ready[uid]) == 0 && (!left || limit <= 0) {
		open()
		return
	}
	w := &gateWait{open: open}
	w.timer = time.AfterFunc(limit, func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		if g.waiting[uid] == w {
			g.pass(uid, w)
		}
	})
	g.waiting[uid] = w
	if left {
		delete(g.left, uid)
		g.await(uid, w, d.rev)
	}
}

// await starts the wait until all live nodes have applied rev. The lock must be held.
func (g *gate) await(uid types.UID, w *gateWait, rev uint64) {
	w.rev, w.pending = rev, make(map[string]struct{})
	for node, have := range g.applied {
		if have < rev {
			w.pending[node] = struct{}{}
		}
	}
	// A node that is Ready but not connected to this replica may still route to the pod. Waiting
	// for the limit is better than losing a request.
	for node := range g.alive {
		if _, heard := g.applied[node]; !heard {
			w.pending[node] = struct{}{}
		}
	}
	if len(w.pending) == 0 {
		g.pass(uid, w)
	}
}

// pass calls open for the pod and removes it. The lock must be held.
func (g *gate) pass(uid types.UID, w *gateWait) {
	w.timer.Stop()
	delete(g.waiting, uid)
	w.open()
}

// progress records that a node's proxy has applied rev.
func (g *gate) progress(node string, rev uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if have, ok := g.applied[node]; ok && have >= rev {
		return
	}
	g.applied[node] = rev
	for uid, w := range g.waiting {
		if w.rev == 0 || rev < w.rev {
			continue
		}
		if _, ok := w.pending[node]; ok {
			delete(w.pending, node)
			if len(w.pending) == 0 {
				g.pass(uid, w)
			}
		}
	}
}

// silent records that the node is no longer connected to this replica.
func (g *gate) silent(node string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.applied, node)
	if _, alive := g.alive[node]; !alive {
		g.skip(node)
	}
}

// nodeReady records a node's Ready condition.
func (g *gate) nodeReady(node string, ready bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if ready {
		g.alive[node] = struct{}{}
		return
	}
	delete(g.alive, node)
	if _, heard := g.applied[node]; !heard {
		g.skip(node)
	}
}

// skip removes a node from all waits. The lock must be held.
func (g *gate) skip(node string) {
	for uid, w := range g.waiting {
		if _, ok := w.pending[node]; ok {
			delete(w.pending, node)
			if len(w.pending) == 0 {
				g.pass(uid, w)
			}
		}
	}
}
