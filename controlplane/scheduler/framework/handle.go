package framework

import (
	"context"

	v1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Handle gives plugins access to the cluster and to the scheduler, like framework.Handle of
// kube-scheduler. Tests set only the fields that they need.
type Handle struct {
	// Volumes looks up storage objects.
	Volumes Volumes
	Devices Devices

	// Bind binds the pod to the node by creating its Binding through the API.
	Bind func(ctx context.Context, pod *v1.Pod, node string) error
	// UpdateClaim and UpdateVolume update a PersistentVolumeClaim or a PersistentVolume through the
	// API. The update fails if the object's resourceVersion is not the one of the argument.
	UpdateClaim  func(ctx context.Context, c *v1.PersistentVolumeClaim) (*v1.PersistentVolumeClaim, error)
	UpdateVolume func(ctx context.Context, v *v1.PersistentVolume) (*v1.PersistentVolume, error)
	// AwaitVolumes calls check at once and after every change of a storage object, until check
	// returns true or an error, or ctx ends.
	AwaitVolumes func(ctx context.Context, check func() (done bool, err error)) error
	// Fits runs the profile's Filter plugins for one node. The profile's PreFilter plugins must
	// have run in the cycle before. It returns nil if the node fits the cycle's pod.
	Fits func(ctx context.Context, c *Cycle, n *NodeInfo) *Status
	// Extenders are the external services of the profile. The plugin DefaultPreemption lets them
	// change the pods to evict.
	Extenders []Extender
	// Budgets returns all PodDisruptionBudgets. Pod returns the current version of a pod.
	Budgets func() []*policyv1.PodDisruptionBudget
	Pod     func(namespace, name string) (*v1.Pod, bool)
	// Group returns the scheduling state of a PodGroup. It may be called while other locks of the
	// scheduler are held.
	Group func(key GroupKey) Group
	// VolumeLimits returns, by CSI driver, how many volumes can be attached to the node. Drivers
	// without a limit are not included.
	VolumeLimits func(node string) map[string]int32
	// Preempt makes node the nominated node of the pod and evicts the victims in the background. It
	// does not wait for the evictions.
	Preempt func(ctx context.Context, pod *PodInfo, node string, victims []*PodInfo)
	// Nominate sets the nominated node of a pod that preemption has reserved resources for; ""
	// clears it.
	Nominate func(pod *v1.Pod, node string)
	// Waiting returns the pod with the given UID if Permit plugins delay its binding, and otherwise
	// nil.
	Waiting func(uid types.UID) WaitingPod
}

// WaitingPod is a pod for which a node was chosen, but whose binding is delayed by Permit plugins.
type WaitingPod interface {
	Pod() *v1.Pod
	// Allow ends the delay that the given Permit plugin has requested. The pod is bound when no
	// plugin delays it any more.
	Allow(plugin string)
	// Reject cancels the binding for the given reason. The pod loses its node and returns to the
	// queue.
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
	// UpdateDeviceClaim and UpdateDeviceClaimStatus update a ResourceClaim or its status through
	// the API. The update fails if the claim's resourceVersion is not the one of the argument.
	UpdateDeviceClaim       func(ctx context.Context, c *resourcev1.ResourceClaim) (*resourcev1.ResourceClaim, error)
	UpdateDeviceClaimStatus func(ctx context.Context, c *resourcev1.ResourceClaim) (*resourcev1.ResourceClaim, error)
	// AwaitDevices calls check at once and after every change of a ResourceClaim, until check
	// returns true or an error, or ctx ends.
	AwaitDevices func(ctx context.Context, check func() (done bool, err error)) error
}
