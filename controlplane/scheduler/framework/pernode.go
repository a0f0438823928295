package framework

import v1 "k8s.io/api/core/v1"

// maxPerNode is the maximum number of PerNode caches of an Index. When it is reached, the least
// recently used quarter of them is removed.
const maxPerNode = 512

// PerNode caches one number for each node, for example whether the node matches a pod's node
// affinity. The number may depend only on the node's name, labels, taints and unschedulable flag.
// It is computed when it is first requested, and again after one of these properties has changed.
type PerNode struct {
	compute func(n *v1.Node) int32
	cached  []int32 // the node's number plus 1, indexed by NodeInfo.slot; 0 = not computed
	used    uint64
}

// PerNode returns the PerNode cache with the given ID. If it does not exist, it is created with the
// function that prepare returns, which computes the number of a node. If prepare returns false,
// PerNode returns nil. Callers must use different IDs for different functions.
func (x *Index) PerNode(id string, prepare func() (of func(n *v1.Node) int32, ok bool)) *PerNode {
	x.clock++
	p := x.perNode[id]
	if p == nil {
		of, ok := prepare()
		if !ok {
			return nil
		}
		if len(x.perNode) >= maxPerNode {
			for _, old := range leastRecentlyUsed(x.perNode, func(p *PerNode) uint64 { return p.used }) {
				old.used = 0
			}
			for id, p := range x.perNode {
				if p.used == 0 {
					delete(x.perNode, id)
				}
			}
		}
		p = &PerNode{compute: of}
		x.perNode[id] = p
	}
	p.used = x.clock
	return p
}

// Of returns the number that the cache p holds for the node, and computes it if necessary. Numbers
// must not be negative.
func (p *PerNode) Of(n *NodeInfo) int32 {
	if n.slot == 0 {
		return p.compute(n.Node)
	}
	if int(n.slot) < len(p.cached) {
		if v := p.cached[n.slot]; v != 0 {
			return v - 1
		}
	}
	p.cached = growTo(p.cached, n.slot)
	v := p.compute(n.Node)
	p.cached[n.slot] = v + 1
	return v
}

func (p *PerNode) clearSlot(slot int32) {
	if int(slot) < len(p.cached) {
		p.cached[slot] = 0
	}
}
