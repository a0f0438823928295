package scheduler

import (
	"slices"
	"strings"
	"sync"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// cluster is the state that snapshots are taken of: nodes with the pods bound to them, and those assumed,
// that is, chosen for a node but not yet seen bound. Informer handlers and bindings change it; the
// scheduling loop takes snapshots.
type cluster struct {
	mu    sync.Mutex
	nodes map[string]*framework.NodeInfo
	pods  map[types.UID]*placed

	generation int64
	dirty      map[string]struct{} // nodes changed since the last snapshot
	members    bool                // nodes came or went since the last snapshot
	snapshot   *framework.Snapshot
}

// placed is a pod on a node.
type placed struct {
	info    *framework.PodInfo
	node    string
	assumed bool
}

func newCluster(v framework.Volumes) *cluster {
	return &cluster{
		nodes: make(map[string]*framework.NodeInfo), pods: make(map[types.UID]*placed), dirty: make(map[string]struct{}),
		snapshot: &framework.Snapshot{ByName: make(map[string]*framework.NodeInfo), Volumes: v},
	}
}

// touch returns the node for a change. The lock is held.
func (c *cluster) touch(name string) *framework.NodeInfo {
	n := c.nodes[name]
	if n == nil {
		n = &framework.NodeInfo{}
		c.nodes[name] = n
	}
	c.generation++
	n.Generation = c.generation
	c.dirty[name] = struct{}{}
	return n
}

func (c *cluster) setNode(node *v1.Node) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.touch(node.Name)
	if n.Node == nil {
		c.members = true
	}
	n.SetNode(node)
}

func (c *cluster) removeNode(name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.nodes[name]
	if n == nil {
		return
	}
	c.members = true
	if len(n.Pods) == 0 {
		delete(c.nodes, name)
		c.dirty[name] = struct{}{}
		return
	}
	c.touch(name).Node = nil // its pods are still known, and count should it come back
}

// place records a pod as bound to its node. It replaces what was assumed.
func (c *cluster) place(p *v1.Pod) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if have := c.pods[p.UID]; have != nil {
		if have.node == p.Spec.NodeName && sameForScheduling(have.info.Pod, p) {
			have.assumed = false
			return
		}
		c.take(p.UID, have)
	}
	c.put(&placed{info: framework.NewPodInfo(p), node: p.Spec.NodeName})
}

// sameForScheduling says whether nothing that is counted differs. Specs of bound pods change by resizing only.
func sameForScheduling(a, b *v1.Pod) bool {
	return a.Generation == b.Generation && slices.EqualFunc(a.Spec.Containers, b.Spec.Containers, func(x, y v1.Container) bool {
		return sameRequests(x.Resources.Requests, y.Resources.Requests)
	})
}

func sameRequests(a, b v1.ResourceList) bool {
	if len(a) != len(b) {
		return false
	}
	for k, v := range a {
		if w, ok := b[k]; !ok || v.Cmp(w) != 0 {
			return false
		}
	}
	return true
}

// assume counts a pod on the node it is about to be bound to. false: it is placed already.
func (c *cluster) assume(info *framework.PodInfo, node string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.pods[info.Pod.UID] != nil {
		return false
	}
	c.put(&placed{info: info, node: node, assumed: true})
	return true
}

// forget takes an assumed pod away again; what has been seen bound stays.
func (c *cluster) forget(uid types.UID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if have := c.pods[uid]; have != nil && have.assumed {
		c.take(uid, have)
	}
}

// remove takes a pod away, however it got there, and reports whether it was there.
func (c *cluster) remove(uid types.UID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	have := c.pods[uid]
	if have != nil {
		c.take(uid, have)
	}
	return have != nil
}

// forgetAssumed drops every assumption: they belong to a leadership that has ended.
func (c *cluster) forgetAssumed() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for uid, have := range c.pods {
		if have.assumed {
			c.take(uid, have)
		}
	}
}

func (c *cluster) placed(uid types.UID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.pods[uid] != nil
}

func (c *cluster) put(p *placed) {
	c.pods[p.info.Pod.UID] = p
	c.touch(p.node).AddPod(p.info)
}

func (c *cluster) take(uid types.UID, p *placed) {
	delete(c.pods, uid)
	n := c.touch(p.node)
	n.RemovePod(uid)
	if n.Node == nil && len(n.Pods) == 0 {
		delete(c.nodes, p.node)
	}
}

// takeSnapshot brings the snapshot up to date: only nodes that changed are copied. The result is valid until the
// next call, and belongs to the one goroutine that calls; what is in it is immutable.
func (c *cluster) takeSnapshot() *framework.Snapshot {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.snapshot
	if len(c.dirty) == 0 && !c.members {
		return s
	}
	next := &framework.Snapshot{Nodes: s.Nodes, ByName: s.ByName, Volumes: s.Volumes}
	if c.members {
		next.ByName = make(map[string]*framework.NodeInfo, len(c.nodes))
		next.Nodes = make([]*framework.NodeInfo, 0, len(c.nodes))
		for name, n := range c.nodes {
			if n.Node == nil {
				continue
			}
			have := s.ByName[name]
			if have == nil || have.Generation != n.Generation {
				have = n.Clone()
			}
			next.ByName[name] = have
			next.Nodes = append(next.Nodes, have)
		}
		slices.SortFunc(next.Nodes, func(a, b *framework.NodeInfo) int { return strings.Compare(a.Node.Name, b.Node.Name) })
	} else {
		c.replaceDirty(next)
	}
	clear(c.dirty)
	c.members = false
	c.snapshot = next
	return next
}

// replaceDirty swaps in copies of the changed nodes. The lock is held.
func (c *cluster) replaceDirty(s *framework.Snapshot) {
	for name := range c.dirty {
		n := c.nodes[name]
		if n == nil || n.Node == nil {
			continue
		}
		i, ok := slices.BinarySearchFunc(s.Nodes, name, func(a *framework.NodeInfo, name string) int { return strings.Compare(a.Node.Name, name) })
		if ok {
			cp := n.Clone()
			s.Nodes[i] = cp
			s.ByName[name] = cp
		}
	}
}
