package pod

import (
	"context"
	"log/slog"
	"maps"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/pod/admission"
	"keelson.dev/keelson/agent/pod/criconfig"
	"keelson.dev/keelson/agent/pod/diskusage"
	"keelson.dev/keelson/agent/pod/lifecycle"
	"keelson.dev/keelson/agent/pod/podevents"
	"keelson.dev/keelson/internal/saturate"
)

// requestsDevices reports whether a container requests devices that a device plugin manages.
func (c *Config) requestsDevices(pod *v1.Pod) (requested bool) {
	if c.Deps.Plugins == nil {
		return false
	}
	lifecycle.ForEachContainer(pod, func(spec *v1.Container) {
		for name := range spec.Resources.Limits {
			requested = requested || admission.IsExtendedResource(string(name)) && c.Deps.Plugins.Manages(name)
		}
	})
	return requested
}

// withoutPluginResources returns the node without the resources of device plugins in its
// allocatable resources: Plugins.Allocate checks later whether enough devices are free.
func (c *Config) withoutPluginResources(node *v1.Node) *v1.Node {
	if c.Deps.Plugins == nil {
		return node
	}
	out := *node
	out.Status.Allocatable = maps.Clone(node.Status.Allocatable)
	maps.DeleteFunc(out.Status.Allocatable, func(name v1.ResourceName, _ resource.Quantity) bool {
		return admission.IsExtendedResource(string(name)) && c.Deps.Plugins.Manages(name)
	})
	return &out
}

// Config is the configuration of a Set. Fields are required unless their comment names a default.
type Config struct {
	Identity Identity
	Paths    agent.Paths
	Deps     Dependencies
	// Containers are the settings of the node's containers. The Set fills in the fields that Config
	// has too: paths, objects and the node's resources.
	Containers criconfig.Config

	// WrittenDirs returns the directories on disk that a container writes to, except volumes and
	// logs. The directories own belong to this container, and other containers of the pod may write
	// to shared as well. If nil, only volumes and logs are measured.
	WrittenDirs func(containerID string) (own, shared []string)
	// VolumeDisk returns the capacity and free space of those volumes for which statfs of the mount
	// path is wrong. ok is false for all other volumes. On an error the values are unknown. If nil,
	// statfs is used for all volumes.
	VolumeDisk func(ctx context.Context, pod types.UID, volume string) (disk agent.Disk, ok bool, err error)

	// Node returns the node with the labels, taints and allocatable resources that the agent
	// reports next. nil admits every pod.
	Node    func() *v1.Node
	Ceiling *admission.Ceiling // highest Pod Security level of pods; nil: no restriction
	// StartUnconfirmedPods starts the pods of the stored checkpoint after a reboot, before a
	// control plane has confirmed that they are still assigned to this node.
	StartUnconfirmedPods bool

	ResyncInterval time.Duration // interval of a full resync; 0 = 30 s
	Log            *slog.Logger  // may be nil
	Now            func() time.Time

	walkTurns diskusage.Turns // limits concurrent disk measurements
}

// Identity is the identity of the node.
type Identity struct {
	NodeName    string
	BootID      string   // boot ID of the machine
	HostIPs     []string // the first is the primary address
	RuntimeName string   // scheme of container IDs; "" = "keelson"
}

// Dependencies are the parts of the node that the workers use.
type Dependencies struct {
	Runtime  agent.Runtime
	Images   agent.Images
	Volumes  agent.Volumes
	Devices  agent.Devices
	Plugins  agent.Plugins // nil: no device plugins
	Objects  agent.Objects
	Reporter agent.Reporter
	Prober   agent.Prober
	Policies agent.PolicyGuard // nil: this agent does not enforce network policies
}

// admitPod runs all admission checks of the node for a pod.
func (c *Config) admitPod(pod *v1.Pod, others []*v1.Pod) *lifecycle.Stop {
	if refused := c.Ceiling.CheckPod(pod); refused != nil {
		return refused
	}
	if refused := admission.RejectUnsupported(pod); refused != nil {
		return refused
	}
	return admission.CheckNode(pod, others, c.withoutPluginResources(c.Node()))
}

func (c *Config) currentTime() time.Time {
	if c.Now == nil {
		return time.Now()
	}
	return c.Now()
}

func (c *Config) statusHost() lifecycle.Host {
	return lifecycle.Host{IPs: c.Identity.HostIPs, RuntimeName: c.Identity.RuntimeName}
}

func (c *Config) nodeAllocatable() v1.ResourceList {
	if c.Node == nil {
		return nil
	}
	return c.Node().Status.Allocatable
}

func (c *Config) nodeMemory() int64 {
	if c.Node == nil {
		return 0
	}
	return saturate.Value(c.Node().Status.Capacity.Memory())
}

// newBuilder returns the builder of a pod's CRI configurations.
func (c *Config) newBuilder(events *podevents.Recorder) *criconfig.Builder {
	settings := c.Containers
	settings.Paths, settings.Objects = c.Paths, c.Deps.Objects
	settings.Allocatable, settings.Memory = c.nodeAllocatable, c.nodeMemory
	return criconfig.New(settings, func(pod *v1.Pod, reason, message string) {
		events.Emit(pod, "", v1.EventTypeWarning, reason, message)
	})
}
