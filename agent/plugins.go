package agent

import (
	"context"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Plugins gives out the devices of device plugins, which a node tells of as extended resources.
type Plugins interface {
	// Manages says that the resource is that of a plugin which registered in this life of the agent or in the one before.
	Manages(resource v1.ResourceName) bool
	// Allocate gives the containers of a pod the devices that they ask for: all or none. What a pod has been given it
	// keeps, so that the call may be repeated. An error says why the pod cannot run here.
	Allocate(ctx context.Context, pod *v1.Pod) error
	// Container is what a container of the pod is made with; its devices are prepared for it, where the plugin wants that.
	Container(ctx context.Context, pod *v1.Pod, container string) (PluginDevices, error)
	// Health tells of the devices of a pod's containers, by the containers' names, each in order; nil when the pod has none.
	Health(pod types.UID) map[string][]v1.ResourceStatus
	// Release takes back what a pod was given; safe when that is nothing.
	Release(pod types.UID) error
	// Pods lists the pods that have devices, for clean-up after a crash.
	Pods() ([]types.UID, error)
	// Changes has a value when devices, their health or their owners have changed, until ctx ends.
	Changes(ctx context.Context) <-chan struct{}
}

// PluginDevices is what the devices of plugins add to a container.
type PluginDevices struct {
	Envs        []*cri.KeyValue
	Mounts      []*cri.Mount
	Devices     []*cri.Device
	CDI         []*cri.CDIDevice
	Annotations map[string]string
}

// PluginDevice is one device of a plugin.
type PluginDevice struct {
	ID    string
	Nodes []int64 // the NUMA nodes that it is near to; none = not known
}
