package framework

import (
	"context"

	v1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Handle is what plugins can do. The scheduler fills it in; tests fill in what they need.
type Handle struct {
	Volumes
	Devices

	// Bind assigns the pod to the node.
	Bind func(ctx context.Context, pod *v1.Pod, node string) error
	// UpdateClaim and UpdateVolume write an object at its resourceVersion.
	UpdateClaim  func(ctx context.Context, c *v1.PersistentVolumeClaim) (*v1.PersistentVolumeClaim, error)
	UpdateVolume func(ctx context.Context, v *v1.PersistentVolume) (*v1.PersistentVolume, error)
	// AwaitVolumes calls check now and after every change of a claim or volume, until it says done or fails, or ctx ends.
	AwaitVolumes func(ctx context.Context, check func() (done bool, err error)) error
	// Fits runs the profile's filters for one node, as in an attempt whose PreFilter has run.
	Fits func(ctx context.Context, c *Cycle, n *NodeInfo) *Status
	// Extenders have a say in whom to preempt.
	Extenders []Extender
	// Budgets lists the PodDisruptionBudgets; Pod looks a pod up as it is now.
	Budgets func() []*policyv1.PodDisruptionBudget
	Pod     func(namespace, name string) (*v1.Pod, bool)
	// Group says what is known of a PodGroup. It may be asked whatever is locked.
	Group func(key GroupKey) Group
	// VolumeLimits is how many volumes of each driver the node takes; drivers without a limit are not in it.
	VolumeLimits func(node string) map[string]int32
	// Preempt keeps room on the node for the pod and ends the victims there. It does not wait for that.
	Preempt func(ctx context.Context, pod *PodInfo, node string, victims []*PodInfo)
	// Nominate keeps room for a pod on a node, or, with "", none any more.
	Nominate func(pod *v1.Pod, node string)
	// Waiting finds a pod that Permit holds back; nil when there is none.
	Waiting func(uid types.UID) WaitingPod
	// EachWaiting calls f for every pod that Permit holds back.
	EachWaiting func(f func(WaitingPod))
}

// WaitingPod is a pod that Permit plugins hold back.
type WaitingPod interface {
	Pod() *v1.Pod
	// Allow is one plugin's consent; the pod goes on when all that waited have given it.
	Allow(plugin string)
	// Reject ends the wait and unreserves the pod.
	Reject(plugin, reason string)
}

// Devices is what dynamic resource allocation goes by, and how it says what it has decided.
type Devices struct {
	DeviceClaim   func(namespace, name string) (*resourcev1.ResourceClaim, bool)
	DeviceClass   func(name string) (*resourcev1.DeviceClass, bool)
	DeviceClasses func() []*resourcev1.DeviceClass
	Slices        func() []*resourcev1.ResourceSlice

	// DeviceClaimNow asks the API, not the cache.
	DeviceClaimNow func(ctx context.Context, namespace, name string) (*resourcev1.ResourceClaim, error)
	// UpdateDeviceClaim and UpdateDeviceClaimStatus write a claim, or its status, at its resourceVersion.
	UpdateDeviceClaim       func(ctx context.Context, c *resourcev1.ResourceClaim) (*resourcev1.ResourceClaim, error)
	UpdateDeviceClaimStatus func(ctx context.Context, c *resourcev1.ResourceClaim) (*resourcev1.ResourceClaim, error)
	// AwaitDevices calls check now and after every change of a claim, until it says done or fails, or ctx ends.
	AwaitDevices func(ctx context.Context, check func() (done bool, err error)) error
}
