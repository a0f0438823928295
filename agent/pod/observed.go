package pod

import (
	"time"

	v1 "k8s.io/api/core/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
)

// Desired is the desired state of one pod.
type Desired struct {
	Pod  *v1.Pod
	Stop *Stop // nil while the pod should run
}

// Stop describes why and how a pod must stop.
type Stop struct {
	// Delete removes everything of the pod and then reports PodGone. Otherwise the pod fails with
	// Reason and Message, and its container records stay.
	Delete          bool
	Reason, Message string
	Grace           time.Duration
	// Refused: the node rejected the pod, and nothing of it was started. Stored: the rejection
	// depends on the stored Node object, a newer version of which may be on its way.
	Refused, Stored bool
	// Disrupted sets the condition DisruptionTarget: the pod is stopped in favor of other pods.
	Disrupted bool
	// Kept: the stop is recorded on disk, so no later agent process runs the pod again, even if the
	// control plane never received it.
	Kept bool
	// Orphan: the remains belong to no pod of this node. They are removed without a report to the
	// control plane.
	Orphan bool
}

// Observed is the actual state of one pod: the runtime's view, and the results of the worker's
// actions.
type Observed struct {
	StartTime  time.Time                   // when the agent acknowledged the pod
	Since      time.Time                   // StartTime by this process's monotonic clock
	Deadline   time.Time                   // the pod's deletion timestamp by the same clock
	Listed     bool                        // the runtime was listed; if false, nothing is started or reported gone
	Sandboxes  []Sandbox                   // newest first
	Early      string                      // first sandbox while its network is set up; containers can be created in it
	Containers []Container                 // sorted by name, then newest first
	Volumes    Volumes                     // prepared volumes
	Devices    Devices                     // allocated by device plugins and by claims
	Images     map[string]Image            // by container name
	Failures   map[string]Failure          // last failure of a retried action, by action key
	Probes     map[string]agent.ProbeState // by container ID
	Killed     map[string]string           // by container ID: why the worker stopped the container
	Busy       map[string]Busy             // running actions, by action key
	Resize     Resize                      // state of a resize
	Spare      bool                        // disk pressure: remove unneeded records of ended containers
	Settled    map[string]bool             // keys of finished actions that are not repeated: stopped sandboxes, the gate
}

// Sandbox is one sandbox of the pod.
type Sandbox struct {
	ID      string
	Attempt uint32
	Ready   bool
	IPs     []string
	HostNet bool
	Created time.Time
	Born    time.Time // Created by this process's monotonic clock
}

// State is a container's state.
type State int

// The container states of the CRI.
const (
	Created State = iota
	Running
	Exited
	Unknown
)

func (s State) String() string {
	return [...]string{"created", "running", "exited", "unknown"}[s]
}

// Container is one instance of a container.
type Container struct {
	ID, Sandbox, Name string
	Attempt           uint32 // number of earlier restarts
	State             State
	Created           time.Time
	Started           time.Time
	Finished          time.Time
	Began, Ended      time.Time     // Started and Finished by this process's monotonic clock
	Ran               time.Duration // how long an ended instance ran, by the same clock
	ExitCode          int32
	Signal            int32
	Reason, Message   string
	Image, ImageID    string
	Limits            *cri.LinuxContainerResources // current limits; nil: the runtime does not report them
	Hash              string                       // hash of the spec from which it was created
	Delay             time.Duration                // restart delay before this instance; -1 = first instance, or after a reset
}

// Devices is the state of the devices that were allocated to the pod. Missing refers to device
// plugins only, the other fields also to resource claims.
type Devices struct {
	Missing bool                           // the pod requests devices that are not allocated yet
	Held    bool                           // the pod has devices
	Health  map[string][]v1.ResourceStatus // health of the allocated devices, by container name
}

// Volumes reports whether the pod's volumes are prepared.
type Volumes struct {
	Mounted bool // mounted by this agent process
	Away    bool // unmounted by this agent process
}

// Image is the result of looking up one container's image.
type Image struct {
	Ref     string // reference for CreateContainer; "" while the image is not present
	Attempt uint32 // attempt number of the instance for which it was looked up
}

// Failure is the last failure of an action.
type Failure struct {
	Reason  string // reason of the container's waiting state
	Message string
	Count   int // failures in a row
	At      time.Time
	Retry   time.Time
	Attempt uint32 // attempt number of the failed instance
}

// Busy is a running action.
type Busy struct {
	Kind      Kind
	Since     time.Time
	Until     time.Time // for KillContainer: when SIGKILL is sent
	Cancelled bool
}

// sandbox returns the current sandbox if it is ready and has its network.
func (o *Observed) sandbox() (Sandbox, bool) {
	if len(o.Sandboxes) > 0 && o.Sandboxes[0].Ready && (o.Sandboxes[0].HostNet || len(o.Sandboxes[0].IPs) > 0) {
		return o.Sandboxes[0], true
	}
	return Sandbox{}, false
}

// newest returns the newest instance of a container.
func (o *Observed) newest(name string) (Container, bool) {
	for _, c := range o.Containers {
		if c.Name == name {
			return c, true
		}
	}
	return Container{}, false
}

// previous returns the second newest instance of a container.
func (o *Observed) previous(name string) (Container, bool) {
	seen := false
	for _, c := range o.Containers {
		if c.Name == name {
			if seen {
				return c, true
			}
			seen = true
		}
	}
	return Container{}, false
}

func (o *Observed) busy(key string) bool {
	_, ok := o.Busy[key]
	return ok
}

// anyRunning reports whether any container may still run.
func (o *Observed) anyRunning() bool {
	for _, c := range o.Containers {
		if c.State == Running || c.State == Unknown {
			return true
		}
	}
	return false
}
