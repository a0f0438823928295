package framework

import (
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	podresources "k8s.io/component-helpers/resource"

	"keelson.dev/keelson/internal/saturate"
)

// guess are the requests that containers without requests are assumed to have, for scores only.
var (
	guess = v1.ResourceList{
		v1.ResourceCPU:    *resource.NewMilliQuantity(guessCPU, resource.DecimalSI),
		v1.ResourceMemory: *resource.NewQuantity(guessMemory, resource.BinarySI),
	}
)

const (
	guessCPU    = 100 // millicores
	guessMemory = 200 << 20
)

// setRequests computes the resource requests of the pod and stores them in info. For a pod that is
// being resized it uses the maximum of the desired, allocated and actual resources.
func (info *PodInfo) setRequests() {
	pod := info.Pod
	if info.setPlainRequests() {
		return
	}
	info.Requests = resourcesOf(podresources.PodRequests(pod, podresources.PodResourcesOptions{UseStatusResources: true}))
	counted := podresources.PodRequests(pod, podresources.PodResourcesOptions{UseStatusResources: true, NonMissingContainerRequests: guess})
	info.CountedCPU, info.CountedMemory = saturate.MilliValue(counted.Cpu()), saturate.Value(counted.Memory())
}

// setPlainRequests computes the requests if they are the plain sum over the containers, as for most
// pending pods. It avoids the allocations of the general computation. It returns false if the
// general computation is necessary.
func (info *PodInfo) setPlainRequests() bool {
	pod := info.Pod
	if len(pod.Spec.InitContainers) > 0 || pod.Spec.Resources != nil || len(pod.Spec.Overhead) > 0 ||
		len(pod.Status.ContainerStatuses) > 0 || podresources.IsPodResizeInfeasible(pod) {
		return false
	}
	var sum Resources
	var guessed [2]int64
	for i := range pod.Spec.Containers {
		list := pod.Spec.Containers[i].Resources.Requests
		for name, q := range list {
			if !exactShare(name, q) {
				return false // only the sum may be rounded
			}
		}
		sum.addScaled(resourcesOf(list), 1)
		if _, ok := list[v1.ResourceCPU]; !ok {
			guessed[0] += guessCPU
		}
		if _, ok := list[v1.ResourceMemory]; !ok {
			guessed[1] += guessMemory
		}
	}
	info.Requests = sum
	info.CountedCPU, info.CountedMemory = saturate.Add(sum.MilliCPU, guessed[0]), saturate.Add(sum.Memory, guessed[1])
	return true
}

// exactShare reports whether the amount is an integer in the unit in which the resource is counted:
// millicores for CPU, otherwise 1.
func exactShare(name v1.ResourceName, q resource.Quantity) bool {
	if name == v1.ResourceCPU {
		return resource.NewMilliQuantity(saturate.MilliValue(&q), q.Format).Cmp(q) == 0
	}
	return resource.NewQuantity(saturate.Value(&q), q.Format).Cmp(q) == 0
}
