package framework

import (
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	podresources "k8s.io/component-helpers/resource"

	"keelson.dev/keelson/internal/saturate"
)

// defaultRequests are the CPU and memory requests with which Score plugins count a container that
// has none.
var (
	defaultRequests = v1.ResourceList{
		v1.ResourceCPU:    *resource.NewMilliQuantity(defaultCPU, resource.DecimalSI),
		v1.ResourceMemory: *resource.NewQuantity(defaultMemory, resource.BinarySI),
	}
)

const (
	defaultCPU    = 100 // millicores
	defaultMemory = 200 << 20
)

// requestOptions are the options with which the requests of a pod are computed.
var requestOptions = podresources.PodResourcesOptions{UseStatusResources: true,
	InPlacePodLevelResourcesVerticalScalingEnabled: true}

// setRequests computes the resource requests of the pod and stores them in info. During an in-place
// resize, the request of a container or of the pod is the maximum of its desired, allocated and
// actual resources.
func (info *PodInfo) setRequests() {
	pod := info.Pod
	if info.setPlainRequests() {
		return
	}
	info.Requests = resourcesOf(podresources.PodRequests(pod, requestOptions))
	options := requestOptions
	options.NonMissingContainerRequests = defaultRequests
	counted := podresources.PodRequests(pod, options)
	info.CountedCPU, info.CountedMemory = saturate.MilliValue(counted.Cpu()), saturate.Value(counted.Memory())
}

// setPlainRequests sets the requests of info to the sum over the pod's containers and returns true.
// It returns false if a different computation is necessary, for example because of init containers.
// It needs no memory allocations, unlike the general computation.
func (info *PodInfo) setPlainRequests() bool {
	pod := info.Pod
	if len(pod.Spec.InitContainers) > 0 || pod.Spec.Resources != nil || len(pod.Spec.Overhead) > 0 ||
		len(pod.Status.ContainerStatuses) > 0 || pod.Status.Resources != nil ||
		podresources.IsPodResizeInfeasible(pod) {
		return false
	}
	var sum Resources
	var guessed [2]int64
	for i := range pod.Spec.Containers {
		list := pod.Spec.Containers[i].Resources.Requests
		for name, q := range list {
			if !isWholeAmount(name, q) {
				return false // rounding each container's request would differ from rounding the sum
			}
		}
		sum.addScaled(resourcesOf(list), 1)
		if _, ok := list[v1.ResourceCPU]; !ok {
			guessed[0] += defaultCPU
		}
		if _, ok := list[v1.ResourceMemory]; !ok {
			guessed[1] += defaultMemory
		}
	}
	info.Requests = sum
	info.CountedCPU, info.CountedMemory = saturate.Add(sum.MilliCPU, guessed[0]), saturate.Add(sum.Memory, guessed[1])
	return true
}

// isWholeAmount reports whether the amount q of a resource is a whole number: of millicores for
// CPU, of bytes or units for other resources.
func isWholeAmount(name v1.ResourceName, q resource.Quantity) bool {
	if name == v1.ResourceCPU {
		return resource.NewMilliQuantity(saturate.MilliValue(&q), q.Format).Cmp(q) == 0
	}
	return resource.NewQuantity(saturate.Value(&q), q.Format).Cmp(q) == 0
}
