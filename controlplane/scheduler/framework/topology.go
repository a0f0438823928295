package framework

import (
	v1 "k8s.io/api/core/v1"
)

// Domain identifies a topology domain: the set of nodes with the same value of a topology key. It
// is a number that the Index assigns to the value. After the last node with the value is removed,
// the number may be assigned to another value.
type Domain int32

// NoDomain is the Domain of a node that does not have the topology key as a label.
const NoDomain Domain = 0

// topologyValues assigns a Domain, which is a small number, to each value of one topology key. Pods
// per domain can therefore be counted in slices instead of maps.
type topologyValues struct {
	key   string
	of    []Domain // domain of each node, indexed by NodeInfo.slot
	ids   map[string]Domain
	nodes []int32 // number of nodes in each domain, indexed by Domain
	free  []Domain
	users int // number of Topology and TermCount objects that refer to this object

	marks []uint32 // indexed by Domain: the value of mark when Distinct last counted the domain
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

// growTo returns the slice, extended with zero values if necessary, so that list[index] exists.
func growTo[T any](list []T, index int32) []T {
	if more := int(index) + 1 - len(list); more > 0 {
		return append(list, make([]T, more)...)
	}
	return list
}

// valuesOf returns the topologyValues of the topology key and increments the number of its users.
// The caller must call releaseValues when it no longer uses the result.
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

// NodeSelection selects nodes by a function, for example the nodes on which a topology spread
// constraint counts pods.
type NodeSelection struct {
	ID  string // equal for all NodeSelections that select the same nodes
	Has func(n *v1.Node) bool
}

// EveryNode is the NodeSelection that selects all nodes.
var EveryNode = NodeSelection{Has: func(*v1.Node) bool { return true }}

// Topology contains the domains of one topology key, and the nodes in them that the field choice
// selects. The other nodes are excluded.
type Topology struct {
	values  *topologyValues
	choice  NodeSelection
	in      []bool  // indexed by NodeInfo.slot: the node is selected by choice and has the topology key
	size    []int32 // number of selected nodes in each domain, indexed by Domain
	domains int     // number of domains with at least one selected node
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

func (x *Index) topologyFor(key string, choice NodeSelection) *Topology {
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

// Domains returns the number of pods of the PodSet s in each domain of the topology key. Only pods
// on the nodes that choice selects are counted. The result is cached and updated when pods or nodes
// change.
func (x *Index) Domains(s *PodSet, key string, choice NodeSelection) *Domains {
	t := x.topologyFor(key, choice)
	d := s.domains[t]
	if d == nil {
		d = &Domains{topology: t, times: make(map[int]int)}
		s.perNode.forEach(func(slot int32, n int) { d.addPods(slot, n) })
		s.domains[t] = d
	}
	return d
}

// Domains contains the number of pods of a PodSet in each topology domain, counting only pods on
// the selected nodes of the Topology. It also maintains the lowest number, so that Least need not
// compare all domains.
type Domains struct {
	topology *Topology
	pods     sparseCounts // number of pods in each domain, indexed by Domain
	times    map[int]int  // number of domains that have a given number of pods, by that number; 0 is not included
	least    int          // lowest key of times
	all      int
}

// addPods adds delta to the number of pods in the domain of the node with the given NodeInfo.slot.
// It does nothing if Counts is false for that node.
func (d *Domains) addPods(slot int32, delta int) {
	if !d.topology.hasNode(slot) || delta == 0 {
		return
	}
	now := d.pods.addTo(int32(d.topology.values.of[slot]), delta)
	was := now - delta
	d.all += delta
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

// minCount returns the lowest key of times, a map from a pod count to the number of domains with
// that count. One domain with the pod count excluded is ignored. It returns 0 if no other domain
// exists.
func minCount(times map[int]int, excluded int) int {
	least := 0
	for n, domains := range times {
		if n == excluded {
			domains--
		}
		if domains > 0 && (least == 0 || n < least) {
			least = n
		}
	}
	return least
}

// At returns the topology domain of the node, even if Counts is false for the node. It returns
// NoDomain if the node does not have the topology key.
func (d *Domains) At(n *NodeInfo) Domain { return d.topology.values.domainOf(n) }

// Counts reports whether d counts the pods on the node: the node has the topology key, and the
// NodeSelection that was passed to Index.Domains selects it.
func (d *Domains) Counts(n *NodeInfo) bool { return d.topology.hasNode(n.slot) }

// Pods returns the number of pods of the PodSet in the given topology domain. Only nodes for which
// Counts is true are included.
func (d *Domains) Pods(at Domain) int { return d.pods.value(int32(at)) }

// All returns the number of pods of the PodSet in all topology domains. Only nodes for which Counts
// is true are included.
func (d *Domains) All() int { return d.all }

// Size returns the number of topology domains that contain at least one node for which Counts is
// true.
func (d *Domains) Size() int { return d.topology.domains }

// Distinct returns the number of different topology domains to which the given nodes belong. All
// nodes without the topology key together count as one domain.
func (d *Domains) Distinct(nodes []*NodeInfo) int {
	v, found := d.topology.values, 0
	if v.mark++; v.mark == 0 { // the number has overflowed: marks of earlier calls could be equal to new ones
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

// Least returns the lowest number of pods that a topology domain has. Only domains and pods on
// nodes for which Counts is true are included. It is 0 if one of these domains has no pods of the
// PodSet.
func (d *Domains) Least() int {
	if d.pods.used < d.topology.domains {
		return 0
	}
	return d.least
}

// LeastWith returns what Least would return if the given domain had count more pods (fewer if count
// is negative).
func (d *Domains) LeastWith(domain Domain, count int) int {
	if count == 0 || int(domain) >= len(d.topology.size) || d.topology.size[domain] == 0 {
		return d.Least()
	}
	have := d.Pods(domain)
	others := d.topology.domains - 1
	with := d.pods.used // number of other domains that have pods
	if have > 0 {
		with--
	}
	switch {
	case others == 0:
		return have + count
	case with < others:
		return min(0, have+count)
	}
	return min(minCount(d.times, have), have+count)
}
