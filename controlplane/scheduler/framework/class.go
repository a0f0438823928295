package framework

import (
	"hash/maphash"
	"maps"
	"math/bits"
	"slices"

	v1 "k8s.io/api/core/v1"
)

// podClass is the set of all pods on nodes that have the same namespace and labels; either all or
// none of them are terminating. A label selector of an affinity term or spread constraint matches
// all or none of them. The Index matches selectors against classes and not against pods: usually
// there are only as many classes as pod templates.
type podClass struct {
	podSubject
	hash    uint64
	pods    int
	perNode sparseCounts // number of the class's pods on each node, indexed by NodeInfo.slot
	sets    []*PodSet    // the PodSets that include the pods of this class
}

func (c *podClass) addPods(x *Index, slot int32, by int) {
	c.pods += by
	c.perNode.addTo(slot, by)
	for _, s := range c.sets {
		s.addPods(slot, by)
	}
	if c.pods == 0 {
		x.removeClass(c)
	}
}

// classOf returns the podClass of a pod: the set of all pods in the Index that have the same
// namespace, labels and deletion state (terminating or not). If the class does not exist, it is
// created, and the PodSets that include its pods are determined.
func (x *Index) classOf(pod *v1.Pod) *podClass {
	s := podSubject{pod.Namespace, pod.Labels, pod.DeletionTimestamp != nil}
	hash := x.hashLabels(&s)
	ns := x.classes[s.namespace]
	for _, c := range ns[hash] {
		if c.terminating == s.terminating && maps.Equal(c.labels, s.labels) {
			return c
		}
	}
	if ns == nil {
		ns = make(map[uint64][]*podClass)
		x.classes[s.namespace] = ns
	}
	c := &podClass{podSubject: s, hash: hash}
	x.setIndex.forEachMatch(&s, x.namespaces, func(set *PodSet) {
		if set.matchesAll(&s, x.namespaces) {
			c.sets = append(c.sets, set)
		}
	})
	ns[hash] = append(ns[hash], c)
	return c
}

func (x *Index) removeClass(c *podClass) {
	ns := x.classes[c.namespace]
	if same := slices.DeleteFunc(ns[c.hash], func(other *podClass) bool { return other == c }); len(same) > 0 {
		ns[c.hash] = same
		return
	}
	if delete(ns, c.hash); len(ns) == 0 {
		delete(x.classes, c.namespace)
	}
}

// hashLabels returns a hash of the pod's labels and of whether the pod is terminating. It does not
// depend on the order of the labels.
func (x *Index) hashLabels(s *podSubject) uint64 {
	sum := uint64(len(s.labels))
	for k, v := range s.labels {
		sum += maphash.String(x.seed, k) ^ bits.RotateLeft64(maphash.String(x.seed, v), 17)
	}
	if s.terminating {
		sum = ^sum
	}
	return sum
}

// eachClass calls f for each podClass (a set of pods with the same namespace and labels) in the
// namespaces that p selects. It ignores the label selector of p, which the caller must match
// itself.
func (x *Index) eachClass(p *PodSelector, f func(*podClass)) {
	each := func(ns map[uint64][]*podClass) {
		for _, same := range ns {
			for _, c := range same {
				f(c)
			}
		}
	}
	if !p.HasNamespaceSelector() {
		for _, ns := range p.namespaces {
			each(x.classes[ns])
		}
		return
	}
	for ns, classes := range x.classes {
		if p.HasNamespace(ns, x.namespaces[ns]) {
			each(classes)
		}
	}
}
