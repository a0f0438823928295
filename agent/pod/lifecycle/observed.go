package lifecycle

import (
	"time"

	v1 "k8s.io/api/core/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
)

// Desired is a pod as it is assigned to the node, and whether it must stop.
type Desired struct {
	Pod  *v1.Pod
	Stop *Stop // nil while the pod should run
}

// Stop describes why and how a pod must stop.
type Stop struct {
	// Delete is true if the pod is deleted: everything of the pod is removed, and then it is
	// reported gone. If false, the pod fails with Reason and Message, and its container records
	// stay.
	Delete          bool
	Reason, Message string
	Grace           time.Duration
	// Rejected is true if the node rejected the pod before anything of it was started. StoredNode
	// is true if the rejection depends on the stored Node object, and a newer version of this
	// object might admit the pod.
	Rejected, StoredNode bool
	// Disrupted is true if the pod is stopped in favor of other pods. It sets the condition
	// DisruptionTarget.
	Disrupted bool
	// Recorded is true if the stop is stored on disk. A later agent process then does not run the
	// pod again, even if the control plane never received the stop.
	Recorded bool
	// Orphan is true if the sandboxes, containers or volumes belong to no pod of this node. They
	// are removed without a report to the control plane.
	Orphan bool
}

// Observed is the actual state of one pod: the runtime's view, and the results of the worker's
// actions.
type Observed struct {
	Times     PodTimes
	Listed    bool      // the runtime was listed; if false, nothing is started or reported gone
	Sandboxes []Sandbox // newest first
	// first sandbox while its network is set up; containers can be created in it
	EarlySandbox string
	Containers   []Container                 // sorted by name, then newest first
	Volumes      Volumes                     // prepared volumes
	Devices      Devices                     // allocated by device plugins and by claims
	Images       map[string]Image            // image of each container, by container name
	Failures     map[string]Failure          // last failure of a retried action, by action key
	Probes       map[string]agent.ProbeState // probe state of each container, by container ID
	Killed       map[string]string           // by container ID: why the worker stopped the container
	Busy         map[string]RunningAction    // running actions, by action key
	Resize       Resize                      // state of a resize
	ReclaimDisk  bool                        // under disk pressure: remove the records of ended containers
	// keys of finished actions that are not repeated: StopSandbox, AwaitGate and ReportGone
	Finished map[string]bool
}

// PodTimes are the times at which a pod was acknowledged and must be deleted.
type PodTimes struct {
	Start        time.Time // when the agent acknowledged the pod
	Acknowledged time.Time // Start by this process's monotonic clock
	Deadline     time.Time // the pod's deletion timestamp by this process's monotonic clock
}

// Sandbox is one of the pod's sandboxes, as reported by the runtime.
type Sandbox struct {
	ID               string
	Attempt          uint32
	Ready            bool
	IPs              []string
	HostNet          bool
	Created          time.Time
	MonotonicCreated time.Time // Created by this process's monotonic clock
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

// String returns the lower-case name of the state.
func (s State) String() string {
	return [...]string{"created", "running", "exited", "unknown"}[s]
}

// Container is one instance of a container, as reported by the runtime. Each restart creates a new
// instance.
type Container struct {
	ID, Sandbox, Name string
	Attempt           uint32 // number of earlier restarts
	State             State
	Times             InstanceTimes
	Monotonic         MonotonicTimes
	Process           InstanceProcess
	ExitCode          int32
	Reason, Message   string
	Image             InstanceImage
	Limits            *cri.LinuxContainerResources // current limits; nil: the runtime does not report them
	Hash              string                       // hash of the spec from which it was created
	// restart delay before this instance; -1 = first instance, or after a reset
	Delay time.Duration
}

// InstanceProcess describes the first process of an instance. Its fields are nil if the runtime
// does not report them.
type InstanceProcess struct {
	User       *v1.ContainerUser // the identity with which the process starts
	StopSignal *v1.Signal        // the signal that stops it
}

// InstanceTimes are the wall-clock times of an instance that the runtime reports. The time of an
// event that has not happened is zero.
type InstanceTimes struct {
	Created, Started, Finished time.Time
}

// MonotonicTimes are the times of an instance by this process's monotonic clock; zero if unknown.
type MonotonicTimes struct {
	Start, End time.Time
	Ran        time.Duration // how long an ended instance ran
}

// InstanceImage is the image of an instance.
type InstanceImage struct {
	Name string // image name in the spec from which the instance was created
	ID   string
}

// Devices is the state of the devices that are allocated to the pod by device plugins and by
// resource claims. Missing is about device plugins only.
type Devices struct {
	Missing bool                           // the pod requests devices that are not allocated yet
	Held    bool                           // the pod has devices
	Health  map[string][]v1.ResourceStatus // health of the allocated devices, by container name
}

// Volumes reports whether the pod's volumes are prepared.
type Volumes struct {
	Mounted   bool // mounted by this agent process
	Unmounted bool // unmounted by this agent process
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

// RunningAction is an action that has begun and not yet ended.
type RunningAction struct {
	Kind      Kind
	Since     time.Time
	Until     time.Time // for KillContainer: when SIGKILL is sent
	Cancelled bool
}

// ReadySandbox returns the newest sandbox, and true, if the sandbox is ready and has its network.
func (o *Observed) ReadySandbox() (Sandbox, bool) {
	if len(o.Sandboxes) > 0 && o.Sandboxes[0].Ready && (o.Sandboxes[0].HostNet || len(o.Sandboxes[0].IPs) > 0) {
		return o.Sandboxes[0], true
	}
	return Sandbox{}, false
}

// NewestInstance returns the newest instance of a container, or false if the runtime has no
// instance.
func (o *Observed) NewestInstance(name string) (Container, bool) {
	for _, c := range o.Containers {
		if c.Name == name {
			return c, true
		}
	}
	return Container{}, false
}

// previousInstance returns the second newest instance of a container, or false if the runtime has
// fewer than two instances.
func (o *Observed) previousInstance(name string) (Container, bool) {
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

// IsBusy reports whether an action with the key is running.
func (o *Observed) IsBusy(key string) bool {
	_, ok := o.Busy[key]
	return ok
}

// HasRunningContainer reports whether any container may still run.
func (o *Observed) HasRunningContainer() bool {
	for _, c := range o.Containers {
		if c.State == Running || c.State == Unknown {
			return true
		}
	}
	return false
}

// LimitGrace returns the Stop with a grace period of at most grace. If it shortens the grace
// period, it returns a copy.
func (s *Stop) LimitGrace(grace time.Duration) *Stop {
	if s.Grace <= grace {
		return s
	}
	short := *s
	short.Grace = grace
	return &short
}
