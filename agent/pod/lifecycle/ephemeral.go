package lifecycle

import (
	"fmt"
	"slices"

	v1 "k8s.io/api/core/v1"
)

// Ephemeral containers are added to a pod that runs. Each of them is started once and never again.
// They change neither the phase nor the readiness of the pod, and end with it.

// IsEphemeralContainer reports whether the pod has an ephemeral container of that name.
func IsEphemeralContainer(pod *v1.Pod, name string) bool {
	return slices.ContainsFunc(pod.Spec.EphemeralContainers, func(c v1.EphemeralContainer) bool {
		return c.Name == name
	})
}

// isRegularContainer reports whether the pod has a container of that name that is neither an init
// container nor an ephemeral container.
func isRegularContainer(pod *v1.Pod, name string) bool {
	return slices.ContainsFunc(pod.Spec.Containers, func(c v1.Container) bool { return c.Name == name })
}

// EphemeralSpec returns the spec of the pod's ephemeral container at index i in the form of a
// container. It shares memory with the pod.
func EphemeralSpec(pod *v1.Pod, i int) *v1.Container {
	return (*v1.Container)(&pod.Spec.EphemeralContainers[i].EphemeralContainerCommon)
}

// TargetContainer returns the targetContainerName of the pod's ephemeral container of that name:
// the container with which it shares its processes. It returns "" if there is no target, and for
// all other containers.
func TargetContainer(pod *v1.Pod, name string) string {
	for i := range pod.Spec.EphemeralContainers {
		if c := &pod.Spec.EphemeralContainers[i]; c.Name == name {
			return c.TargetContainerName
		}
	}
	return ""
}

// neverStartedEphemeral returns the start actions of the ephemeral containers that never ran.
func (s *planner) neverStartedEphemeral() []Action {
	var out []Action
	for i := range s.pod.Spec.EphemeralContainers {
		name := s.pod.Spec.EphemeralContainers[i].Name
		if _, ran := latestInstance(s.pod, s.observed, name); !ran {
			out = append(out, Action{Kind: StartContainer, Container: name, Delay: NoDelay})
		}
	}
	return out
}

// dueEphemeralStarts returns the actions that start ephemeral containers in the sandbox now. As in
// the kubelet, they do not wait for init containers. It also plans to remove an instance that was
// created and never started, and to stop an instance that is lost or runs in another sandbox.
func (s *planner) dueEphemeralStarts(sb Sandbox) []Action {
	var due []Action
	for _, a := range s.neverStartedEphemeral() {
		if a.ID = sb.ID; !s.observed.IsBusy(a.Key()) {
			due = append(due, a)
		}
	}
	for _, c := range s.observed.Containers {
		if !IsEphemeralContainer(s.pod, c.Name) || s.observed.IsBusy("container/"+c.Name) {
			continue
		}
		switch {
		case c.State == Created: // a crash interrupted its start
			s.planRemove(c)
		case c.State == Unknown, c.State == Running && c.Sandbox != sb.ID:
			s.planKill(c, GracePeriod(s.pod), fmt.Sprintf("Stopping container %s", c.Name))
		}
	}
	return due
}

// ephemeralStatuses returns the statuses of the pod's ephemeral containers. Ephemeral containers
// have no probes and no resources, so their statuses have none of these fields, and they are never
// ready.
func (g *statusBuilder) ephemeralStatuses() []v1.ContainerStatus {
	var out []v1.ContainerStatus
	for i := range g.pod.Spec.EphemeralContainers {
		spec := EphemeralSpec(g.pod, i)
		if g.omitsStatus(spec.Name) {
			continue
		}
		cs := g.containerStatus(spec)
		cs.Started, cs.Ready, cs.AllocatedResources, cs.Resources = nil, false, nil, nil
		out = append(out, cs)
	}
	return out
}
