package framework

import "slices"

// scratch contains temporary slices of one scheduling attempt. They are reused by later attempts,
// to avoid memory allocations.
type scratch struct {
	active           []Filter
	fit, preemptable []*NodeInfo
	totals, part     []int64
	refusals         []refusals
}

// refusals is the number of nodes that a plugin refused with the same *Status. A plugin that
// refuses many nodes for the same reason returns the same pointer.
type refusals struct {
	status *Status
	plugin string
	nodes  int
}

// maxRefusals is the maximum number of different statuses that a scratch counts. Refusals with
// further statuses are added to the FitError immediately.
const maxRefusals = 8

// addRefusal records that the plugin refused the node n with status s. If no node fits,
// explainRefusals adds the recorded refusals to the FitError. If maxRefusals other statuses are
// already recorded, addRefusal itself adds the refusal to why.
func (r *scratch) addRefusal(s *Status, plugin string, n *NodeInfo, why *FitError) {
	if s.Is(Unschedulable) {
		r.preemptable = append(r.preemptable, n)
	}
	for i := range r.refusals {
		if have := &r.refusals[i]; have.status == s && have.plugin == plugin {
			have.nodes++
			return
		}
	}
	if len(r.refusals) < maxRefusals {
		r.refusals = append(r.refusals, refusals{s, plugin, 1})
		return
	}
	why.addRefusal(s, plugin, 1)
}

// explainRefusals adds the refusals that addRefusal recorded to why, after no node was found that
// fits.
func (r *scratch) explainRefusals(why *FitError) {
	for _, x := range r.refusals {
		why.addRefusal(x.status, x.plugin, x.nodes)
	}
	why.PreemptableNodes = slices.Clone(r.preemptable)
}

func (p *Profile) getScratch() *scratch {
	if r, ok := p.scratchPool.Get().(*scratch); ok {
		return r
	}
	return &scratch{}
}

// putScratch returns r to the pool for reuse by a later attempt. It first clears the slices, so
// that the pool keeps no references to nodes and statuses.
func (p *Profile) putScratch(r *scratch) {
	clear(r.fit)
	clear(r.preemptable)
	clear(r.refusals)
	r.active, r.fit, r.preemptable, r.refusals = r.active[:0], r.fit[:0], r.preemptable[:0], r.refusals[:0]
	p.scratchPool.Put(r)
}

// zeroed returns a slice of n zeros. It reuses the given slice if it is large enough.
func zeroed(list []int64, n int) []int64 {
	if cap(list) < n {
		return make([]int64, n)
	}
	list = list[:n]
	clear(list)
	return list
}
