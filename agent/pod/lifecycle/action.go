package lifecycle

import (
	"fmt"
	"time"
)

// Kind is the type of an action.
type Kind int

// The kinds of actions, in the order of a pod's life.
const (
	AllocateDevices Kind = iota // allocate devices from the node's device plugins
	MountVolumes                // prepare all volumes
	CreateSandbox               // create the network namespace, the address and the pause process
	EnsureImage                 // find the container's image on the node, or pull it
	StartContainer              // create and start the container, then run its postStart hook
	KillContainer               // run the preStop hook, then SIGTERM, then SIGKILL
	RemoveContainer             // remove an ended instance from the runtime, with its log
	AwaitGate                   // wait at most one second until no proxy routes to the pod
	StopSandbox                 // remove the network, stop pause
	UnmountVolumes
	RemoveSandbox  // remove the sandbox from the runtime, with its containers
	ReportGone     // report that nothing is left of the pod
	Cancel         // cancel the running action with the key Target
	RefreshVolumes // rewrite changed projected volumes; the worker adds it, Step never plans it
	ResizePod      // apply the granted resources to the pod's cgroups
)

// String returns the name of the kind for logs and for golden files of tests.
func (k Kind) String() string {
	return [...]string{"allocate-devices", "mount-volumes", "create-sandbox", "ensure-image", "start", "kill", "remove",
		"await-gate", "stop-sandbox", "unmount-volumes", "remove-sandbox", "report-gone", "cancel", "refresh-volumes",
		"resize"}[k]
}

// Action is one operation on a pod. The actions of one plan are independent of each other.
type Action struct {
	Kind      Kind
	Container string        // container name
	ID        string        // ID of the container or sandbox; for StartContainer, of the sandbox
	Attempt   uint32        // attempt number of the new container or sandbox
	Delay     time.Duration // StartContainer: the restart delay that preceded it
	Grace     time.Duration // KillContainer: the grace period
	Message   string        // KillContainer: the message of its event
	Target    string        // Cancel: the key of the action to cancel
}

// Key identifies the object on which an action works, for example a container. Two actions with the
// same key never run at the same time.
func (a Action) Key() string {
	switch a.Kind {
	case MountVolumes, UnmountVolumes, RefreshVolumes:
		return "volumes"
	case CreateSandbox:
		return "sandbox"
	case EnsureImage:
		return "image/" + a.Container
	case StartContainer:
		return "container/" + a.Container
	case KillContainer, RemoveContainer:
		return "end/" + a.ID
	case StopSandbox, RemoveSandbox:
		return "sandbox/" + a.ID
	case AwaitGate:
		return "gate"
	case ResizePod:
		return "resize"
	case Cancel:
		return "cancel/" + a.Target
	default:
		return a.Kind.String()
	}
}

// String formats the action for logs and for golden files of tests.
func (a Action) String() string {
	switch a.Kind {
	case CreateSandbox:
		return fmt.Sprintf("%s #%d", a.Kind, a.Attempt)
	case EnsureImage:
		return fmt.Sprintf("%s %s#%d", a.Kind, a.Container, a.Attempt)
	case StartContainer:
		s := fmt.Sprintf("%s %s#%d in %s", a.Kind, a.Container, a.Attempt, a.ID)
		if a.Delay >= 0 {
			s += fmt.Sprintf(" after %s", a.Delay)
		}
		return s
	case KillContainer:
		return fmt.Sprintf("%s %s (%s) within %s: %s", a.Kind, a.ID, a.Container, a.Grace, a.Message)
	case RemoveContainer:
		return fmt.Sprintf("%s %s (%s#%d)", a.Kind, a.ID, a.Container, a.Attempt)
	case StopSandbox, RemoveSandbox, ResizePod:
		return fmt.Sprintf("%s %s", a.Kind, a.ID)
	case Cancel:
		return fmt.Sprintf("%s %s", a.Kind, a.Target)
	default:
		return a.Kind.String()
	}
}

// Plan is the result of Step: the actions to start now, and when to call Step again.
type Plan struct {
	Actions []Action
	Wake    time.Time // when to plan again even if nothing changes; zero = never
	Done    bool      // nothing is left to do: the worker may exit
}

func (p *Plan) addAction(action Action) { p.Actions = append(p.Actions, action) }

// WakeAt makes Step run again at wake at the latest: it sets Wake to wake unless Wake is earlier.
// It ignores a zero time.
func (p *Plan) WakeAt(wake time.Time) {
	if !wake.IsZero() && (p.Wake.IsZero() || wake.Before(p.Wake)) {
		p.Wake = wake
	}
}
