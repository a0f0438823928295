package lifecycle

import (
	"strings"

	v1 "k8s.io/api/core/v1"
)

// After a power failure or reboot, the runtime may have no record of an instance. The pod's status
// is then the only source: the instance has ended as its status shows, or in an unknown way. It
// counts like any other ended instance.

// lostInstance returns the ended instance that the pod's status shows, for a container of which the
// runtime has no record. It returns false if the status shows no instance.
func lostInstance(pod *v1.Pod, name string) (Container, bool) {
	st, ok := findContainerStatus(&pod.Status, name)
	if !ok || st.ContainerID == "" {
		return Container{}, false
	}
	_, id, _ := strings.Cut(st.ContainerID, "://")
	return Container{ID: id, Name: name, Attempt: uint32(st.RestartCount), State: Exited,
		ExitCode: lostTermination(&st).ExitCode, Delay: NoDelay}, true
}

// lostTermination returns the terminated state of the last instance that status shows. The runtime
// has lost the records of the container. If status does not show how the instance ended, the result
// has the reason ContainerStatusUnknown and exit code 137.
func lostTermination(status *v1.ContainerStatus) *v1.ContainerStateTerminated {
	if t := status.State.Terminated; t != nil {
		return t
	}
	// While a container waits for a restart, the previous instance is in LastTerminationState.
	if t := status.LastTerminationState.Terminated; t != nil && status.State.Waiting != nil &&
		t.ContainerID == status.ContainerID {
		return t
	}
	return &v1.ContainerStateTerminated{Reason: "ContainerStatusUnknown", ExitCode: 137,
		ContainerID: status.ContainerID, Message: "The container could not be located when the pod was terminated"}
}

// latestInstance returns the newest instance of a container that the runtime reports. If the
// runtime reports no instance, it returns the instance in the pod's status. It returns false if the
// container never ran.
func latestInstance(pod *v1.Pod, observed *Observed, name string) (Container, bool) {
	if c, ok := observed.NewestInstance(name); ok {
		return c, true
	}
	return lostInstance(pod, name)
}

// shouldStartAgain reports whether to start a container of which the runtime has no instance. An
// init container is started in each new sandbox. Another container is started if it never ran, or
// if the restart policy restarts the instance in the pod's status.
func shouldStartAgain(pod *v1.Pod, spec *v1.Container) bool {
	c, ran := lostInstance(pod, spec.Name)
	return !ran || IsInitContainer(pod, spec.Name) || shouldRestart(pod, spec, c, "")
}
