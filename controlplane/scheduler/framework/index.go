package framework

import (
	"hash/maphash"
	"maps"
	"slices"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
)

// Maximum numbers of PodSets and Topologies that an Index caches. When a limit is reached, the
// least recently used quarter is dropped.
const (
	maxSets       = 4096
	maxTopologies = 512
)

// Index counts the pods of a snapshot for rules about other pods. It counts, per node, the pods
// that rules select (PodSet), and, per topology domain, the pods with the same affinity term
// (Carried). It is updated node by node, so the cost of a change does not depend on the size of the
// cluster. Only the goroutine that owns the snapshot may use it.
type Index struct {
	namespaces Namespaces                        // replaced, never modified
	nodes      []*NodeInfo                       // by slot; slot 0 is unused
	free       []int32                           // free slots
	classes    map[string]map[uint64][]*podClass // by namespace and hash of the labels
	seed       maphash.Seed

	sets       map[string]*PodSet
	setIndex   peerIndex[*PodSet]
	values     map[string]*topologyValues // by topology key
	topologies map[topologyID]*Topology
	perNode    map[string]*PerNode
	clock      uint64

	claims  map[claimID]int // number of pods that use a claim
	carried map[carriedID]*Carried
	avoided peerIndex[*Carried]
	weighed peerIndex[*Carried]
}

// NewIndex returns an empty index.
func NewIndex() *Index {
	x := &Index{
		nodes: make([]*NodeInfo, 1), classes: make(map[string]map[uint64][]*podClass), seed: maphash.MakeSeed(),
		sets: make(map[string]*PodSet), values: make(map[string]*topologyValues), topologies: make(map[topologyID]*Topology),
		carried: make(map[carriedID]*Carried), claims: make(map[claimID]int), perNode: make(map[string]*PerNode),
	}
	x.setIndex = newPeerIndex(func(s *PodSet) *Peers { return s.peers[0] })
	x.avoided = newPeerIndex(func(c *Carried) *Peers { return c.term.Peers })
	x.weighed = newPeerIndex(func(c *Carried) *Peers { return c.term.Peers })
	return x
}

// SetNamespaces sets the labels of all namespaces. It drops the PodSets with a namespace selector
// that now selects other namespaces.
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
	x.evictSets(other)
}

// Namespaces returns the labels of all namespaces.
func (x *Index) Namespaces() Namespaces { return x.namespaces }

// Replace replaces the state of one node in the index. old is nil if the node is added, and now is
// nil if it is removed.
func (x *Index) Replace(old, now *NodeInfo) {
	switch {
	case old == nil && now == nil:
	case old == nil || now == nil || !sameTopology(old.Node, now.Node):
		if old != nil {
			for _, pod := range old.Pods {
				x.countPod(pod, old, -1)
			}
			x.removeNode(old)
		}
		if now != nil {
			x.addNode(now)
			for _, pod := range now.Pods {
				x.countPod(pod, now, 1)
			}
		}
	default:
		now.slot = old.slot
		x.nodes[now.slot] = now
		gone, came := podDifference(old.Pods, now.Pods)
		for _, pod := range gone {
			x.countPod(pod, now, -1)
		}
		for _, pod := range came {
			x.countPod(pod, now, 1)
		}
	}
}

// sameTopology reports whether two states of a node have the same name, labels, taints and
// unschedulable flag. The node then remains in the same topology domains of the Index.
func sameTopology(a, b *v1.Node) bool {
	return a == b || a.Name == b.Name && maps.Equal(a.Labels, b.Labels) &&
		a.Spec.Unschedulable == b.Spec.Unschedulable && equality.Semantic.DeepEqual(a.Spec.Taints, b.Spec.Taints)
}

// podDifference returns the pods that are only in old (gone) and only in now (came). It is fast if
// most positions of the lists hold the same pod.
func podDifference(old, now []*PodInfo) (gone, came []*PodInfo) {
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
		for _, pod := range list {
			m[pod] = true
		}
		return m
	}
	was, is := stayed(gone), stayed(came)
	gone = slices.DeleteFunc(gone, func(pod *PodInfo) bool { return is[pod] })
	came = slices.DeleteFunc(came, func(pod *PodInfo) bool { return was[pod] })
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
		v.addNode(n)
	}
	for _, t := range x.topologies {
		t.addNode(n)
	}
}

// removeNode removes a node from the index. The pods of the node must have been removed from the
// counts before.
func (x *Index) removeNode(n *NodeInfo) {
	for _, t := range x.topologies {
		t.removeNode(n)
	}
	for _, v := range x.values {
		v.removeNode(n)
	}
	for _, p := range x.perNode {
		p.clearSlot(n.slot)
	}
	x.nodes[n.slot] = nil
	x.free = append(x.free, n.slot)
}

// countPod adds a pod on a node to the counts if by is 1, and removes it if by is -1.
func (x *Index) countPod(pod *PodInfo, n *NodeInfo, by int) {
	x.classOf(pod.Pod).addPods(x, n.slot, by)
	for i, name := range pod.Claims {
		if slices.Contains(pod.Claims[:i], name) {
			continue // two volumes use the same claim
		}
		id := claimID{pod.Pod.Namespace, name}
		if x.claims[id] += by; x.claims[id] == 0 {
			delete(x.claims, id)
		}
	}
	a := pod.Affinity
	if a == nil {
		return
	}
	for _, t := range a.Avoided {
		x.countTerm(t, carriesAvoided, n, by)
	}
	for _, t := range a.Preferred {
		x.countTerm(t, carriesPreferred, n, by)
	}
	for _, t := range a.Required {
		x.countTerm(t, carriesRequired, n, by)
	}
}

