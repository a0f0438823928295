package pod

import (
	"path"
	"strconv"
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

// containerResources converts a container's requests and limits to CRI resources. memory is the
// node's, for the OOM score.
func containerResources(pod *v1.Pod, spec *v1.Container, memory int64) *cri.LinuxContainerResources {
	r := resourcesOf(spec.Resources.Requests, spec.Resources.Limits)
	r.OomScoreAdj = oomScore(pod, spec, memory)
	for name, q := range spec.Resources.Limits {
		if size, ok := strings.CutPrefix(string(name), v1.ResourceHugePagesPrefix); ok {
			r.HugepageLimits = append(r.HugepageLimits, &cri.HugepageLimit{PageSize: hugePageSize(size), Limit: uint64(saturate.Value(&q))})
		}
	}
	return r
}

// hugePageSize converts "2Mi" to the kernel's form "2MB".
func hugePageSize(s string) string { return strings.TrimSuffix(s, "i") + "B" }

func resourcesOf(requests, limits v1.ResourceList) *cri.LinuxContainerResources {
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

// oomGroup is a cgroup v2 file. With "1", the kernel kills all processes of a container when it
// kills one of them for memory.
const oomGroup = "memory.oom.group"

// containerLimits returns containerResources plus the node's OOM group setting.
func (w *worker) containerLimits(pod *v1.Pod, spec *v1.Container) *cri.LinuxContainerResources {
	r := containerResources(pod, spec, w.cfg.memory())
	if !w.cfg.SingleProcessOOMKill {
		r.Unified = map[string]string{oomGroup: "1"}
	}
	return r
}

// podResources returns the limits of the pod's cgroup. Without pod-level limits, a limit is set
// only if every container has one.
func podResources(pod *v1.Pod) *cri.LinuxContainerResources {
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
	return resourcesOf(requests, limits)
}

// podLimits returns podResources plus the node's limit of processes per pod.
func (w *worker) podLimits(pod *v1.Pod) *cri.LinuxContainerResources {
	r := podResources(pod)
	if w.cfg.PodPIDs > 0 {
		r.Unified = map[string]string{"pids.max": strconv.FormatInt(w.cfg.PodPIDs, 10)}
	}
	return r
}

// CPURequest returns the CPU request that was granted to a pod, in millicores: from its status,
// else from its spec.
func CPURequest(pod *v1.Pod) int64 {
	g := grantOf(pod)
	for _, list := range [][]v1.ContainerStatus{pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses} {
		for _, cs := range list {
			if cs.AllocatedResources != nil {
				g.Containers[cs.Name] = v1.ResourceRequirements{Requests: cs.AllocatedResources, Limits: g.Containers[cs.Name].Limits}
			}
		}
	}
	requests := resource.PodRequests(g.of(pod), resource.PodResourcesOptions{})
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

// cgroupParent returns the path of the pod's cgroup below root.
func cgroupParent(root string, pod *v1.Pod) string {
	class := ""
	switch QOS(pod) {
	case v1.PodQOSBurstable:
		class = "burstable"
	case v1.PodQOSBestEffort:
		class = "besteffort"
	}
	return path.Join("/", root, "kubepods", class, "pod"+string(pod.UID))
}
