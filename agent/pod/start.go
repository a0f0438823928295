package pod

import (
	"context"
	"errors"
	"fmt"
	"time"

	v1 "k8s.io/api/core/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/pod/criconfig"
	"keelson.dev/keelson/agent/pod/lifecycle"
	"keelson.dev/keelson/agent/pod/podfiles"
)

// startContainer creates and starts one instance of a container and runs its postStart hook.
func (ar *actionRunner) startContainer(ctx context.Context, action lifecycle.Action) error {
	start, pod := ar.w.cfg.currentTime(), ar.w.podWithStatus()
	spec := lifecycle.FindContainerSpec(pod, action.Container)
	if spec == nil {
		return fmt.Errorf("pod %s/%s has no container %q", pod.Namespace, pod.Name, action.Container)
	}
	field := containerFieldPath(pod, spec.Name)
	ar.w.mu.Lock()
	ref, mounts, devices := ar.w.observed.Images[spec.Name].Ref, ar.w.storage.mounts, ar.w.storage.devices
	ar.w.mu.Unlock()
	fail := func(reason string, err error) error {
		if ctx.Err() == nil {
			ar.w.events.Emit(pod, field, v1.EventTypeWarning, "Failed", "Error: "+err.Error())
		}
		return &waitingError{reason, err}
	}
	if action.Delay > 0 {
		ar.w.events.Emit(pod, field, v1.EventTypeWarning,
			"BackOff", fmt.Sprintf("Back-off restarting failed container %s in pod %s_%s(%s)", spec.Name, pod.Name,
				pod.Namespace, pod.UID))
	}
	image, err := ar.w.cfg.Deps.Images.Config(ctx, ref)
	if err != nil {
		return fail("CreateContainerError", err)
	}
	sb, err := ar.w.configs.SandboxConfig(pod, 0)
	if err != nil {
		return fail("CreateContainerConfigError", err)
	}
	cfg, err := ar.w.configs.ContainerConfig(ctx, pod, spec, action, image, ref, mounts)
	if err != nil {
		return fail("CreateContainerConfigError", err)
	}
	if err := ar.joinTarget(pod, spec.Name, cfg); err != nil {
		return fail("CreateContainerConfigError", err)
	}
	if err := ar.addDevices(ctx, pod, spec, cfg, devices); err != nil {
		return fail("CreateContainerConfigError", err)
	}
	attached := ar.w.runtime.findEarlySandbox(action.ID)
	createTime := ar.w.cfg.currentTime()
	res, err := ar.w.cfg.Deps.Runtime.CreateContainer(ctx,
		&cri.CreateContainerRequest{PodSandboxId: action.ID, Config: cfg, SandboxConfig: sb})
	if err != nil {
		if attached.hasFailed(ctx) {
			return errSandboxFailed // the sandbox failed meanwhile, and createSandbox reports the failure
		}
		return fail("CreateContainerError", err)
	}
	ar.w.mu.Lock()
	if ar.w.runtime.times.lastAlive[res.ContainerId].IsZero() {
		ar.w.runtime.times.lastAlive[res.ContainerId] = createTime // the container did not exist before
	}
	ar.w.mu.Unlock()
	ar.w.events.Emit(pod, field, v1.EventTypeNormal, "Created", "Created container: "+spec.Name)
	if attached != nil {
		if pod, err = ar.w.runtime.awaitNetwork(ctx, pod, attached); err != nil {
			return err
		}
	}
	if err := ar.w.runtime.awaitPolicies(ctx, pod, action.ID, attached); err != nil {
		if ctx.Err() != nil {
			return err
		}
		return fail("NetworkPolicyNotReady", err)
	}
	if err := podfiles.WriteLogLink(ar.w.cfg.Paths, pod, spec.Name, res.ContainerId, action.Attempt); err != nil {
		ar.w.log.Warn("cannot link the log of a container", "container", spec.Name, "err", err)
	}
	if _, err := ar.w.cfg.Deps.Runtime.StartContainer(ctx,
		&cri.StartContainerRequest{ContainerId: res.ContainerId}); err != nil {
		return fail("RunContainerError", err)
	}
	ar.w.events.Emit(pod, field, v1.EventTypeNormal, "Started", "Started container "+spec.Name)
	if action.Attempt == 0 {
		ar.w.status.reportStage(agent.StageTime{Name: "container started", Start: start,
			Duration: ar.w.cfg.currentTime().Sub(start), Detail: spec.Name})
	}
	ar.w.cfg.Deps.Runtime.StageTimes(res.ContainerId)
	if spec.Lifecycle == nil || spec.Lifecycle.PostStart == nil {
		return nil
	}
	if err := ar.runHook(ctx, pod, spec, res.ContainerId, spec.Lifecycle.PostStart); err != nil {
		if ctx.Err() != nil {
			return err
		}
		ar.w.events.Emit(pod, field, v1.EventTypeWarning, "FailedPostStartHook", "PostStartHook failed")
		ar.markKilled(res.ContainerId, "FailedPostStartHook")
		if kerr := ar.killContainer(ctx, lifecycle.Action{Kind: lifecycle.KillContainer, Container: spec.Name,
			ID: res.ContainerId, Grace: lifecycle.GracePeriod(pod), Message: "FailedPostStartHook"}); kerr != nil {
			ar.w.log.Warn("cannot stop a container after its postStart hook has failed", "container", spec.Name,
				"err", kerr)
		}
		return &waitingError{"PostStartHookError", err}
	}
	return nil
}

