package pod

import (
	"fmt"

	v1 "k8s.io/api/core/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent/pod/criconfig"
	"keelson.dev/keelson/agent/pod/lifecycle"
)

// checkEphemeral returns an error if this node must not run the ephemeral container spec of the
// pod, because it exceeds the node's highest Pod Security level. The pod was admitted before the
// container was added, so only this container is refused. It returns nil for all other containers.
func (ar *actionRunner) checkEphemeral(pod *v1.Pod, spec *v1.Container) error {
	if !lifecycle.IsEphemeralContainer(pod, spec.Name) {
		return nil
	}
	err := ar.w.cfg.Ceiling.CheckEphemeral(pod, spec.Name)
	if err == nil {
		return nil
	}
	ar.w.events.Emit(pod, containerFieldPath(pod, spec.Name), v1.EventTypeWarning, "Failed", "Error: "+err.Error())
	return &waitingError{"PodSecurity", err}
}

// joinTarget makes an ephemeral container share the process namespace of its target, that is, of
// the target's newest instance. It changes nothing if the container has no target. It returns an
// error if the target never ran.
func (ar *actionRunner) joinTarget(pod *v1.Pod, name string, config *cri.ContainerConfig) error {
	target := lifecycle.TargetContainer(pod, name)
	if target == "" {
		return nil
	}
	ar.w.mu.Lock()
	instance, ran := ar.w.observed.NewestInstance(target)
	ar.w.mu.Unlock()
	if !ran {
		return fmt.Errorf("unable to find target container %s", target)
	}
	criconfig.JoinProcesses(config, instance.ID)
	return nil
}
