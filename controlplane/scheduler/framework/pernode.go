package framework

import v1 "k8s.io/api/core/v1"

// maxPerNode is how many PerNode caches an Index holds. When it is reached, the least recently used
// quarter is dropped.
const maxPerNode = 512

// PerNode caches, for each node, a number that depends only on the node's name, labels, taints and
// unschedulable flag. It is computed when it is first needed, and again after one of these
// properties has changed.
type PerNode struct {
	compute func(n *v1.Node) int32
	cached  []int32 // by slot: the number plus 1; 0 = not computed
	used    uint64
}

// PerNode returns the cache with the given ID. If it does not exist, prepare is called, which
// returns the function that computes the number of a node. Equal IDs must mean equal functions. The
// result is nil if prepare returns false.
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

// Of returns the number of a node. It computes the number if it is not cached. The number must not
// be negative.
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
