package framework

import (
	"context"

	v1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Handle gives plugins access to the cluster and to the scheduler. Tests set only the fields that
// they need.
type Handle struct {
	// Volumes looks up storage objects.
	Volumes
	Devices

	// Bind binds the pod to the node through the API.
	Bind func(ctx context.Context, pod *v1.Pod, node string) error
	// UpdateClaim and UpdateVolume update a PersistentVolumeClaim or a PersistentVolume. The
	// resourceVersion of the argument is a precondition.
	UpdateClaim  func(ctx context.Context, c *v1.PersistentVolumeClaim) (*v1.PersistentVolumeClaim, error)
	UpdateVolume func(ctx context.Context, v *v1.PersistentVolume) (*v1.PersistentVolume, error)
	// AwaitVolumes calls check now and after every change of a storage object, until check returns
	// true or an error, or ctx ends.
	AwaitVolumes func(ctx context.Context, check func() (done bool, err error)) error
	// Fits runs the profile's filters for one node. The profile's PreFilter must have run in the
	// cycle.
	Fits func(ctx context.Context, c *Cycle, n *NodeInfo) *Status
	// Extenders are the external services of the profile. The preemption plugin lets them change
	// the victims.
	Extenders []Extender
	// Budgets returns all PodDisruptionBudgets. Pod returns the current state of a pod.
	Budgets func() []*policyv1.PodDisruptionBudget
	Pod     func(namespace, name string) (*v1.Pod, bool)
	// Group returns the state of a PodGroup. It acquires no lock that callers may hold.
	Group func(key GroupKey) Group
	// VolumeLimits returns, by CSI driver, how many volumes can be attached to the node. Drivers
	// without a limit are missing.
	VolumeLimits func(node string) map[string]int32
	// Preempt nominates the node for the pod and starts to evict the victims. It does not wait for
	// the evictions.
	Preempt func(ctx context.Context, pod *PodInfo, node string, victims []*PodInfo)
	// Nominate sets the nominated node of a pod; "" clears it.
	Nominate func(pod *v1.Pod, node string)
	// Waiting returns the pod if Permit delays its binding, and nil otherwise.
	Waiting func(uid types.UID) WaitingPod
	// EachWaiting calls f for every pod with a binding that Permit delays.
	EachWaiting func(f func(WaitingPod))
}

// WaitingPod is a pod with a chosen node and a binding that Permit plugins delay.
type WaitingPod interface {
	Pod() *v1.Pod
	// Allow ends the delay by one plugin. The pod is bound when no plugin delays it any more.
	Allow(plugin string)
	// Reject ends the wait. The pod loses its node and returns to the queue.
	Reject(plugin, reason string)
}

// Devices gives the plugin DynamicResources access to ResourceClaims and devices.
type Devices struct {
	DeviceClaim   func(namespace, name string) (*resourcev1.ResourceClaim, bool)
	DeviceClass   func(name string) (*resourcev1.DeviceClass, bool)
	DeviceClasses func() []*resourcev1.DeviceClass
	Slices        func() []*resourcev1.ResourceSlice

	// DeviceClaimNow reads a ResourceClaim from the API and not from the informer's cache.
	DeviceClaimNow func(ctx context.Context, namespace, name string) (*resourcev1.ResourceClaim, error)
	// UpdateDeviceClaim and UpdateDeviceClaimStatus update a ResourceClaim or its status. The
	// resourceVersion of the argument is a precondition.
	UpdateDeviceClaim       func(ctx context.Context, c *resourcev1.ResourceClaim) (*resourcev1.ResourceClaim, error)
	UpdateDeviceClaimStatus func(ctx context.Context, c *resourcev1.ResourceClaim) (*resourcev1.ResourceClaim, error)
	// AwaitDevices calls check now and after every change of a ResourceClaim, until check returns
	// true or an error, or ctx ends.
	AwaitDevices func(ctx context.Context, check func() (done bool, err error)) error
}
