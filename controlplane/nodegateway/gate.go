package nodegateway

import (
	"sync"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
)

// gate decides when a terminating pod may get its SIGTERM: when no proxy of a live node routes to it
// any more, in other words when every live node has applied the revision at which the pod's
// last ready endpoint went away; or when the limit has passed.
//
// It is fed with EndpointSlices, applied revisions and the coming and going of nodes, each from
// whichever goroutine learns of it.
type gate struct {
	limit time.Duration

	mu      sync.Mutex
	ready   map[types.UID]map[key]struct{} // pod → slices in which it is ready
	members map[key][]types.UID            // slice → its ready pods
	applied map[string]uint64              // node → proxy revision, of the nodes heard of
	alive   map[string]struct{}            // nodes that are Ready by their status
	waiting map[types.UID]*gateWait
	left    map[types.UID]departure // pods that went away from their last slice before anybody asked
	leaving []departure             // the same, oldest first, with those that asked since
}

// departure is a pod's leave from its last slice. It matters for as long as a pod may have to wait for it.
type departure struct {
	uid types.UID
	rev uint64
	at  time.Time
}

// gateWait is a pod in front of the gate.
type gateWait struct {
	open    func()
	timer   *time.Timer
	rev     uint64              // 0 while a slice still shows the pod ready
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

// slice takes the present state of an EndpointSlice; nil when it is gone. rev is the revision of the change.
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

// depart remembers that a pod left although nobody asked about it yet: the slices are watched by one goroutine
// and pods by another, so that the removal may be seen before the deletion that caused it. The lock is held.
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

// readyPods lists the pods behind the ready endpoints.
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

// ask calls open once, from any goroutine, when the pod may be stopped: before ask returns when it stands in no
// slice and no live node can still think so.
func (g *gate) ask(uid types.UID, open func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if w := g.waiting[uid]; w != nil { // a session that resumed asks again
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

// await starts to wait for the live nodes to reach rev. The lock is held.
func (g *gate) await(uid types.UID, w *gateWait, rev uint64) {
	w.rev, w.pending = rev, make(map[string]struct{})
	for node, have := range g.applied {
		if have < rev {
			w.pending[node] = struct{}{}
		}
	}
	// A node that is alive though this replica hears nothing of it may still route to the pod:
	// rather wait for the limit than lose a request.
	for node := range g.alive {
		if _, heard := g.applied[node]; !heard {
			w.pending[node] = struct{}{}
		}
	}
	if len(w.pending) == 0 {
		g.pass(uid, w)
	}
}

// pass lets the pod through. The lock is held.
func (g *gate) pass(uid types.UID, w *gateWait) {
	w.timer.Stop()
	delete(g.waiting, uid)
	w.open()
}

// progress says that the proxy of a node shows rev.
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

// silent says that nothing is heard of the node here any more.
func (g *gate) silent(node string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.applied, node)
	if _, alive := g.alive[node]; !alive {
		g.skip(node)
	}
}

// nodeReady takes a node's Ready condition.
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

// skip stops waiting for a node. The lock is held.
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
