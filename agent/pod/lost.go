package pod

import (
	"strings"

	v1 "k8s.io/api/core/v1"
)

// Of an instance that ran before a power cut or a reboot the runtime may have no record, and then the pod's status is all there
// is: the instance has ended, as the status says or nobody knows how. It counts as any other that has ended.

// lost is the instance that the status tells of, for a container of which the runtime knows none.
func lost(pod *v1.Pod, name string) (Container, bool) {
	st, ok := lastStatus(&pod.Status, name)
	if !ok || st.ContainerID == "" {
		return Container{}, false
	}
	_, id, _ := strings.Cut(st.ContainerID, "://")
	return Container{ID: id, Name: name, Attempt: uint32(st.RestartCount), State: Exited, ExitCode: lostEnd(&st).ExitCode, Delay: noDelay}, true
}

// lostEnd is how the instance of a status has ended.
func lostEnd(st *v1.ContainerStatus) *v1.ContainerStateTerminated {
	if t := st.State.Terminated; t != nil {
		return t
	}
	// While a container waits for its next instance, the last one is the one before.
	if t := st.LastTerminationState.Terminated; t != nil && st.State.Waiting != nil && t.ContainerID == st.ContainerID {
		return t
	}
	return &v1.ContainerStateTerminated{Reason: "ContainerStatusUnknown", ExitCode: 137, ContainerID: st.ContainerID,
		Message: "The container could not be located when the pod was terminated"}
}

// latest is the newest instance of a container, or the lost one where the runtime knows of none.
func latest(pod *v1.Pod, o *Observed, name string) (Container, bool) {
	if c, ok := o.newest(name); ok {
		return c, true
	}
	return lost(pod, name)
}

// again says whether a container of which the runtime knows no instance is started: init containers are in each sandbox, others if they
// never were, or if the lost instance is followed by another.
func again(pod *v1.Pod, spec *v1.Container) bool {
	c, ran := lost(pod, spec.Name)
	return !ran || isInit(pod, spec.Name) || restarts(pod, spec, c, "")
}
