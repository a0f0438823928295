package framework

import (
	"hash/maphash"
	"maps"
	"slices"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
)

// What an index remembers of questions asked. Beyond that it forgets those not asked for longest.
const (
	maxSets       = 4096
	maxTopologies = 512
)

// Index counts the pods of a snapshot: by what rules are about (a PodSet for each Peers asked for) and by the terms
// that pods carry. It follows the snapshot node by node, so that a change costs what it touches, and not a look at
// the whole cluster. It belongs to the goroutine that owns the snapshot.
type Index struct {
	namespaces Namespaces                        // replaced, never changed
	nodes      []*NodeInfo                       // by slot; the first is nobody's
	free       []int32                           // slots
	classes    map[string]map[uint64][]*podClass // by namespace and hash of the labels
	seed       maphash.Seed

	sets       map[string]*PodSet
	setIndex   peerIndex[*PodSet]
	values     map[string]*values // by topology key
	topologies map[topologyID]*Topology
	perNode    map[string]*PerNode
	clock      uint64

	claims  map[claimID]int // pods that use a claim
	carried map[carriedID]*Carried
	avoided peerIndex[*Carried]
	weighed peerIndex[*Carried]
}

// NewIndex is an index of nothing.
func NewIndex() *Index {
	x := &Index{
		nodes: make([]*NodeInfo, 1), classes: make(map[string]map[uint64][]*podClass), seed: maphash.MakeSeed(),
		sets: make(map[string]*PodSet), values: make(map[string]*values), topologies: make(map[topologyID]*Topology),
		carried: make(map[carriedID]*Carried), claims: make(map[claimID]int), perNode: make(map[string]*PerNode),
	}
	x.setIndex = newPeerIndex(func(s *PodSet) *Peers { return s.peers[0] })
	x.avoided = newPeerIndex(func(c *Carried) *Peers { return c.term.Peers })
	x.weighed = newPeerIndex(func(c *Carried) *Peers { return c.term.Peers })
	return x
}

// SetNamespaces takes the labels of all namespaces. Sets that thereby mean other pods are forgotten.
func (x *Index) SetNamespaces(now Namespaces) {
	was := x.namespaces
	x.namespaces = now
	var changed []string
	for name, set := range now {
		if !maps.Equal(was[name], set) {
			changed = append(changed, name)
		}
	}
	for name := range was {
		if _, ok := now[name]; !ok {
			changed = append(changed, name)
		}
	}
	var other []*PodSet
	for _, s := range x.sets {
		if slices.ContainsFunc(s.peers, func(p *Peers) bool {
			return p.BySelector() && slices.ContainsFunc(changed, func(name string) bool {
				return p.HasNamespace(name, was[name]) != p.HasNamespace(name, now[name])
			})
		}) {
			other = append(other, s)
		}
	}
	x.forget(other)
}

// Namespaces are the labels of all namespaces.
func (x *Index) Namespaces() Namespaces { return x.namespaces }

// Replace follows one node of the snapshot from one state to the next; nil is none.
func (x *Index) Replace(old, now *NodeInfo) {
	switch {
	case old == nil && now == nil:
	case old == nil || now == nil || !sameTopology(old.Node, now.Node):
		if old != nil {
			for _, p := range old.Pods {
				x.count(p, old, -1)
			}
			x.removeNode(old)
		}
		if now != nil {
			x.addNode(now)
			for _, p := range now.Pods {
				x.count(p, now, 1)
			}
		}
	default:
		now.slot = old.slot
		x.nodes[now.slot] = now
		gone, came := difference(old.Pods, now.Pods)
		for _, p := range gone {
			x.count(p, now, -1)
		}
		for _, p := range came {
			x.count(p, now, 1)
		}
	}
}

// sameTopology says whether the nodes are alike for everything that counting goes by.
func sameTopology(a, b *v1.Node) bool {
	return a == b || a.Name == b.Name && maps.Equal(a.Labels, b.Labels) &&
		a.Spec.Unschedulable == b.Spec.Unschedulable && equality.Semantic.DeepEqual(a.Spec.Taints, b.Spec.Taints)
}

