package framework

import "slices"

// scratch holds temporary lists of one scheduling attempt. Later attempts reuse them to avoid
// allocations.
type scratch struct {
	active       []Filter
	fit, mend    []*NodeInfo
	totals, part []int64
	refusals     []refusals
}

// refusals counts the nodes that a plugin refused with the same *Status. A plugin that refuses many
// nodes for one reason returns the same pointer.
type refusals struct {
	status *Status
	plugin string
	nodes  int
}

// maxRefusals is how many different statuses are counted in a scratch. The nodes of further ones
// are added to the FitError at once.
const maxRefusals = 8

// addRefusal records that a plugin refused a node with status s. The reasons are added to why
// later, and only if no node fits, unless there are more than maxRefusals different statuses.
func (r *scratch) addRefusal(s *Status, plugin string, n *NodeInfo, why *FitError) {
	if s.Is(Unschedulable) {
		r.mend = append(r.mend, n)
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

// explainRefusals adds the recorded refusals to the FitError.
func (r *scratch) explainRefusals(why *FitError) {
	for _, x := range r.refusals {
		why.addRefusal(x.status, x.plugin, x.nodes)
	}
	why.Mendable = slices.Clone(r.mend)
}

func (p *Profile) getScratch() *scratch {
	if r, ok := p.scratchPool.Get().(*scratch); ok {
		return r
	}
	return &scratch{}
}

// putScratch returns the lists to the pool, after it has removed their references to nodes and
// statuses.
func (p *Profile) putScratch(r *scratch) {
	clear(r.fit)
	clear(r.mend)
	clear(r.refusals)
	r.active, r.fit, r.mend, r.refusals = r.active[:0], r.fit[:0], r.mend[:0], r.refusals[:0]
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
