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

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/internal/saturate"
)

// computedNames are the quota names with a usage that is computed from the requests and limits of
// pods.
var computedNames = []corev1.ResourceName{
	corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage,
	corev1.ResourceRequestsCPU, corev1.ResourceRequestsMemory, corev1.ResourceRequestsEphemeralStorage,
	corev1.ResourceLimitsCPU, corev1.ResourceLimitsMemory, corev1.ResourceLimitsEphemeralStorage,
}

// requiredNames are the names that every container must set if a quota limits them.
var requiredNames = []corev1.ResourceName{
	corev1.ResourceCPU, corev1.ResourceLimitsCPU, corev1.ResourceLimitsMemory, corev1.ResourceMemory,
	corev1.ResourceRequestsCPU, corev1.ResourceRequestsMemory,
}

// addPod adds the usage of a pod to usage, unless isUncounted returns true for the pod.
func addPod(usage corev1.ResourceList, pod *corev1.Pod, currentTime time.Time) {
	if isUncounted(pod, currentTime) {
		return
	}
	// While a pod is resized, its usage is the larger of its current and its desired resources.
	options := podresources.PodResourcesOptions{UseStatusResources: true,
		InPlacePodLevelResourcesVerticalScalingEnabled: true}
	for name, q := range computeUsage(podresources.PodRequests(pod, options), podresources.PodLimits(pod, options)) {
		usage[name] = q
	}
}

// isUncounted reports whether only the object count of a pod is charged to a quota: the pod is
// terminal, or its deletion grace period has ended although it still exists.
func isUncounted(pod *corev1.Pod, currentTime time.Time) bool {
	if api.IsPodTerminal(pod) {
		return true
	}
	at, stuck := UncountedFrom(pod)
	return stuck && currentTime.After(at)
}

// UncountedFrom returns the time from which the resources of a pod that is being deleted are no
// longer charged to a quota: the end of its grace period. Its object count is still charged. ok is
// false if the pod is not being deleted.
func UncountedFrom(pod *corev1.Pod) (since time.Time, ok bool) {
	if pod.DeletionTimestamp == nil || pod.DeletionGracePeriodSeconds == nil {
		return time.Time{}, false
	}
	return pod.DeletionTimestamp.Add(time.Duration(*pod.DeletionGracePeriodSeconds) * time.Second), true
}

// computeUsage returns the requests and limits of a pod with the names that quotas use.
func computeUsage(requests, limits corev1.ResourceList) corev1.ResourceList {
	u := corev1.ResourceList{corev1.ResourcePods: newCount(1)}
	for name, q := range requests {
		switch {
		case name == corev1.ResourceCPU || name == corev1.ResourceMemory || name == corev1.ResourceEphemeralStorage,
			strings.HasPrefix(string(name), corev1.ResourceHugePagesPrefix):
			u[name] = q
			u[requestPrefix+name] = q
		case IsExtended(name):
			u[requestPrefix+name] = q
		}
	}
	for _, name := range []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory,
		corev1.ResourceEphemeralStorage} {
		if q, ok := limits[name]; ok {
			u["limits."+name] = q
		}
	}
	return u
}

// IsExtended reports whether a name is that of an extended resource, which Kubernetes does not
// define.
func IsExtended(name corev1.ResourceName) bool {
	return !isNative(string(name)) && !strings.HasPrefix(string(name), requestPrefix)
}

// DescribeUnset returns a description of the resources that the quota requires and containers of
// the pod do not set. It returns "" if the containers set all required resources.
func DescribeUnset(spec *corev1.ResourceQuotaSpec, pod *corev1.Pod) string {
	if podresources.IsPodLevelResourcesSet(pod) {
		return ""
	}
	var parts []string
	for _, name := range requiredNames {
		if _, bounded := spec.Hard[name]; !bounded {
			continue
		}
		var lacking []string
		for _, list := range [][]corev1.Container{pod.Spec.Containers, pod.Spec.InitContainers} {
			for i := range list {
				if _, stated := computeUsage(list[i].Resources.Requests, list[i].Resources.Limits)[name]; !stated {
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
	add(corev1.ResourcePersistentVolumeClaims, newCount(1))
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

// addDevices adds the maximum number of devices of each class that a claim may get to usage. If a
// request has alternatives, the largest number for each class counts.
func addDevices(usage corev1.ResourceList, claim *resourcev1.ResourceClaim) {
	sum := map[string]int64{}
	for i := range claim.Spec.Devices.Requests {
		r := &claim.Spec.Devices.Requests[i]
		if r.Exactly != nil {
			class := r.Exactly.DeviceClassName
			sum[class] = saturate.Add(sum[class], deviceCount(r.Exactly.AllocationMode, r.Exactly.Count))
		}
		most := map[string]int64{}
		for j := range r.FirstAvailable {
			s := &r.FirstAvailable[j]
			most[s.DeviceClassName] = max(most[s.DeviceClassName], deviceCount(s.AllocationMode, s.Count))
		}
		for class, n := range most {
			sum[class] = saturate.Add(sum[class], n)
		}
	}
	for class, n := range sum {
		usage[corev1.ResourceName(class+devicesSuffix)] = newCount(n)
	}
}

func deviceCount(mode resourcev1.DeviceAllocationMode, count int64) int64 {
	if mode == resourcev1.DeviceAllocationModeAll {
		return resourcev1.AllocationResultsMaxSize
	}
	return count
}

func addService(u corev1.ResourceList, s *corev1.Service) {
	ports := int64(0)
	u[corev1.ResourceServices] = newCount(1)
	u[corev1.ResourceServicesLoadBalancers] = newCount(0)
	switch s.Spec.Type {
	case corev1.ServiceTypeNodePort:
		ports = int64(len(s.Spec.Ports))
	case corev1.ServiceTypeLoadBalancer:
		u[corev1.ResourceServicesLoadBalancers] = newCount(1)
		gets := s.Spec.AllocateLoadBalancerNodePorts == nil || *s.Spec.AllocateLoadBalancerNodePorts
		for i := range s.Spec.Ports {
			if gets || s.Spec.Ports[i].NodePort != 0 {
				ports++
			}
		}
	}
	u[corev1.ResourceServicesNodePorts] = newCount(ports)
}