// difference is what is only in one of the lists. Most places hold the same pod in both.
func difference(old, now []*PodInfo) (gone, came []*PodInfo) {
	for i := range max(len(old), len(now)) {
		switch {
		case i >= len(old):
			came = append(came, now[i])
		case i >= len(now):
			gone = append(gone, old[i])
		case old[i] != now[i]:
			gone, came = append(gone, old[i]), append(came, now[i])
		}
	}
	if len(gone) == 0 || len(came) == 0 {
		return gone, came
	}
	stayed := func(list []*PodInfo) map[*PodInfo]bool {
		m := make(map[*PodInfo]bool, len(list))
		for _, p := range list {
			m[p] = true
		}
		return m
	}
	was, is := stayed(gone), stayed(came)
	gone = slices.DeleteFunc(gone, func(p *PodInfo) bool { return is[p] })
	came = slices.DeleteFunc(came, func(p *PodInfo) bool { return was[p] })
	return gone, came
}

func (x *Index) addNode(n *NodeInfo) {
	if last := len(x.free) - 1; last >= 0 {
		n.slot, x.free = x.free[last], x.free[:last]
	} else {
		n.slot = int32(len(x.nodes))
		x.nodes = append(x.nodes, nil)
	}
	x.nodes[n.slot] = n
	for _, v := range x.values {
		v.add(n)
	}
	for _, t := range x.topologies {
		t.add(n)
	}
}

// removeNode takes away a node whose pods are not counted any more.
func (x *Index) removeNode(n *NodeInfo) {
	for _, t := range x.topologies {
		t.remove(n)
	}
	for _, v := range x.values {
		v.remove(n)
	}
	for _, p := range x.perNode {
		p.forget(n.slot)
	}
	x.nodes[n.slot] = nil
	x.free = append(x.free, n.slot)
}

// count counts a pod on the node, or, by -1, no longer.
func (x *Index) count(p *PodInfo, n *NodeInfo, by int) {
	x.classOf(p.Pod).shift(x, n.slot, by)
	for i, name := range p.Claims {
		if slices.Contains(p.Claims[:i], name) {
			continue // by two volumes
		}
		id := claimID{p.Pod.Namespace, name}
		if x.claims[id] += by; x.claims[id] == 0 {
			delete(x.claims, id)
		}
	}
	a := p.Affinity
	if a == nil {
		return
	}
	for _, t := range a.Avoided {
		x.carry(t, carriesAvoided, n, by)
	}
	for _, t := range a.Preferred {
		x.carry(t, carriesPreferred, n, by)
	}
	for _, t := range a.Required {
		x.carry(t, carriesRequired, n, by)
	}
}

type claimID struct{ namespace, name string }

// ClaimUsers is how many pods use the claim.
func (x *Index) ClaimUsers(namespace, name string) int { return x.claims[claimID{namespace, name}] }

// PodSet counts the pods that all of some Peers mean, per node.
type PodSet struct {
	id      string
	peers   []*Peers
	perNode counts // by slot
	domains map[*Topology]*Domains
	used    uint64
	gone    bool // forgotten
}

func (s *PodSet) has(p *subject, namespaces Namespaces) bool {
	for _, peers := range s.peers {
		if !peers.means(p, namespaces) {
			return false
		}
	}
	return true
}

// OnNode is how many of the pods are on the node.
func (s *PodSet) OnNode(n *NodeInfo) int { return s.perNode.get(n.slot) }

func (s *PodSet) shift(slot int32, by int) {
	s.perNode.add(slot, by)
	for _, d := range s.domains {
		d.shift(slot, by)
	}
}

