package agent

import (
	"context"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Plugins allocates the devices of device plugins to pods. A node advertises these devices as
// extended resources.
type Plugins interface {
	// Manages reports whether a plugin has registered the resource with this agent process or the
	// previous one.
	Manages(resource v1.ResourceName) bool
	// Allocate allocates the devices that the containers of a pod request: all of them or none. A
	// repeated call keeps the devices that are already allocated to the pod. An error states why
	// the pod cannot run on this node.
	Allocate(ctx context.Context, pod *v1.Pod) error
	// Container returns the settings that the plugins add to a container of the pod. It calls
	// PreStartContainer of the plugins that require it.
	Container(ctx context.Context, pod *v1.Pod, container string) (PluginDevices, error)
	// Health returns the health of the devices of a pod by container name, sorted by resource.
	// It returns nil if the pod has no devices.
	Health(pod types.UID) map[string][]v1.ResourceStatus
	// Release releases the devices of a pod. It succeeds if the pod has no devices.
	Release(pod types.UID) error
	// Pods lists the pods that have devices, for the cleanup after a crash.
	Pods() ([]types.UID, error)
	// Changes returns a channel that is signaled until ctx ends when devices, their health or their
	// allocation have changed.
	Changes(ctx context.Context) <-chan struct{}
}

// PluginDevices are the settings that device plugins add to a container.
type PluginDevices struct {
	Envs        []*cri.KeyValue
	Mounts      []*cri.Mount
	Devices     []*cri.Device
	CDI         []*cri.CDIDevice
	Annotations map[string]string
}

// PluginDevice is one device of a device plugin that is allocated to a container.
type PluginDevice struct {
	ID    string
	Nodes []int64 // NUMA nodes close to the device; none = unknown
}
