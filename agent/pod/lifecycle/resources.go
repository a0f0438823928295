package lifecycle

import (
	"maps"
	"math"
	"slices"
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

// ContainerResources converts a container's requests and limits to CRI resources. A resource that
// the container does not limit has the limit of the whole pod. memory is the node's, for the OOM
// score.
func ContainerResources(pod *v1.Pod, spec *v1.Container, memory int64) *cri.LinuxContainerResources {
	limits := effectiveLimits(pod, spec)
	r := convertResources(spec.Resources.Requests, limits)
	r.OomScoreAdj = oomScore(pod, spec, memory)
	r.HugepageLimits = hugePageLimits(limits)
	return r
}

// effectiveLimits returns the limits of a container, and the pod's limits of the resources that the
// container does not limit.
func effectiveLimits(pod *v1.Pod, spec *v1.Container) v1.ResourceList {
	if !resource.IsPodLevelLimitsSet(pod) {
		return spec.Resources.Limits
	}
	limits := v1.ResourceList{}
	maps.Copy(limits, spec.Resources.Limits)
	for name, q := range pod.Spec.Resources.Limits {
		if own := limits[name]; own.IsZero() && resource.IsSupportedPodLevelResource(name) {
			limits[name] = q
		}
	}
	return limits
}

// hugePageLimits returns the amounts of huge pages in a list, sorted by page size.
func hugePageLimits(list v1.ResourceList) (limits []*cri.HugepageLimit) {
	for _, name := range slices.Sorted(maps.Keys(list)) {
		if size, ok := strings.CutPrefix(string(name), v1.ResourceHugePagesPrefix); ok {
			q := list[name]
			limits = append(limits,
				&cri.HugepageLimit{PageSize: hugePageSize(size), Limit: uint64(max(saturate.Value(&q), 0))})
		}
	}
	return limits
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

// PodResources returns the limits of the pod's cgroup. A resource that the pod itself does not
// limit has a limit only if every container has one: the sum.
func PodResources(pod *v1.Pod) *cri.LinuxContainerResources {
	requests := resource.PodRequests(pod, resource.PodResourcesOptions{})
	limits := resource.PodLimits(pod, resource.PodResourcesOptions{})
	for _, name := range []v1.ResourceName{v1.ResourceCPU, v1.ResourceMemory} {
		if !hasPodLimit(pod, name) {
			ForEachContainer(pod, func(c *v1.Container) {
				if q := c.Resources.Limits[name]; q.IsZero() {
					delete(limits, name)
				}
			})
		}
	}
	r := convertResources(requests, limits)
	r.HugepageLimits = hugePageLimits(requests)
	return r
}

// hasPodLimit reports whether a pod has a limit of its own for a resource, beside those of its
// containers.
func hasPodLimit(pod *v1.Pod, name v1.ResourceName) bool {
	if pod.Spec.Resources == nil {
		return false
	}
	q := pod.Spec.Resources.Limits[name]
	return !q.IsZero()
}

// CPURequest returns the CPU request that is granted to a pod, in millicores: that of the whole
// pod, or else the sum over its containers. It reads the requests from the pod's status, or from
// its spec if the status has none.
func CPURequest(pod *v1.Pod) int64 {
	g := GrantFromSpec(pod)
	if allocated := pod.Status.AllocatedResources; g.Pod != nil && allocated != nil {
		g.Pod = &v1.ResourceRequirements{Requests: maps.Clone(g.Pod.Requests), Limits: g.Pod.Limits}
		for name := range g.Pod.Requests {
			if q, ok := allocated[name]; ok {
				g.Pod.Requests[name] = q
			}
		}
	}
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
// is. Each container has an equal share of the pod's request that no container requests.
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
	share := unallocatedMemory(pod)
	request := saturate.Add(saturate.Value(spec.Resources.Requests.Memory()), share)
	score := 1000 - saturate.MulDiv(1000, request, memory)
	if IsSidecar(pod, spec) {
		// A sidecar is not killed before the regular container with the smallest request.
		least := int64(math.MaxInt64)
		for i := range pod.Spec.Containers {
			least = min(least, saturate.Value(pod.Spec.Containers[i].Resources.Requests.Memory()))
		}
		score = min(score, 1000-saturate.MulDiv(1000, saturate.Add(least, share), memory))
	}
	return min(max(score, 1000+guaranteed), bestEffort-1)
}

// unallocatedMemory returns the part of the pod's own memory request that no container requests,
// divided by the number of containers, in bytes.
func unallocatedMemory(pod *v1.Pod) int64 {
	if !resource.IsPodLevelRequestsSet(pod) {
		return 0
	}
	containers := resource.AggregateContainerRequests(pod, resource.PodResourcesOptions{})
	rest := saturate.Value(pod.Spec.Resources.Requests.Memory()) - saturate.Value(containers.Memory())
	return max(rest, 0) / int64(max(len(pod.Spec.InitContainers)+len(pod.Spec.Containers), 1))
}
