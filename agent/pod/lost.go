package pod

import (
	"strings"

	v1 "k8s.io/api/core/v1"
)

// After a power failure or reboot, the runtime may have no record of an instance. The pod's status
// is then the only source: the instance has ended as its status shows, or in an unknown way. It
// counts like any other ended instance.

// lost returns the ended instance recorded in the pod's status, for a container that the runtime
// does not know.
func lost(pod *v1.Pod, name string) (Container, bool) {
	st, ok := lastStatus(&pod.Status, name)
	if !ok || st.ContainerID == "" {
		return Container{}, false
	}
	_, id, _ := strings.Cut(st.ContainerID, "://")
	return Container{ID: id, Name: name, Attempt: uint32(st.RestartCount), State: Exited, ExitCode: lostEnd(&st).ExitCode, Delay: noDelay}, true
}

// lostEnd returns the terminated state of the instance in st.
func lostEnd(st *v1.ContainerStatus) *v1.ContainerStateTerminated {
	if t := st.State.Terminated; t != nil {
		return t
	}
	// While a container waits for a restart, the previous instance is in LastTerminationState.
	if t := st.LastTerminationState.Terminated; t != nil && st.State.Waiting != nil && t.ContainerID == st.ContainerID {
		return t
	}
	return &v1.ContainerStateTerminated{Reason: "ContainerStatusUnknown", ExitCode: 137, ContainerID: st.ContainerID,
		Message: "The container could not be located when the pod was terminated"}
}

// latest returns the newest instance of a container. If the runtime knows none, it returns the
// instance in the pod's status.
func latest(pod *v1.Pod, o *Observed, name string) (Container, bool) {
	if c, ok := o.newest(name); ok {
		return c, true
	}
	return lost(pod, name)
}

// again reports whether to start a container of which the runtime knows no instance. Init
// containers run in each new sandbox. Other containers run if they never ran, or if the restart
// policy restarts the lost instance.
func again(pod *v1.Pod, spec *v1.Container) bool {
	c, ran := lost(pod, spec.Name)
	return !ran || isInit(pod, spec.Name) || restarts(pod, spec, c, "")
}