// Set is the set of the pods that every one of the Peers means.
func (x *Index) Set(peers ...*Peers) *PodSet {
	id := peers[0].ID
	for _, p := range peers[1:] {
		id += "\x03" + p.ID
	}
	x.clock++
	if s := x.sets[id]; s != nil {
		s.used = x.clock
		return s
	}
	if len(x.sets) >= maxSets {
		x.forget(oldest(x.sets, func(s *PodSet) uint64 { return s.used }))
	}
	s := &PodSet{id: id, peers: peers, domains: make(map[*Topology]*Domains), used: x.clock}
	x.eachClass(peers[0], func(c *podClass) {
		if s.has(&c.subject, x.namespaces) {
			c.sets = append(c.sets, s)
			c.perNode.each(func(slot int32, n int) { s.perNode.add(slot, n) })
		}
	})
	x.sets[id] = s
	x.setIndex.add(s)
	return s
}

// forget gives up sets.
func (x *Index) forget(list []*PodSet) {
	if len(list) == 0 {
		return
	}
	for _, s := range list {
		s.gone = true
		delete(x.sets, s.id)
		x.setIndex.remove(s)
	}
	for _, ns := range x.classes {
		for _, same := range ns {
			for _, c := range same {
				c.sets = slices.DeleteFunc(c.sets, func(s *PodSet) bool { return s.gone })
			}
		}
	}
}

// oldest is the quarter of the entries that was not used for longest.
func oldest[K comparable, T any](m map[K]T, used func(T) uint64) []T {
	list := slices.SortedFunc(maps.Values(m), func(a, b T) int { return int(int64(used(a) - used(b))) })
	return list[:(len(list)+3)/4]
}

type carriedID struct {
	peers, key string
	how        carries
	weight     int64
}

// carries says what a term is to the pods that carry it.
type carries uint8

const (
	carriesAvoided carries = iota
	carriesPreferred
	carriesRequired
)

// Carried counts the pods that carry one same term, per domain of its topology key.
type Carried struct {
	term   Term
	id     carriedID
	values *values
	pods   counts // by domain
	all    int    // also those on nodes without the key
}

// Term is the term that is carried.
func (c *Carried) Term() Term { return c.term }

// Weight is that of a preferred term, and hard that of a required one, which has none of its own.
func (c *Carried) Weight(hard int64) int64 {
	if c.id.how == carriesRequired {
		return hard
	}
	return c.term.Weight
}

// At is the domain of the node by the term's topology key.
func (c *Carried) At(n *NodeInfo) Domain { return c.values.at(n) }

// Pods is how many pods in the domain carry the term.
func (c *Carried) Pods(at Domain) int { return c.pods.get(int32(at)) }

// Any says whether a pod in any domain carries the term.
func (c *Carried) Any() bool { return c.pods.used > 0 }

func (x *Index) carry(t Term, how carries, n *NodeInfo, by int) {
	id := carriedID{t.ID, t.Key, how, t.Weight}
	index := &x.weighed
	if how == carriesAvoided {
		index = &x.avoided
	}
	c := x.carried[id]
	if c == nil {
		c = &Carried{term: t, id: id, values: x.valuesOf(t.Key)}
		x.carried[id] = c
		index.add(c)
	}
	c.all += by
	if at := c.values.at(n); at != NoDomain {
		c.pods.add(int32(at), by)
	}
	if c.all == 0 {
		delete(x.carried, id)
		index.remove(c)
		x.release(c.values)
	}
}

// Avoiding are the terms by which pods on nodes refuse to have this pod in their domain.
func (x *Index) Avoiding(p *v1.Pod) []*Carried { return meaning(&x.avoided, p, x.namespaces) }

// Weighing are the terms by which pods on nodes like or dislike to have this pod in their domain.
func (x *Index) Weighing(p *v1.Pod) []*Carried { return meaning(&x.weighed, p, x.namespaces) }

func meaning(index *peerIndex[*Carried], p *v1.Pod, namespaces Namespaces) []*Carried {
	var out []*Carried
	index.each(subjectOf(p), namespaces, func(c *Carried) {
		if c.Any() {
			out = append(out, c)
		}
	})
	return out
}
