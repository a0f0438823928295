package pod

import (
	"time"

	v1 "k8s.io/api/core/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
)

// Desired is what should be of one pod.
type Desired struct {
	Pod  *v1.Pod
	Stop *Stop // nil while the pod should run
}

// Stop says why and how a pod has to end.
type Stop struct {
	// Delete: nothing may be left, and then PodGone is reported. Otherwise the
	// pod fails with Reason and Message and its records stay.
	Delete          bool
	Reason, Message string
	Grace           time.Duration
	// Refused: the node did not admit the pod; nothing of it was ever started. Stored: because of what the node's
	// stored object says, of which the newest state may be on its way.
	Refused, Stored bool
	// Disrupted: it goes for the sake of others, which its conditions say.
	Disrupted bool
	// Kept: this is on disk, so that no agent runs the pod again, whatever the control plane has heard.
	Kept bool
	// Orphan: what was found belongs to no pod of this node. It goes without a word to the control plane.
	Orphan bool
}

// Observed is what is: the runtime's view, and what the worker found out by acting.
type Observed struct {
	StartTime  time.Time                   // when the agent acknowledged the pod
	Since      time.Time                   // the same by this process's clock
	Deadline   time.Time                   // the pod's deletion timestamp, by the same
	Listed     bool                        // the runtime could be asked; nothing is started or reported gone otherwise
	Sandboxes  []Sandbox                   // newest first
	Early      string                      // the pod's first sandbox while its network is being attached: containers can be created in it
	Containers []Container                 // of each name newest first
	Volumes    Volumes                     // prepared volumes
	Devices    Devices                     // of device plugins, and by claims
	Images     map[string]Image            // by container name
	Failures   map[string]Failure          // by action key: the last failure of what is retried
	Probes     map[string]agent.ProbeState // by container id
	Killed     map[string]string           // containers stopped by the worker, and why, by id
	Busy       map[string]Busy             // actions under way, by key
	Resize     Resize                      // of what was granted and what is not yet in effect
	Spare      bool                        // the disk is short: what is not needed of containers that have ended goes
	Settled    map[string]bool             // keys of actions that need no repetition: sandboxes stopped, the gate
}

// Sandbox is one sandbox of the pod.
type Sandbox struct {
	ID      string
	Attempt uint32
	Ready   bool
	IPs     []string
	HostNet bool
	Created time.Time
	Born    time.Time // the same by this process's clock
}

// State is a container's state.
type State int

// The states of the CRI.
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
	Attempt           uint32 // how often the container was restarted before
	State             State
	Created           time.Time
	Started           time.Time
	Finished          time.Time
	Began, Ended      time.Time     // Started and Finished by this process's clock
	Ran               time.Duration // of one that has ended, by the same
	ExitCode          int32
	Signal            int32
	Reason, Message   string
	Image, ImageID    string
	Limits            *cri.LinuxContainerResources // those it has now; nil: the runtime does not tell
	Hash              string                       // of the spec it was created from
	Delay             time.Duration                // the restart delay it was created after; -1 = the first, or after a reset
}

// Devices is what the pod has of the node's device plugins and, but for Missing, by its claims.
type Devices struct {
	Missing bool                           // it asks for some that have yet to be given to it
	Held    bool                           // it has some
	Health  map[string][]v1.ResourceStatus // of those, by container
}

// Volumes says whether the pod's volumes are prepared.
type Volumes struct {
	Mounted bool // by this life of the agent
	Away    bool // taken away, by this life of the agent
}

// Image is what is known of one container's image.
type Image struct {
	Ref     string // what to create the container from; "" while not there
	Attempt uint32 // the instance it was looked up for
}

// Failure is the last failure of an action.
type Failure struct {
	Reason  string // as in a container's waiting state
	Message string
	Count   int // in a row
	At      time.Time
	Retry   time.Time
	Attempt uint32 // the instance that failed
}

// Busy is an action under way.
type Busy struct {
	Kind      Kind
	Since     time.Time
	Until     time.Time // for a stop: when SIGKILL comes
	Cancelled bool
}

// sandbox returns the sandbox that containers may run in.
func (o *Observed) sandbox() (Sandbox, bool) {
	if len(o.Sandboxes) > 0 && o.Sandboxes[0].Ready && (o.Sandboxes[0].HostNet || len(o.Sandboxes[0].IPs) > 0) {
		return o.Sandboxes[0], true
	}
	return Sandbox{}, false
}

// newest returns the latest instance of a container.
func (o *Observed) newest(name string) (Container, bool) {
	for _, c := range o.Containers {
		if c.Name == name {
			return c, true
		}
	}
	return Container{}, false
}

// previous returns the instance before the latest.
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

// anyRunning says whether anything may still execute.
func (o *Observed) anyRunning() bool {
	for _, c := range o.Containers {
		if c.State == Running || c.State == Unknown {
			return true
		}
	}
	return false
}
