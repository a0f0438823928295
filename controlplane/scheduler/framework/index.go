package framework

import (
	"hash/maphash"
	"maps"
	"slices"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
)

// Maximum numbers of PodSets and Topologies that an Index caches. When one of these limits is
// reached, the least recently used quarter of the cached PodSets or Topologies is removed.
const (
	maxSets       = 4096
	maxTopologies = 512
)

// Index caches pod counts of a snapshot, for inter-pod affinity and topology spread. A PodSet
// counts, per node, the pods that a rule of the pod to schedule selects. A TermCount counts, per
// topology domain, the assigned pods with the same affinity term. A change is applied to its node
// only, so its cost does not depend on the number of nodes. Only the goroutine that owns the
// snapshot may use the Index.
type Index struct {
	namespaces Namespaces                        // labels of all namespaces; the map itself is never modified
	nodes      []*NodeInfo                       // nodes, indexed by NodeInfo.slot; slot 0 is unused
	free       []int32                           // unused indexes of nodes
	classes    map[string]map[uint64][]*podClass // by namespace, then by the result of hashLabels
	seed       maphash.Seed

	sets       map[string]*PodSet
	setIndex   podSelectorIndex[*PodSet]
	values     map[string]*topologyValues // by topology key
	topologies map[topologyID]*Topology
	perNode    map[string]*PerNode
	clock      uint64

	claims     map[claimID]int // number of pods on nodes that use a PersistentVolumeClaim
	termCounts map[termID]*TermCount
	avoided    podSelectorIndex[*TermCount]
	weighed    podSelectorIndex[*TermCount]
}

// NewIndex returns an empty index.
func NewIndex() *Index {
	x := &Index{
		nodes: make([]*NodeInfo, 1), classes: make(map[string]map[uint64][]*podClass), seed: maphash.MakeSeed(),
		sets: make(map[string]*PodSet), values: make(map[string]*topologyValues),
		topologies: make(map[topologyID]*Topology),
		termCounts: make(map[termID]*TermCount), claims: make(map[claimID]int), perNode: make(map[string]*PerNode),
	}
	x.setIndex = newPodSelectorIndex(func(s *PodSet) *PodSelector { return s.selectors[0] })
	x.avoided = newPodSelectorIndex(func(c *TermCount) *PodSelector { return c.term.PodSelector })
	x.weighed = newPodSelectorIndex(func(c *TermCount) *PodSelector { return c.term.PodSelector })
	return x
}

// SetNamespaces sets the labels of all namespaces. It removes each PodSet that selects namespaces
// by their labels and whose selected namespaces have changed.
func (x *Index) SetNamespaces(namespaces Namespaces) {
	was := x.namespaces
	x.namespaces = namespaces
	var changed []string
	for name, set := range namespaces {
		if !maps.Equal(was[name], set) {
			changed = append(changed, name)
		}
	}
	for name := range was {
		if _, ok := namespaces[name]; !ok {
			changed = append(changed, name)
		}
	}
	var other []*PodSet
	for _, s := range x.sets {
		if slices.ContainsFunc(s.selectors, func(p *PodSelector) bool {
			return p.HasNamespaceSelector() && slices.ContainsFunc(changed, func(name string) bool {
				return p.HasNamespace(name, was[name]) != p.HasNamespace(name, namespaces[name])
			})
		}) {
			other = append(other, s)
		}
	}
	x.evictSets(other)
}

// Namespaces returns the labels of all namespaces, by namespace name.
func (x *Index) Namespaces() Namespaces { return x.namespaces }

// Replace updates the counts of the index from an old to a current version of one node and its
// pods. For an added node, old is nil. For a removed node, current is nil.
func (x *Index) Replace(old, current *NodeInfo) {
	switch {
	case old == nil && current == nil:
	case old == nil || current == nil || !sameTopology(old.Node, current.Node):
		if old != nil {
			for _, pod := range old.Pods {
				x.countPod(pod, old, -1)
			}
			x.removeNode(old)
		}
		if current != nil {
			x.addNode(current)
			for _, pod := range current.Pods {
				x.countPod(pod, current, 1)
			}
		}
	default:
		current.slot = old.slot
		x.nodes[current.slot] = current
		gone, came := podDifference(old.Pods, current.Pods)
		for _, pod := range gone {
			x.countPod(pod, current, -1)
		}
		for _, pod := range came {
			x.countPod(pod, current, 1)
		}
	}
}

