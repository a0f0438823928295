package framework

import (
	v1 "k8s.io/api/core/v1"
)

// Domain identifies a topology domain: the nodes with the same value of a topology key. It is a
// number that the Index assigns to the value. The number is reused after the last node with the
// value is removed.
type Domain int32

// NoDomain is the Domain of nodes that do not have the topology key.
const NoDomain Domain = 0

// topologyValues assigns Domains to the values of one topology key, so that lookups and counts by
// domain need no map.
type topologyValues struct {
	key   string
	of    []Domain // by node slot
	ids   map[string]Domain
	nodes []int32 // by domain: number of nodes
	free  []Domain
	users int // number of Topology and Carried objects that use this key

	marks []uint32 // by domain: the value of mark in the last call of Distinct that counted the domain
	mark  uint32
}

func (v *topologyValues) addNode(n *NodeInfo) {
	value, ok := n.Node.Labels[v.key]
	if !ok {
		return
	}
	id := v.ids[value]
	if id == NoDomain {
		if last := len(v.free) - 1; last >= 0 {
			id, v.free = v.free[last], v.free[:last]
		} else {
			id = Domain(len(v.nodes))
			v.nodes, v.marks = append(v.nodes, 0), append(v.marks, 0)
		}
		v.ids[value] = id
	}
	v.nodes[id]++
	v.of = growTo(v.of, n.slot)
	v.of[n.slot] = id
}

func (v *topologyValues) removeNode(n *NodeInfo) {
	id := v.domainOf(n)
	if id == NoDomain {
		return
	}
	v.of[n.slot] = NoDomain
	if v.nodes[id]--; v.nodes[id] == 0 {
		delete(v.ids, n.Node.Labels[v.key])
		v.free = append(v.free, id)
	}
}

func (v *topologyValues) domainOf(n *NodeInfo) Domain {
	if int(n.slot) < len(v.of) {
		return v.of[n.slot]
	}
	return NoDomain
}

// growTo returns the list, extended with zero values if necessary so that the index is valid.
func growTo[T any](list []T, index int32) []T {
	if more := int(index) + 1 - len(list); more > 0 {
		return append(list, make([]T, more)...)
	}
	return list
}

// valuesOf returns the domains of a topology key and increments their number of users.
// releaseValues undoes it.
func (x *Index) valuesOf(key string) *topologyValues {
	v := x.values[key]
	if v == nil {
		v = &topologyValues{key: key, ids: make(map[string]Domain), nodes: make([]int32, 1), marks: make([]uint32, 1)}
		for _, n := range x.nodes {
			if n != nil {
				v.addNode(n)
			}
		}
		x.values[key] = v
	}
	v.users++
	return v
}

func (x *Index) releaseValues(v *topologyValues) {
	if v.users--; v.users == 0 {
		delete(x.values, v.key)
	}
}

// Nodes is a function that selects the nodes for which a topology spread constraint counts pods.
type Nodes struct {
	ID  string // equal for functions that select the same nodes
	Has func(n *v1.Node) bool
}

// EveryNode is the Nodes that selects all nodes.
var EveryNode = Nodes{Has: func(*v1.Node) bool { return true }}

// Topology contains the topology domains of one key, restricted to the nodes that a Nodes selects.
type Topology struct {
	values  *topologyValues
	choice  Nodes
	in      []bool  // by slot: the node is selected and has the key
	size    []int32 // by domain: number of selected nodes
	domains int     // number of domains with selected nodes
	used    uint64
}

func (t *Topology) addNode(n *NodeInfo) {
	at := t.values.domainOf(n)
	if at == NoDomain || !t.choice.Has(n.Node) {
		return
	}
	t.in = growTo(t.in, n.slot)
	t.in[n.slot] = true
	t.size = growTo(t.size, int32(at))
	if t.size[at]++; t.size[at] == 1 {
		t.domains++
	}
}

func (t *Topology) removeNode(n *NodeInfo) {
	if !t.hasNode(n.slot) {
		return
	}
	t.in[n.slot] = false
	at := t.values.domainOf(n)
	if t.size[at]--; t.size[at] == 0 {
		t.domains--
	}
}

func (t *Topology) hasNode(slot int32) bool { return int(slot) < len(t.in) && t.in[slot] }

