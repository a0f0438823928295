package oci

import "fmt"

// SandboxState is the state of a sandbox.
//
//	         built            network            stop · pause or shim died
//	Creating ─────▶ Prepared ────────▶ Ready ──────────────────────────▶ NotReady
//	   │ run failed    │ run failed                                        │ remove
//	   ▼               ▼                                                   ▼
//	Removed ◀──────────┴───────────────────────────────────────────────────┘
//
// Containers can be created from Prepared on, and started in Ready. If an agent finds a sandbox in
// Creating or Prepared after a crash, RunPodSandbox never returned, and the sandbox is removed.
type SandboxState string

// The states of a sandbox. Removed is never stored.
const (
	SandboxCreating SandboxState = "creating"
	SandboxPrepared SandboxState = "prepared" // everything but the network; never stored
	SandboxReady    SandboxState = "ready"
	SandboxNotReady SandboxState = "notready"
	SandboxRemoved  SandboxState = "removed"
)

// SandboxInput is an event or an operation that may change a sandbox's state.
type SandboxInput string

// The inputs of NextState.
const (
	SandboxBuilt   SandboxInput = "built"   // everything but the network is created
	SandboxRan     SandboxInput = "ran"     // RunPodSandbox succeeded
	SandboxFailed  SandboxInput = "failed"  // RunPodSandbox failed, and its changes were undone
	SandboxLost    SandboxInput = "lost"    // pause or the shim died
	SandboxStop    SandboxInput = "stop"    // StopPodSandbox
	SandboxRemove  SandboxInput = "remove"  // RemovePodSandbox, which stops the sandbox first
	SandboxCreate  SandboxInput = "create"  // CreateContainer
	SandboxRecover SandboxInput = "recover" // an agent process has started
)

// NextState returns the state after an input. If the input is not allowed in state s, it returns s
// and an error.
func (s SandboxState) NextState(input SandboxInput) (SandboxState, error) {
	switch s {
	case SandboxCreating:
		switch input {
		case SandboxBuilt:
			return SandboxPrepared, nil
		case SandboxFailed, SandboxRecover, SandboxRemove:
			return SandboxRemoved, nil
		case SandboxStop, SandboxLost:
			return SandboxNotReady, nil
		}
	case SandboxPrepared:
		switch input {
		case SandboxRan:
			return SandboxReady, nil
		case SandboxCreate:
			return SandboxPrepared, nil
		case SandboxFailed, SandboxRecover, SandboxRemove:
			return SandboxRemoved, nil
		case SandboxStop, SandboxLost:
			return SandboxNotReady, nil
		}
	case SandboxReady:
		switch input {
		case SandboxCreate, SandboxRecover:
			return SandboxReady, nil
		case SandboxStop, SandboxLost:
			return SandboxNotReady, nil
		case SandboxRemove:
			return SandboxRemoved, nil
		}
	case SandboxNotReady:
		switch input {
		case SandboxStop, SandboxLost, SandboxRecover:
			return SandboxNotReady, nil
		case SandboxRemove:
			return SandboxRemoved, nil
		}
	case SandboxRemoved:
		switch input {
		case SandboxStop, SandboxRemove, SandboxLost, SandboxFailed:
			return SandboxRemoved, nil
		}
	}
	return s, fmt.Errorf("sandbox is %s: cannot %s", s, input)
}

// ContainerState is the state of a container.
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

// terminationReason returns the termination reason that Kubernetes shows for an exited container.
func terminationReason(code int32, oom bool) string {
	switch {
	case oom && code != 0:
		return "OOMKilled"
	case code == 0:
		return "Completed"
	}
	return "Error"
}
