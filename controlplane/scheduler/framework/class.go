package framework

import (
	"hash/maphash"
	"maps"
	"math/bits"
	"slices"

	v1 "k8s.io/api/core/v1"
)

// podClass is a set of pods on nodes with the same namespace and the same labels, all terminating
// or all not terminating. A label selector of an affinity term or spread constraint matches either
// all or none of them. Lookups iterate over classes, of which there are usually as many as pod
// templates. A pod of an existing class is not matched against any selector.
type podClass struct {
	podSubject
	hash    uint64
	pods    int
	perNode sparseCounts // number of pods by node slot
	sets    []*PodSet    // the sets that contain these pods
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

// classOf returns the podClass of a pod: the set of all pods in the Index with the same namespace
// and labels that are terminating like this pod, or not terminating like it. It creates the class
// if necessary, and determines the PodSets that contain it.
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

// hashLabels returns a hash of the labels and of whether the pod is terminating. It does not depend
// on the order of the labels.
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

// eachClass calls f for each podClass in the namespaces that the Peers select. It does not check
// their label selector.
func (x *Index) eachClass(p *Peers, f func(*podClass)) {
	each := func(ns map[uint64][]*podClass) {
		for _, same := range ns {
			for _, c := range same {
				f(c)
			}
		}
	}
	if !p.BySelector() {
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
