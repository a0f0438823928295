package oci

import "fmt"

// SandboxState is where a sandbox is in its life.
//
//	        run ok            stop · pause or shim died
//	Creating ─────▶ Ready ──────────────────────────▶ NotReady
//	   │ run failed                                      │ remove
//	   ▼                                                 ▼
//	Removed ◀────────────────────────────────────────────┘
//
// What an agent finds in Creating after a crash was never answered: it is removed.
type SandboxState string

// The states of a sandbox. Removed is never stored.
const (
	SandboxCreating SandboxState = "creating"
	SandboxReady    SandboxState = "ready"
	SandboxNotReady SandboxState = "notready"
	SandboxRemoved  SandboxState = "removed"
)

// SandboxInput is what can happen to a sandbox.
type SandboxInput string

// The inputs of a sandbox.
const (
	SandboxRan     SandboxInput = "ran"     // everything of RunPodSandbox succeeded
	SandboxFailed  SandboxInput = "failed"  // RunPodSandbox failed and was undone
	SandboxLost    SandboxInput = "lost"    // pause or the shim died
	SandboxStop    SandboxInput = "stop"    // StopPodSandbox
	SandboxRemove  SandboxInput = "remove"  // RemovePodSandbox; stops first
	SandboxCreate  SandboxInput = "create"  // CreateContainer
	SandboxRecover SandboxInput = "recover" // an agent has started
)

// Next is the sandbox's transition table. An error means that the input is
// refused in that state and changes nothing.
func (s SandboxState) Next(in SandboxInput) (SandboxState, error) {
	switch s {
	case SandboxCreating:
		switch in {
		case SandboxRan:
			return SandboxReady, nil
		case SandboxFailed, SandboxRecover, SandboxRemove:
			return SandboxRemoved, nil
		case SandboxStop, SandboxLost:
			return SandboxNotReady, nil
		}
	case SandboxReady:
		switch in {
		case SandboxCreate, SandboxRecover:
			return SandboxReady, nil
		case SandboxStop, SandboxLost:
			return SandboxNotReady, nil
		case SandboxRemove:
			return SandboxRemoved, nil
		}
	case SandboxNotReady:
		switch in {
		case SandboxStop, SandboxLost, SandboxRecover:
			return SandboxNotReady, nil
		case SandboxRemove:
			return SandboxRemoved, nil
		}
	case SandboxRemoved:
		switch in {
		case SandboxStop, SandboxRemove, SandboxLost, SandboxFailed:
			return SandboxRemoved, nil
		}
	}
	return s, fmt.Errorf("sandbox is %s: cannot %s", s, in)
}

// ContainerState is where a container is in its life.
//
//	Creating ──▶ Created ──▶ Running ──▶ Exited ──▶ (removed)
//	                └────────────────────▲
type ContainerState string

// The states of a container.
const (
	ContainerCreating ContainerState = "creating"
	ContainerCreated  ContainerState = "created"
	ContainerRunning  ContainerState = "running"
	ContainerExited   ContainerState = "exited"
)

// reason is what Kubernetes shows for an ended container.
func reason(code int32, oom bool) string {
	switch {
	case oom && code != 0:
		return "OOMKilled"
	case code == 0:
		return "Completed"
	}
	return "Error"
}