type claimID struct{ namespace, name string }

// ClaimUsers returns how many pods on nodes use the PersistentVolumeClaim.
func (x *Index) ClaimUsers(namespace, name string) int { return x.claims[claimID{namespace, name}] }

// PodSet counts, per node, the pods that match all of its Peers.
type PodSet struct {
	id      string
	peers   []*Peers
	perNode sparseCounts // by node slot
	domains map[*Topology]*Domains
	used    uint64
	gone    bool // dropped from the index
}

func (s *PodSet) matchesAll(p *podSubject, namespaces Namespaces) bool {
	for _, peers := range s.peers {
		if !peers.matches(p, namespaces) {
			return false
		}
	}
	return true
}

// OnNode returns how many pods of the set are on the node.
func (s *PodSet) OnNode(n *NodeInfo) int { return s.perNode.value(n.slot) }

func (s *PodSet) addPods(slot int32, by int) {
	s.perNode.addTo(slot, by)
	for _, d := range s.domains {
		d.addPods(slot, by)
	}
}

// Set returns the PodSet of the pods that match all of the given Peers. It is created and counted
// if the index does not have it.
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
		x.evictSets(leastRecentlyUsed(x.sets, func(s *PodSet) uint64 { return s.used }))
	}
	s := &PodSet{id: id, peers: peers, domains: make(map[*Topology]*Domains), used: x.clock}
	x.eachClass(peers[0], func(c *podClass) {
		if s.matchesAll(&c.podSubject, x.namespaces) {
			c.sets = append(c.sets, s)
			c.perNode.forEach(func(slot int32, n int) { s.perNode.addTo(slot, n) })
		}
	})
	x.sets[id] = s
	x.setIndex.addItem(s)
	return s
}

// evictSets removes PodSets from the index.
func (x *Index) evictSets(list []*PodSet) {
	if len(list) == 0 {
		return
	}
	for _, s := range list {
		s.gone = true
		delete(x.sets, s.id)
		x.setIndex.removeItem(s)
	}
	for _, ns := range x.classes {
		for _, same := range ns {
			for _, c := range same {
				c.sets = slices.DeleteFunc(c.sets, func(s *PodSet) bool { return s.gone })
			}
		}
	}
}

// leastRecentlyUsed returns the quarter of the map's values with the lowest result of used, which
// is the time of the last use.
func leastRecentlyUsed[K comparable, T any](m map[K]T, used func(T) uint64) []T {
	list := slices.SortedFunc(maps.Values(m), func(a, b T) int { return int(int64(used(a) - used(b))) })
	return list[:(len(list)+3)/4]
}

type carriedID struct {
	peers, key string
	how        carries
	weight     int64
}

// carries is the kind of an affinity term: required anti-affinity, preferred, or required affinity.
type carries uint8

const (
	carriesAvoided carries = iota
	carriesPreferred
	carriesRequired
)

// Carried counts the pods on nodes with the same affinity term, per domain of the term's topology
// key.
type Carried struct {
	term   Term
	id     carriedID
	values *topologyValues
	pods   sparseCounts // by domain
	all    int          // including pods on nodes without the key
}

// Term returns the affinity term that the counted pods have.
func (c *Carried) Term() Term { return c.term }

// Weight returns the weight of a preferred term. For a required affinity term, which has no weight
// of its own, it returns hard.
func (c *Carried) Weight(hard int64) int64 {
	if c.id.how == carriesRequired {
		return hard
	}
	return c.term.Weight
}

// At returns the domain of the node for the term's topology key; NoDomain if the node does not have
// the key.
func (c *Carried) At(n *NodeInfo) Domain { return c.values.domainOf(n) }

// Pods returns how many pods on the nodes of a domain have the term.
func (c *Carried) Pods(at Domain) int { return c.pods.value(int32(at)) }

// Any reports whether a pod on any node with the topology key has the term.
func (c *Carried) Any() bool { return c.pods.used > 0 }

func (x *Index) countTerm(t Term, how carries, n *NodeInfo, by int) {
	id := carriedID{t.ID, t.Key, how, t.Weight}
	index := &x.weighed
	if how == carriesAvoided {
		index = &x.avoided
	}
	c := x.carried[id]
	if c == nil {
		c = &Carried{term: t, id: id, values: x.valuesOf(t.Key)}
		x.carried[id] = c
		index.addItem(c)
	}
	c.all += by
	if at := c.values.domainOf(n); at != NoDomain {
		c.pods.addTo(int32(at), by)
	}
	if c.all == 0 {
		delete(x.carried, id)
		index.removeItem(c)
		x.releaseValues(c.values)
	}
}

// Avoiding returns the required anti-affinity terms of pods on nodes that select the given pod.
// They forbid the pod in their domains.
func (x *Index) Avoiding(pod *v1.Pod) []*Carried { return termsMatching(&x.avoided, pod, x.namespaces) }

// Weighing returns the preferred terms and required affinity terms of pods on nodes that select the
// given pod. They contribute to its scores.
func (x *Index) Weighing(pod *v1.Pod) []*Carried { return termsMatching(&x.weighed, pod, x.namespaces) }

func termsMatching(index *peerIndex[*Carried], pod *v1.Pod, namespaces Namespaces) []*Carried {
	var out []*Carried
	index.forEachMatch(subjectOf(pod), namespaces, func(c *Carried) {
		if c.Any() {
			out = append(out, c)
		}
	})
	return out
}
