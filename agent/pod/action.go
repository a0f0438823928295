package pod

import (
	"fmt"
	"time"
)

// Kind is what an action does.
type Kind int

// The actions, in the order of a pod's life.
const (
	AllocateDevices Kind = iota // have the node's device plugins give out devices
	MountVolumes                // prepare all volumes
	CreateSandbox               // network namespace, address, pause
	EnsureImage                 // look the container's image up, or pull it
	StartContainer              // create, start, postStart hook
	KillContainer               // preStop hook, SIGTERM, SIGKILL
	RemoveContainer             // the record of an ended instance, and its log
	AwaitGate                   // until no proxy routes to the pod, a second at most
	StopSandbox                 // network and pause away
	UnmountVolumes
	RemoveSandbox  // the record, and those of its containers
	ReportGone     // nothing is left
	Cancel         // end the action named by Target early
	RefreshVolumes // rewrite projected content that changed; the worker's own, never planned by Step
	ResizePod      // give the pod's cgroups the resources that were granted
)

func (k Kind) String() string {
	return [...]string{"allocate-devices", "mount-volumes", "create-sandbox", "ensure-image", "start", "kill", "remove", "await-gate", "stop-sandbox",
		"unmount-volumes", "remove-sandbox", "report-gone", "cancel", "refresh-volumes", "resize"}[k]
}

// Action is one thing to do. Actions of one plan are independent of each other.
type Action struct {
	Kind      Kind
	Container string        // name
	ID        string        // of the container or sandbox acted on; for a start, of the sandbox
	Attempt   uint32        // of the container or sandbox to be made
	Delay     time.Duration // of a start: the restart delay it comes after
	Grace     time.Duration // of a kill
	Why       string        // of a kill: its event's message
	Target    string        // of a cancel: the key
}

// Key names what an action works on: two actions with one key never run at once.
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
		return fmt.Sprintf("%s %s (%s) within %s: %s", a.Kind, a.ID, a.Container, a.Grace, a.Why)
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

// Plan is Step's answer.
type Plan struct {
	Actions []Action
	Wake    time.Time // when to look again although nothing happened; zero = never
	Done    bool      // nothing is left to do for ever: the worker may end
}

func (p *Plan) add(a Action) { p.Actions = append(p.Actions, a) }

// wakeAt keeps the earliest time.
func (p *Plan) wakeAt(t time.Time) {
	if !t.IsZero() && (p.Wake.IsZero() || t.Before(p.Wake)) {
		p.Wake = t
	}
}
