package diskusage

import (
	"fmt"
	"maps"
	"slices"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	helper "k8s.io/component-helpers/resource"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/saturate"
)

// Limits are the storage limits of a pod that the agent enforces by measuring the disk usage.
type Limits struct {
	volumes    map[string]resource.Quantity // size limits of emptyDir volumes on disk
	containers map[string]resource.Quantity
	Pod        *resource.Quantity // limit of all containers of the pod together
}

// IsEmpty reports whether the pod has no storage limits.
func (l Limits) IsEmpty() bool { return len(l.volumes)+len(l.containers) == 0 && l.Pod == nil }

// PodLimits returns a pod's storage limits. It omits an emptyDir in memory, because the kernel
// enforces the size of its tmpfs.
func PodLimits(pod *v1.Pod) Limits {
	l := Limits{volumes: map[string]resource.Quantity{}, containers: map[string]resource.Quantity{}}
	for i := range pod.Spec.Volumes {
		v := &pod.Spec.Volumes[i]
		if IsDiskEmptyDir(v) && v.EmptyDir != nil && v.EmptyDir.SizeLimit != nil && v.EmptyDir.SizeLimit.Sign() > 0 {
			l.volumes[v.Name] = *v.EmptyDir.SizeLimit
		}
	}
	for _, list := range [][]v1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range list {
			if q, ok := list[i].Resources.Limits[v1.ResourceEphemeralStorage]; ok && q.Sign() > 0 {
				l.containers[list[i].Name] = q
			}
		}
	}
	if q, ok := helper.PodLimits(pod, helper.PodResourcesOptions{})[v1.ResourceEphemeralStorage]; ok && q.Sign() > 0 {
		l.Pod = &q
	}
	return l
}

// PodUse is the measured disk usage of a pod. All values except Inodes are in bytes. The keys of
// the maps are volume and container names.
type PodUse struct {
	Volumes    map[string]int64
	Containers map[string]int64 // layer and logs of the newest instance
	Logs       map[string]int64 // the part of Containers that is logs
	Rest       int64
	Inodes     int64 // inodes of the whole pod
}

func (u PodUse) totalBytes() int64 {
	sum := u.Rest
	for _, m := range []map[string]int64{u.Volumes, u.Containers} {
		for _, n := range m {
			sum += n
		}
	}
	return sum
}

// OveruseMessage returns the eviction message for the first limit that use exceeds, as in
// Kubernetes; "" if it exceeds no limit.
func (l Limits) OveruseMessage(use PodUse) string {
	exceeds := func(n int64, q resource.Quantity) bool { return q.CmpInt64(n) < 0 }
	for _, name := range slices.Sorted(maps.Keys(l.volumes)) {
		if q := l.volumes[name]; exceeds(use.Volumes[name], q) {
			return fmt.Sprintf("Usage of EmptyDir volume %q exceeds the limit %q. ", name, q.String())
		}
	}
	if l.Pod != nil && exceeds(use.totalBytes(), *l.Pod) {
		return fmt.Sprintf("Pod ephemeral local storage usage exceeds the total limit of containers %s. ", l.Pod)
	}
	for _, name := range slices.Sorted(maps.Keys(l.containers)) {
		if q := l.containers[name]; exceeds(use.Containers[name], q) {
			return fmt.Sprintf("Container %s exceeded its local ephemeral storage limit %q. ", name, q.String())
		}
	}
	return ""
}

// LargestLimit returns the largest of the limits in bytes. A measurement may stop at this size,
// because any higher usage exceeds a limit anyway.
func (l Limits) LargestLimit() int64 {
	var largest int64
	for _, m := range []map[string]resource.Quantity{l.volumes, l.containers} {
		for _, q := range m {
			largest = max(largest, saturate.Value(&q))
		}
	}
	if l.Pod != nil {
		largest = max(largest, saturate.Value(l.Pod))
	}
	return largest
}

// ToPodStorage converts the usage of the pod and its containers. The result has no volumes and no
// time.
func (u PodUse) ToPodStorage() agent.PodStorage {
	out := agent.PodStorage{Used: uint64(u.totalBytes()), Inodes: uint64(u.Inodes),
		Containers: make(map[string]agent.ContainerStorage, len(u.Containers))}
	for name, n := range u.Containers {
		logs := u.Logs[name]
		out.Containers[name] = agent.ContainerStorage{Layer: uint64(n - logs), Logs: uint64(logs)}
	}
	return out
}
