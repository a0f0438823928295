package framework

import v1 "k8s.io/api/core/v1"

// maxPerNode is how many kinds of numbers an index keeps per node. Beyond that it forgets those not asked for longest.
const maxPerNode = 512

// PerNode keeps a number for each node that follows from its name, labels, taints and cordon alone: it is worked out
// when it is first asked for and again after one of these changed.
type PerNode struct {
	compute func(n *v1.Node) int32
	cached  []int32 // by slot: one more than the number; 0 = not known
	used    uint64
}

// PerNode is what is kept under an ID; of works it out, and is made by prepare when nothing is kept. IDs are equal for
// equal functions only. It is nil when prepare fails.
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

// Of is the node's number, which is not below zero.
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