func (x *Index) topologyFor(key string, choice Nodes) *Topology {
	id := topologyID{key, choice.ID}
	t := x.topologies[id]
	if t == nil {
		if len(x.topologies) >= maxTopologies {
			x.forgetTopologies()
		}
		t = &Topology{values: x.valuesOf(key), choice: choice}
		for _, n := range x.nodes {
			if n != nil {
				t.addNode(n)
			}
		}
		x.topologies[id] = t
	}
	t.used = x.clock
	return t
}

type topologyID struct{ key, choice string }

func (x *Index) forgetTopologies() {
	for _, t := range leastRecentlyUsed(x.topologies, func(t *Topology) uint64 { return t.used }) {
		delete(x.topologies, topologyID{t.values.key, t.choice.ID})
		x.releaseValues(t.values)
		for _, s := range x.sets {
			delete(s.domains, t)
		}
	}
}

// Domains returns the counts of the pods in the set per domain of the topology key, on the nodes
// that choice selects.
func (x *Index) Domains(s *PodSet, key string, choice Nodes) *Domains {
	t := x.topologyFor(key, choice)
	d := s.domains[t]
	if d == nil {
		d = &Domains{topology: t, times: make(map[int]int)}
		s.perNode.forEach(func(slot int32, n int) { d.addPods(slot, n) })
		s.domains[t] = d
	}
	return d
}

// Domains counts the pods of a PodSet per topology domain. It also maintains the lowest count, so
// that Least needs no scan.
type Domains struct {
	topology *Topology
	pods     sparseCounts // by domain
	times    map[int]int  // number of domains by pod count; domains without pods are not included
	least    int          // lowest key of times
	all      int
}

// addPods adds by to the count of the domain of the node in the slot, if the node is selected.
func (d *Domains) addPods(slot int32, by int) {
	if !d.topology.hasNode(slot) || by == 0 {
		return
	}
	now := d.pods.addTo(int32(d.topology.values.of[slot]), by)
	was := now - by
	d.all += by
	if was != 0 {
		if d.times[was]--; d.times[was] == 0 {
			delete(d.times, was)
		}
	}
	if now != 0 {
		d.times[now]++
		if now < d.least || d.least == 0 {
			d.least = now
		}
	}
	if _, ok := d.times[d.least]; !ok {
		d.least = minCount(d.times, 0)
	}
}

// minCount returns the lowest pod count of any domain, where times maps pod counts to numbers of
// domains. One domain with the count without is left out. It returns 0 if no domain is left.
func minCount(times map[int]int, without int) int {
	least := 0
	for n, domains := range times {
		if n == without {
			domains--
		}
		if domains > 0 && (least == 0 || n < least) {
			least = n
		}
	}
	return least
}

// At returns the domain of the node, even if the node is not selected. It is NoDomain if the node
// does not have the topology key.
func (d *Domains) At(n *NodeInfo) Domain { return d.topology.values.domainOf(n) }

// Counts reports whether the pods on the node are counted: the node is selected and has the
// topology key.
func (d *Domains) Counts(n *NodeInfo) bool { return d.topology.hasNode(n.slot) }

// Pods returns the number of counted pods in the domain.
func (d *Domains) Pods(at Domain) int { return d.pods.value(int32(at)) }

// All returns the number of counted pods in all domains.
func (d *Domains) All() int { return d.all }

// Size returns the number of domains with at least one selected node.
func (d *Domains) Size() int { return d.topology.domains }

// Distinct returns the number of different domains among the given nodes. Nodes without the
// topology key count as one domain.
func (d *Domains) Distinct(nodes []*NodeInfo) int {
	v, found := d.topology.values, 0
	if v.mark++; v.mark == 0 { // the counter has wrapped around: old marks would be ambiguous
		clear(v.marks)
		v.mark = 1
	}
	for _, n := range nodes {
		if at := v.domainOf(n); v.marks[at] != v.mark {
			v.marks[at] = v.mark
			found++
		}
	}
	return found
}

// Least returns the pod count of the domain with the fewest pods.
func (d *Domains) Least() int {
	if d.pods.used < d.topology.domains {
		return 0
	}
	return d.least
}

// LeastWith returns the result that Least would have if the given domain held more additional pods.
func (d *Domains) LeastWith(at Domain, more int) int {
	if more == 0 || int(at) >= len(d.topology.size) || d.topology.size[at] == 0 {
		return d.Least()
	}
	have := d.Pods(at)
	others := d.topology.domains - 1
	with := d.pods.used // number of other domains with pods
	if have > 0 {
		with--
	}
	switch {
	case others == 0:
		return have + more
	case with < others:
		return min(0, have+more)
	}
	return min(minCount(d.times, have), have+more)
}