// addDevices adds the devices of the pod's claims, and those that device plugins allocate, to the
// configuration of a container.
func (ar *actionRunner) addDevices(
	ctx context.Context, pod *v1.Pod, spec *v1.Container, cfg *cri.ContainerConfig, claimed agent.ClaimedDevices,
) error {
	cfg.CDIDevices = criconfig.ClaimedDevices(spec, claimed)
	if ar.w.cfg.Deps.Plugins == nil {
		return nil
	}
	allocation, err := ar.w.cfg.Deps.Plugins.Container(ctx, pod, spec.Name)
	if err != nil {
		return err
	}
	criconfig.AddPluginDevices(cfg, allocation)
	return nil
}

// markKilled records in the observed state that the worker stopped a container for the reason in
// message.
func (ar *actionRunner) markKilled(id, message string) {
	ar.w.mu.Lock()
	ar.w.observed.Killed[id] = message
	ar.w.mu.Unlock()
}

// killContainer runs the preStop hook and stops the container, both within the grace period.
func (ar *actionRunner) killContainer(ctx context.Context, action lifecycle.Action) error {
	pod := ar.w.podWithStatus()
	spec := lifecycle.FindContainerSpec(pod, action.Container)
	ar.w.mu.Lock()
	started := ar.w.observed.Probes[action.ID].Started
	ar.w.mu.Unlock()
	if pod.Name != "" {
		ar.w.events.Emit(pod, containerFieldPath(pod, action.Container), v1.EventTypeNormal, "Killing", action.Message)
	}
	left := action.Grace
	if spec != nil && spec.Lifecycle != nil && spec.Lifecycle.PreStop != nil && action.Grace > 0 {
		start := ar.w.cfg.currentTime()
		hctx, cancel := context.WithTimeout(ctx, action.Grace)
		err := ar.runHook(hctx, pod, spec, action.ID, spec.Lifecycle.PreStop)
		cancel()
		if err != nil && ctx.Err() == nil {
			ar.w.events.Emit(pod, containerFieldPath(pod, action.Container), v1.EventTypeWarning,
				"FailedPreStopHook", "PreStopHook failed")
			ar.w.log.Warn("preStop hook failed", "container", action.Container, "started", started, "err", err)
		}
		left = max(lifecycle.MinStop, action.Grace-ar.w.cfg.currentTime().Sub(start))
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	// The CRI counts whole seconds: round up, so that a fraction does not become zero.
	_, err := ar.w.cfg.Deps.Runtime.StopContainer(ctx,
		&cri.StopContainerRequest{ContainerId: action.ID, Timeout: int64((left + time.Second - 1) / time.Second)})
	if errors.Is(err, agent.ErrStillRunning) {
		ar.w.log.Warn("a killed container does not exit: aborting the I/O of its pod to file servers",
			"container", action.Container)
		err = errors.Join(err, ar.w.cfg.Deps.Volumes.AbortIO(ctx, pod.UID))
	}
	return err
}

// containerFieldPath returns the field path of a container in the pod, such as
// spec.containers{NAME}, which its events contain.
func containerFieldPath(pod *v1.Pod, name string) string {
	if name == "" || lifecycle.FindContainerSpec(pod, name) == nil {
		return ""
	}
	switch {
	case lifecycle.IsInitContainer(pod, name):
		return "spec.initContainers{" + name + "}"
	case lifecycle.IsEphemeralContainer(pod, name):
		return "spec.ephemeralContainers{" + name + "}"
	}
	return "spec.containers{" + name + "}"
}