// sameTopology reports whether a and b, two versions of a node, have the same name, labels, taints
// and unschedulable flag. If so, no cached property of the node changes, such as its topology
// domains.
func sameTopology(a, b *v1.Node) bool {
	return a == b || a.Name == b.Name && maps.Equal(a.Labels, b.Labels) &&
		a.Spec.Unschedulable == b.Spec.Unschedulable && equality.Semantic.DeepEqual(a.Spec.Taints, b.Spec.Taints)
}

// podDifference returns the pods that are only in the list old (removed), and those that are only
// in the list current (added). It is fast if most pods are at the same position in both lists.
func podDifference(old, current []*PodInfo) (removed, added []*PodInfo) {
	for i := range max(len(old), len(current)) {
		switch {
		case i >= len(old):
			added = append(added, current[i])
		case i >= len(current):
			removed = append(removed, old[i])
		case old[i] != current[i]:
			removed, added = append(removed, old[i]), append(added, current[i])
		}
	}
	if len(removed) == 0 || len(added) == 0 {
		return removed, added
	}
	stayed := func(list []*PodInfo) map[*PodInfo]bool {
		m := make(map[*PodInfo]bool, len(list))
		for _, pod := range list {
			m[pod] = true
		}
		return m
	}
	was, is := stayed(removed), stayed(added)
	removed = slices.DeleteFunc(removed, func(pod *PodInfo) bool { return is[pod] })
	added = slices.DeleteFunc(added, func(pod *PodInfo) bool { return was[pod] })
	return removed, added
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

// removeNode removes a node from the index. The caller must first remove the node's pods with
// countPod.
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

// countPod adds a pod on the node n to all counts of the index if delta is 1, and removes it from
// them if delta is -1.
func (x *Index) countPod(pod *PodInfo, n *NodeInfo, delta int) {
	x.classOf(pod.Pod).addPods(x, n.slot, delta)
	for i, name := range pod.Claims {
		if slices.Contains(pod.Claims[:i], name) {
			continue // two volumes use the same claim
		}
		id := claimID{pod.Pod.Namespace, name}
		if x.claims[id] += delta; x.claims[id] == 0 {
			delete(x.claims, id)
		}
	}
	a := pod.Affinity
	if a == nil {
		return
	}
	for _, t := range a.Avoided {
		x.countTerm(t, requiredAntiAffinity, n, delta)
	}
	for _, t := range a.Preferred {
		x.countTerm(t, preferredTerm, n, delta)
	}
	for _, t := range a.Required {
		x.countTerm(t, requiredAffinity, n, delta)
	}
}

type claimID struct{ namespace, name string }

// ClaimUsers returns the number of pods on nodes that use the PersistentVolumeClaim.
func (x *Index) ClaimUsers(namespace, name string) int { return x.claims[claimID{namespace, name}] }

// PodSet counts, per node, the pods that match all of its selectors. It is cached in an Index and
// updated when pods change.
type PodSet struct {
	id        string
	selectors []*PodSelector
	perNode   sparseCounts // number of matching pods on each node, indexed by NodeInfo.slot
	domains   map[*Topology]*Domains
	used      uint64
	gone      bool // the PodSet was removed from the Index
}

func (s *PodSet) matchesAll(p *podSubject, namespaces Namespaces) bool {
	for _, selector := range s.selectors {
		if !selector.matches(p, namespaces) {
			return false
		}
	}
	return true
}

// OnNode returns the number of pods on the node that match all selectors of the PodSet.
func (s *PodSet) OnNode(n *NodeInfo) int { return s.perNode.value(n.slot) }

func (s *PodSet) addPods(slot int32, by int) {
	s.perNode.addTo(slot, by)
	for _, d := range s.domains {
		d.addPods(slot, by)
	}
}

// Set returns the PodSet that counts the pods which match all of the given selectors. If the index
// has not cached this PodSet, it is created from the pods on the nodes.
func (x *Index) Set(selectors ...*PodSelector) *PodSet {
	id := selectors[0].ID
	for _, p := range selectors[1:] {
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
	s := &PodSet{id: id, selectors: selectors, domains: make(map[*Topology]*Domains), used: x.clock}
	x.eachClass(selectors[0], func(c *podClass) {
		if s.matchesAll(&c.podSubject, x.namespaces) {
			c.sets = append(c.sets, s)
			c.perNode.forEach(func(slot int32, n int) { s.perNode.addTo(slot, n) })
		}
	})
	x.sets[id] = s
	x.setIndex.addItem(s)
	return s
}

// evictSets removes the PodSets in the list from the cache of the index.
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

// leastRecentlyUsed returns the quarter of the map's values that was used least recently. lastUse
// returns the time of a value's last use, as a number that increases with time.
func leastRecentlyUsed[K comparable, T any](m map[K]T, lastUse func(T) uint64) []T {
	list := slices.SortedFunc(maps.Values(m), func(a, b T) int { return int(int64(lastUse(a) - lastUse(b))) })
	return list[:(len(list)+3)/4]
}

type termID struct {
	selector, key string
	kind          termKind
	weight        int64
}

// termKind is the kind of an affinity term of a pod: required affinity, required anti-affinity, or
// preferred. The last kind includes preferred anti-affinity.
type termKind uint8

const (
	requiredAntiAffinity termKind = iota
	preferredTerm
	requiredAffinity
)

// TermCount counts the pods on nodes that have the same affinity term. It counts them per topology
// domain, for the topology key of the term.
type TermCount struct {
	term   Term
	id     termID
	values *topologyValues
	pods   sparseCounts // number of pods that have the term, indexed by Domain
	all    int          // number of pods that have the term, including pods on nodes without the topology key
}

// Term returns the affinity term that all pods counted in c have.
func (c *TermCount) Term() Term { return c.term }

// Weight returns the weight of the affinity term in scores: the weight of a preferred term, or
// requiredWeight for a required affinity term, which has no weight of its own.
func (c *TermCount) Weight(requiredWeight int64) int64 {
	if c.id.kind == requiredAffinity {
		return requiredWeight
	}
	return c.term.Weight
}

// At returns the topology domain of the node, for the topology key of the term. It returns NoDomain
// if the node does not have the key.
func (c *TermCount) At(n *NodeInfo) Domain { return c.values.domainOf(n) }

// Pods returns the number of pods in the topology domain that have the affinity term.
func (c *TermCount) Pods(at Domain) int { return c.pods.value(int32(at)) }

// Any reports whether any pod has the affinity term and is on a node that has the term's topology
// key.
func (c *TermCount) Any() bool { return c.pods.used > 0 }

func (x *Index) countTerm(t Term, kind termKind, n *NodeInfo, by int) {
	id := termID{t.ID, t.Key, kind, t.Weight}
	index := &x.weighed
	if kind == requiredAntiAffinity {
		index = &x.avoided
	}
	c := x.termCounts[id]
	if c == nil {
		c = &TermCount{term: t, id: id, values: x.valuesOf(t.Key)}
		x.termCounts[id] = c
		index.addItem(c)
	}
	c.all += by
	if at := c.values.domainOf(n); at != NoDomain {
		c.pods.addTo(int32(at), by)
	}
	if c.all == 0 {
		delete(x.termCounts, id)
		index.removeItem(c)
		x.releaseValues(c.values)
	}
}

// AntiAffinityTerms returns the required anti-affinity terms of the pods on nodes that select the
// given pod. The given pod must not be placed in a topology domain that contains a pod with such a
// term.
func (x *Index) AntiAffinityTerms(pod *v1.Pod) []*TermCount {
	return termsMatching(&x.avoided, pod, x.namespaces)
}

// ScoringTerms returns the terms of the pods on nodes that select the given pod and affect its
// scores: the preferred terms and the required affinity terms.
func (x *Index) ScoringTerms(pod *v1.Pod) []*TermCount {
	return termsMatching(&x.weighed, pod, x.namespaces)
}

func termsMatching(index *podSelectorIndex[*TermCount], pod *v1.Pod, namespaces Namespaces) []*TermCount {
	var out []*TermCount
	index.forEachMatch(subjectOf(pod), namespaces, func(c *TermCount) {
		if c.Any() {
			out = append(out, c)
		}
	})
	return out
}
