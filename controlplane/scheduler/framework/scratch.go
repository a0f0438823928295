package framework

import "slices"

// scratch is what an attempt needs for its lists of nodes, kept for the attempts after it.
type scratch struct {
	active       []Filter
	fit, mend    []*NodeInfo
	totals, part []int64
	refusals     []refusals
}

// refusals are how many nodes one status was said of. Plugins that say the same of many nodes say it with one status.
type refusals struct {
	status *Status
	plugin string
	nodes  int
}

// maxRefusals is how many different ones are counted so before each goes to the explanation at once.
const maxRefusals = 8

// addRefusal notes the refusal by a node: for the explanation, which is only wanted should no node fit.
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

// explainRefusals makes the explanation of what was refused.
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

// putScratch keeps the room, but no node and no status.
func (p *Profile) putScratch(r *scratch) {
	clear(r.fit)
	clear(r.mend)
	clear(r.refusals)
	r.active, r.fit, r.mend, r.refusals = r.active[:0], r.fit[:0], r.mend[:0], r.refusals[:0]
	p.scratchPool.Put(r)
}

// zeroed is a list of so many, in the old one's place if it is large enough.
func zeroed(list []int64, n int) []int64 {
	if cap(list) < n {
		return make([]int64, n)
	}
	list = list[:n]
	clear(list)
	return list
}
