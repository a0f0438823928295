package pod

import (
	"cmp"
	"slices"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/agent/pod/admission"
	"keelson.dev/keelson/agent/pod/lifecycle"
	"keelson.dev/keelson/agent/pod/podfiles"
)

// loadPodGrant returns the stored grant of a pod. recorded is false if no grant is stored; then the
// result equals the spec.
func (s *Set) loadPodGrant(pod *v1.Pod) (granted lifecycle.ResourceGrant, recorded bool) {
	granted, recorded, err := podfiles.LoadGrant(s.cfg.Paths, pod)
	if err != nil {
		s.cfg.Log.Error("cannot read the granted resources of a pod: the resources in its spec count", "err", err)
	}
	return granted, recorded
}

// otherPods returns the pods of the node, except pod, that use its resources. Their specs contain
// the granted resources. The lock is held.
func (s *Set) otherPods(pod *podEntry) []*v1.Pod {
	var out []*v1.Pod
	for _, o := range s.workers {
		// The resources of a pod without an object are free at once, as in the kubelet.
		if o != pod && o.rejection == nil && !o.vanished && o.worker.usesNodeResources() {
			out = append(out, o.worker.resizer.admissionPod())
		}
	}
	return out
}

// decideResizes grants or defers the resources of each pod with a spec that differs from its grant.
// It decides about deferred resizes again whenever it is called. The lock is held.
func (s *Set) decideResizes() {
	var candidates []*podEntry
	for _, e := range s.workers {
		if e.vanished || e.rejection != nil || e.pod.DeletionTimestamp != nil || !e.worker.usesNodeResources() {
			continue
		}
		granted := e.worker.resizer.currentGrant()
		switch {
		case granted.CoversSpec(e.pod):
			e.worker.resizer.setPendingResize(e.pod, "", "") // no resize is pending
		case e.pod.Generation >= granted.Generation: // a checkpoint may be older than the grant
			candidates = append(candidates, e)
		}
	}
	// If not all fit, higher priority comes first, as in Kubernetes.
	slices.SortStableFunc(candidates, func(a, b *podEntry) int {
		return cmp.Or(cmp.Compare(podPriority(b.pod), podPriority(a.pod)), cmp.Compare(qosRank(a.pod), qosRank(b.pod)),
			a.pod.CreationTimestamp.Compare(b.pod.CreationTimestamp.Time))
	})
	for _, e := range candidates {
		reason, message := "", ""
		if s.cfg.Node != nil {
			reason, message = admission.CheckResize(e.pod, e.worker.resizer.currentGrant().ApplyTo(e.pod),
				s.otherPods(e), s.cfg.withoutPluginResources(s.cfg.Node()))
		}
		if reason != "" {
			e.worker.resizer.setPendingResize(e.pod, reason, message)
			continue
		}
		e.worker.resizer.acceptResize(e.pod)
	}
}

func podPriority(pod *v1.Pod) int32 {
	if pod.Spec.Priority == nil {
		return 0
	}
	return *pod.Spec.Priority
}

// qosRank returns the rank of a pod by its QoS class. Resizes of pods with a lower rank are decided
// first.
func qosRank(pod *v1.Pod) int {
	return slices.Index([]v1.PodQOSClass{v1.PodQOSGuaranteed, v1.PodQOSBurstable, v1.PodQOSBestEffort},
		lifecycle.QOS(pod))
}
