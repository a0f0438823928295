package pod

import (
	"cmp"
	"slices"

	v1 "k8s.io/api/core/v1"
)

// hold returns the stored grant of a pod. recorded is false if none exists; then the grant equals
// the spec.
func (s *Set) hold(p *v1.Pod) (g grant, recorded bool) {
	g, recorded, err := loadGrant(s.cfg.Paths, p)
	if err != nil {
		s.cfg.Log.Error("a pod counts with what it asks for", "err", err)
	}
	return g, recorded
}

// others returns the pods except e that use resources of the node, with their grants. The lock is
// held.
func (s *Set) others(e *entry) []*v1.Pod {
	var out []*v1.Pod
	for _, o := range s.workers {
		// The resources of a pod without an object are free at once, as in the kubelet.
		if o != e && o.refused == nil && !o.vanished && o.w.holds() {
			out = append(out, o.w.holding())
		}
	}
	return out
}

// resize decides about pods with a spec that differs from the grant. Deferred resizes are tried
// again whenever anything changes. The lock is held.
func (s *Set) resize() {
	var asking []*entry
	for _, e := range s.workers {
		if e.vanished || e.refused != nil || e.pod.DeletionTimestamp != nil || !e.w.holds() {
			continue
		}
		has := e.w.granted()
		switch {
		case has.covers(e.pod):
			e.w.refuseResize(e.pod, "", "") // no resize is pending
		case e.pod.Generation >= has.Generation: // a checkpoint may be older than the grant
			asking = append(asking, e)
		}
	}
	// If not all fit, higher priority comes first, as in Kubernetes.
	slices.SortStableFunc(asking, func(a, b *entry) int {
		return cmp.Or(cmp.Compare(priorityOf(b.pod), priorityOf(a.pod)), cmp.Compare(classRank(a.pod), classRank(b.pod)),
			a.pod.CreationTimestamp.Compare(b.pod.CreationTimestamp.Time))
	})
	for _, e := range asking {
		reason, message := "", ""
		if s.cfg.Node != nil {
			reason, message = Grant(e.pod, e.w.granted().of(e.pod), s.others(e), s.cfg.unmanaged(s.cfg.Node()))
		}
		if reason != "" {
			e.w.refuseResize(e.pod, reason, message)
			continue
		}
		e.w.give(e.pod)
	}
}

func priorityOf(p *v1.Pod) int32 {
	if p.Spec.Priority == nil {
		return 0
	}
	return *p.Spec.Priority
}

// classRank returns the order in which pods of a QoS class are resized.
func classRank(p *v1.Pod) int {
	return slices.Index([]v1.PodQOSClass{v1.PodQOSGuaranteed, v1.PodQOSBurstable, v1.PodQOSBestEffort}, QOS(p))
}
