package framework

import (
	"context"

	v1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Handle is the interface of plugins to the scheduler. Tests set only the fields that they need.
type Handle struct {
	Volumes
	Devices

	// Bind binds the pod to the node.
	Bind func(ctx context.Context, pod *v1.Pod, node string) error
	// UpdateClaim and UpdateVolume write an object with its resourceVersion as precondition.
	UpdateClaim  func(ctx context.Context, c *v1.PersistentVolumeClaim) (*v1.PersistentVolumeClaim, error)
	UpdateVolume func(ctx context.Context, v *v1.PersistentVolume) (*v1.PersistentVolume, error)
	// AwaitVolumes calls check now and after every change of a claim or volume, until it returns
	// true or an error, or ctx ends.
	AwaitVolumes func(ctx context.Context, check func() (done bool, err error)) error
	// Fits runs the profile's filters for one node. PreFilter must have run.
	Fits func(ctx context.Context, c *Cycle, n *NodeInfo) *Status
	// Extenders take part in the choice of victims.
	Extenders []Extender
	// Budgets lists the PodDisruptionBudgets. Pod returns the current state of a pod.
	Budgets func() []*policyv1.PodDisruptionBudget
	Pod     func(namespace, name string) (*v1.Pod, bool)
	// Group returns the state of a PodGroup. It may be called with any lock held.
	Group func(key GroupKey) Group
	// VolumeLimits returns the volume limit of each driver of the node. Drivers without a limit are
	// missing.
	VolumeLimits func(node string) map[string]int32
	// Preempt nominates the node for the pod and evicts the victims. It does not wait for the
	// evictions.
	Preempt func(ctx context.Context, pod *PodInfo, node string, victims []*PodInfo)
	// Nominate sets the nominated node of a pod; "" clears it.
	Nominate func(pod *v1.Pod, node string)
	// Waiting returns a pod that Permit delays; nil if none exists.
	Waiting func(uid types.UID) WaitingPod
	// EachWaiting calls f for every pod that Permit delays.
	EachWaiting func(f func(WaitingPod))
}

// WaitingPod is a pod that Permit plugins delay.
type WaitingPod interface {
	Pod() *v1.Pod
	// Allow removes the delay of one plugin. The pod continues when no delay is left.
	Allow(plugin string)
	// Reject ends the wait; the pod is unreserved.
	Reject(plugin, reason string)
}

// Devices is the access of dynamic resource allocation to claims and devices.
type Devices struct {
	DeviceClaim   func(namespace, name string) (*resourcev1.ResourceClaim, bool)
	DeviceClass   func(name string) (*resourcev1.DeviceClass, bool)
	DeviceClasses func() []*resourcev1.DeviceClass
	Slices        func() []*resourcev1.ResourceSlice

	// DeviceClaimNow reads from the API and not from the cache.
	DeviceClaimNow func(ctx context.Context, namespace, name string) (*resourcev1.ResourceClaim, error)
	// UpdateDeviceClaim and UpdateDeviceClaimStatus write a claim, or its status, with its
	// resourceVersion as precondition.
	UpdateDeviceClaim       func(ctx context.Context, c *resourcev1.ResourceClaim) (*resourcev1.ResourceClaim, error)
	UpdateDeviceClaimStatus func(ctx context.Context, c *resourcev1.ResourceClaim) (*resourcev1.ResourceClaim, error)
	// AwaitDevices calls check now and after every change of a claim, until it returns true or an
	// error, or ctx ends.
	AwaitDevices func(ctx context.Context, check func() (done bool, err error)) error
}
