package agent

import v1 "k8s.io/api/core/v1"

// IsTerminalPhase reports whether the phase is Succeeded or Failed. A terminal phase does not
// change again.
func IsTerminalPhase(phase v1.PodPhase) bool {
	return phase == v1.PodSucceeded || phase == v1.PodFailed
}
