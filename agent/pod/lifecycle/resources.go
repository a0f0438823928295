package lifecycle

import (
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/component-helpers/resource"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/internal/saturate"
)

const (
	quotaPeriod = 100_000 // µs
	minQuota    = 1_000
	minShares   = 2
	maxShares   = 262_144
)

func cpuShares(milli int64) int64 {
	return min(max(milli*1024/1000, minShares), maxShares)
}

func cpuQuota(milli int64) int64 { return max(milli*quotaPeriod/1000, minQuota) }

// ContainerResources converts a container's requests and limits to CRI resources. memory is the
// node's, for the OOM score.
func ContainerResources(pod *v1.Pod, spec *v1.Container, memory int64) *cri.LinuxContainerResources {
	r := convertResources(spec.Resources.Requests, spec.Resources.Limits)
	r.OomScoreAdj = oomScore(pod, spec, memory)
	for name, q := range spec.Resources.Limits {
		if size, ok := strings.CutPrefix(string(name), v1.ResourceHugePagesPrefix); ok {
			r.HugepageLimits = append(r.HugepageLimits,
				&cri.HugepageLimit{PageSize: hugePageSize(size), Limit: uint64(saturate.Value(&q))})
		}
	}
	return r
}

// hugePageSize converts "2Mi" to the kernel's form "2MB".
func hugePageSize(text string) string { return strings.TrimSuffix(text, "i") + "B" }

func convertResources(requests, limits v1.ResourceList) *cri.LinuxContainerResources {
	r := &cri.LinuxContainerResources{CpuPeriod: quotaPeriod}
	request, limit := saturate.MilliValue(requests.Cpu()), saturate.MilliValue(limits.Cpu())
	if _, ok := requests[v1.ResourceCPU]; !ok {
		request = limit
	}
	r.CpuShares = cpuShares(request)
	if limit > 0 {
		r.CpuQuota = cpuQuota(limit)
	}
	r.MemoryLimitInBytes = saturate.Value(limits.Memory())
	return r
}

// PodResources returns the limits of the pod's cgroup. Without pod-level limits, a limit is set
// only if every container has one.
func PodResources(pod *v1.Pod) *cri.LinuxContainerResources {
	requests := resource.PodRequests(pod, resource.PodResourcesOptions{})
	limits := resource.PodLimits(pod, resource.PodResourcesOptions{})
	if !resource.IsPodLevelLimitsSet(pod) {
		for _, list := range [][]v1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
			for i := range list {
				for _, name := range []v1.ResourceName{v1.ResourceCPU, v1.ResourceMemory} {
					if q, ok := list[i].Resources.Limits[name]; !ok || q.IsZero() {
						delete(limits, name)
					}
				}
			}
		}
	}
	return convertResources(requests, limits)
}

// CPURequest returns the sum of the CPU requests that are granted to a pod, in millicores. It reads
// them from the pod's status, or from its spec if the status has none.
func CPURequest(pod *v1.Pod) int64 {
	g := GrantFromSpec(pod)
	for _, list := range [][]v1.ContainerStatus{pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses} {
		for _, cs := range list {
			if cs.AllocatedResources != nil {
				g.Containers[cs.Name] = v1.ResourceRequirements{Requests: cs.AllocatedResources,
					Limits: g.Containers[cs.Name].Limits}
			}
		}
	}
	requests := resource.PodRequests(g.ApplyTo(pod), resource.PodResourcesOptions{})
	return saturate.MilliValue(requests.Cpu())
}

// oomScore returns the OOM score adjustment, as in Kubernetes: Guaranteed pods are killed last,
// BestEffort pods first. Burstable containers are killed earlier the smaller their memory request
// is.
func oomScore(pod *v1.Pod, spec *v1.Container, memory int64) int64 {
	const guaranteed, bestEffort = -997, 1000
	if pod.Spec.Priority != nil && *pod.Spec.Priority >= 2_000_000_000 {
		return guaranteed
	}
	switch QOS(pod) {
	case v1.PodQOSGuaranteed:
		return guaranteed
	case v1.PodQOSBestEffort:
		return bestEffort
	}
	if memory <= 0 {
		return bestEffort - 1
	}
	score := 1000 - saturate.MulDiv(1000, saturate.Value(spec.Resources.Requests.Memory()), memory)
	return min(max(score, 1000+guaranteed), bestEffort-1)
}
