package criconfig

import (
	"path"
	"strconv"

	v1 "k8s.io/api/core/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent/pod/lifecycle"
)

// oomGroup is a cgroup v2 file. With "1", the kernel kills all processes of a container when it
// kills one of them for memory.
const oomGroup = "memory.oom.group"

// containerLimits returns the CRI resources of a container: lifecycle.ContainerResources plus the
// node's setting of memory.oom.group.
func (b *Builder) containerLimits(pod *v1.Pod, spec *v1.Container) *cri.LinuxContainerResources {
	r := lifecycle.ContainerResources(pod, spec, b.cfg.Memory())
	if !b.cfg.SingleProcessOOMKill {
		r.Unified = map[string]string{oomGroup: "1"}
	}
	return r
}

// podLimits returns the CRI resources of the pod's cgroup: lifecycle.PodResources plus the node's
// limit of processes per pod.
func (b *Builder) podLimits(pod *v1.Pod) *cri.LinuxContainerResources {
	r := lifecycle.PodResources(pod)
	if b.cfg.PodPIDs > 0 {
		r.Unified = map[string]string{"pids.max": strconv.FormatInt(b.cfg.PodPIDs, 10)}
	}
	return r
}

// cgroupParent returns the path of the pod's cgroup below root.
func cgroupParent(root string, pod *v1.Pod) string {
	class := ""
	switch lifecycle.QOS(pod) {
	case v1.PodQOSBurstable:
		class = "burstable"
	case v1.PodQOSBestEffort:
		class = "besteffort"
	}
	return path.Join("/", root, "kubepods", class, "pod"+string(pod.UID))
}
