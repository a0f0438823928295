package lifecycle

import v1 "k8s.io/api/core/v1"

// QOS returns the pod's quality-of-service class. If the pod has resources of its own, only these
// count; otherwise those of its containers. Guaranteed: all of them limit CPU and memory, and
// request the same. BestEffort: none of them requests or limits anything. Otherwise Burstable.
func QOS(pod *v1.Pod) v1.PodQOSClass {
	if pod.Status.QOSClass != "" {
		return pod.Status.QOSClass
	}
	if pod.Spec.Resources != nil {
		return classifyQOS([]v1.ResourceRequirements{*pod.Spec.Resources})
	}
	var requirements []v1.ResourceRequirements
	for _, list := range [][]v1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range list {
			requirements = append(requirements, list[i].Resources)
		}
	}
	return classifyQOS(requirements)
}

func classifyQOS(requirements []v1.ResourceRequirements) v1.PodQOSClass {
	requested, guaranteed := false, true
	for _, r := range requirements {
		for _, name := range []v1.ResourceName{v1.ResourceCPU, v1.ResourceMemory} {
			req, hasReq := r.Requests[name]
			lim, hasLim := r.Limits[name]
			requested = requested || hasReq && !req.IsZero() || hasLim && !lim.IsZero()
			if !hasLim || lim.IsZero() || hasReq && req.Cmp(lim) != 0 {
				guaranteed = false
			}
		}
	}
	switch {
	case !requested:
		return v1.PodQOSBestEffort
	case guaranteed:
		return v1.PodQOSGuaranteed
	default:
		return v1.PodQOSBurstable
	}
}
