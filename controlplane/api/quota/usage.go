package quota

import (
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	podresources "k8s.io/component-helpers/resource"
	"k8s.io/component-helpers/storage/volume"

	"keelson.dev/keelson/internal/saturate"
)

// computed are the names that are computed from the requests and limits of pods.
var computed = []corev1.ResourceName{
	corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage,
	corev1.ResourceRequestsCPU, corev1.ResourceRequestsMemory, corev1.ResourceRequestsEphemeralStorage,
	corev1.ResourceLimitsCPU, corev1.ResourceLimitsMemory, corev1.ResourceLimitsEphemeralStorage,
}

// demanded are the names that every container must set if a quota limits them.
var demanded = []corev1.ResourceName{
	corev1.ResourceCPU, corev1.ResourceLimitsCPU, corev1.ResourceLimitsMemory, corev1.ResourceMemory,
	corev1.ResourceRequestsCPU, corev1.ResourceRequestsMemory,
}

// addPod adds the usage of a pod, unless it has ended.
func addPod(u corev1.ResourceList, pod *corev1.Pod, now time.Time) {
	if ended(pod, now) {
		return
	}
	// While a pod is resized, its usage is the larger of its current and its desired resources.
	options := podresources.PodResourcesOptions{UseStatusResources: true}
	for name, q := range compute(podresources.PodRequests(pod, options), podresources.PodLimits(pod, options)) {
		u[name] = q
	}
}

// ended reports whether a pod no longer counts: it is terminal, or still exists after its deletion
// grace period.
func ended(pod *corev1.Pod, now time.Time) bool {
	if pod.Status.Phase == corev1.PodFailed || pod.Status.Phase == corev1.PodSucceeded {
		return true
	}
	at, stuck := Stuck(pod)
	return stuck && now.After(at)
}

// Stuck returns the time from which a pod that is being deleted no longer counts, although it may
// still exist. ok is false if the pod is not being deleted.
func Stuck(pod *corev1.Pod) (at time.Time, ok bool) {
	if pod.DeletionTimestamp == nil || pod.DeletionGracePeriodSeconds == nil {
		return time.Time{}, false
	}
	return pod.DeletionTimestamp.Add(time.Duration(*pod.DeletionGracePeriodSeconds) * time.Second), true
}

// compute returns requests and limits under the names that quotas use.
func compute(requests, limits corev1.ResourceList) corev1.ResourceList {
	u := corev1.ResourceList{corev1.ResourcePods: number(1)}
	for name, q := range requests {
		switch {
		case name == corev1.ResourceCPU || name == corev1.ResourceMemory || name == corev1.ResourceEphemeralStorage,
			strings.HasPrefix(string(name), corev1.ResourceHugePagesPrefix):
			u[name] = q
			u[requestPrefix+name] = q
		case Extended(name):
			u[requestPrefix+name] = q
		}
	}
	for _, name := range []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage} {
		if q, ok := limits[name]; ok {
			u["limits."+name] = q
		}
	}
	return u
}

// Extended reports whether a name is an extended resource, which is not Kubernetes' own.
func Extended(name corev1.ResourceName) bool {
	return !native(string(name)) && !strings.HasPrefix(string(name), requestPrefix)
}

// Unstated returns a description of the resources that the quota requires and containers of the pod
// do not set, or "".
func Unstated(s *corev1.ResourceQuotaSpec, pod *corev1.Pod) string {
	if podresources.IsPodLevelResourcesSet(pod) {
		return ""
	}
	var parts []string
	for _, name := range demanded {
		if _, bounded := s.Hard[name]; !bounded {
			continue
		}
		var lacking []string
		for _, list := range [][]corev1.Container{pod.Spec.Containers, pod.Spec.InitContainers} {
			for i := range list {
				if _, stated := compute(list[i].Resources.Requests, list[i].Resources.Limits)[name]; !stated {
					lacking = append(lacking, list[i].Name)
				}
			}
		}
		if len(lacking) > 0 {
			slices.Sort(lacking)
			parts = append(parts, string(name)+" for: "+strings.Join(lacking, ","))
		}
	}
	return strings.Join(parts, "; ")
}

func addClaim(u corev1.ResourceList, c *corev1.PersistentVolumeClaim) {
	class := volume.GetPersistentVolumeClaimClass(c)
	add := func(name corev1.ResourceName, q resource.Quantity) {
		u[name] = q
		if class != "" {
			u[corev1.ResourceName(class+classSuffix)+name] = q
		}
	}
	add(corev1.ResourcePersistentVolumeClaims, number(1))
	size, ok := c.Spec.Resources.Requests[corev1.ResourceStorage]
	if !ok {
		return
	}
	if has, ok := c.Status.AllocatedResources[corev1.ResourceStorage]; ok && has.Cmp(size) > 0 {
		size = has
	}
	size = size.DeepCopy()
	size.RoundUp(0)
	add(corev1.ResourceRequestsStorage, size)
}

// addDevices adds the maximum number of devices per class that a claim may get. Of the alternatives
// of a request, the largest number for each class counts.
func addDevices(u corev1.ResourceList, c *resourcev1.ResourceClaim) {
	sum := map[string]int64{}
	for i := range c.Spec.Devices.Requests {
		r := &c.Spec.Devices.Requests[i]
		if r.Exactly != nil {
			class := r.Exactly.DeviceClassName
			sum[class] = saturate.Add(sum[class], devices(r.Exactly.AllocationMode, r.Exactly.Count))
		}
		most := map[string]int64{}
		for j := range r.FirstAvailable {
			s := &r.FirstAvailable[j]
			most[s.DeviceClassName] = max(most[s.DeviceClassName], devices(s.AllocationMode, s.Count))
		}
		for class, n := range most {
			sum[class] = saturate.Add(sum[class], n)
		}
	}
	for class, n := range sum {
		u[corev1.ResourceName(class+devicesSuffix)] = number(n)
	}
}

func devices(mode resourcev1.DeviceAllocationMode, count int64) int64 {
	if mode == resourcev1.DeviceAllocationModeAll {
		return resourcev1.AllocationResultsMaxSize
	}
	return count
}

func addService(u corev1.ResourceList, s *corev1.Service) {
	ports := int64(0)
	u[corev1.ResourceServices] = number(1)
	u[corev1.ResourceServicesLoadBalancers] = number(0)
	switch s.Spec.Type {
	case corev1.ServiceTypeNodePort:
		ports = int64(len(s.Spec.Ports))
	case corev1.ServiceTypeLoadBalancer:
		u[corev1.ResourceServicesLoadBalancers] = number(1)
		gets := s.Spec.AllocateLoadBalancerNodePorts == nil || *s.Spec.AllocateLoadBalancerNodePorts
		for i := range s.Spec.Ports {
			if gets || s.Spec.Ports[i].NodePort != 0 {
				ports++
			}
		}
	}
	u[corev1.ResourceServicesNodePorts] = number(ports)
}
