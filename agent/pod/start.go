package pod

import (
	"context"
	"errors"
	"fmt"
	"time"

	v1 "k8s.io/api/core/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
)

// startContainer creates and starts one instance of a container and runs its postStart hook.
func (w *worker) startContainer(ctx context.Context, a Action) error {
	begin, pod := w.cfg.now(), w.podWithStatus()
	spec := containerSpec(pod, a.Container)
	if spec == nil {
		return fmt.Errorf("pod %s/%s has no container %q", pod.Namespace, pod.Name, a.Container)
	}
	field := fieldPath(pod, spec.Name)
	w.mu.Lock()
	ref, mounts, devices := w.o.Images[spec.Name].Ref, w.mountsBy, w.devices
	w.mu.Unlock()
	fail := func(reason string, err error) error {
		if ctx.Err() == nil {
			w.events.event(pod, field, v1.EventTypeWarning, "Failed", "Error: "+err.Error())
		}
		return &reasoned{reason, err}
	}
	if a.Delay > 0 {
		w.events.event(pod, field, v1.EventTypeWarning, "BackOff", fmt.Sprintf("Back-off restarting failed container %s in pod %s_%s(%s)", spec.Name, pod.Name, pod.Namespace, pod.UID))
	}
	image, err := w.cfg.Images.Config(ctx, ref)
	if err != nil {
		return fail("CreateContainerError", err)
	}
	sb, err := w.sandboxConfig(pod, 0)
	if err != nil {
		return fail("CreateContainerConfigError", err)
	}
	cfg, err := w.containerConfig(ctx, pod, spec, a, image, ref, mounts)
	if err != nil {
		return fail("CreateContainerConfigError", err)
	}
	cfg.CDIDevices = devicesOf(spec, devices)
	if w.cfg.Plugins != nil {
		has, err := w.cfg.Plugins.Container(ctx, pod, spec.Name)
		if err != nil {
			return fail("CreateContainerConfigError", err)
		}
		withPlugins(cfg, has)
	}
	attached := w.attachment(a.ID)
	asked := w.cfg.now()
	res, err := w.cfg.Runtime.CreateContainer(ctx, &cri.CreateContainerRequest{PodSandboxId: a.ID, Config: cfg, SandboxConfig: sb})
	if err != nil {
		if attached.failed(ctx) {
			return errNoSandbox // the sandbox failed meanwhile, and createSandbox reports the failure
		}
		return fail("CreateContainerError", err)
	}
	w.mu.Lock()
	if w.clocks.alive[res.ContainerId].IsZero() {
		w.clocks.alive[res.ContainerId] = asked // the container did not exist before
	}
	w.mu.Unlock()
	w.events.event(pod, field, v1.EventTypeNormal, "Created", "Created container: "+spec.Name)
	if attached != nil {
		if pod, err = w.awaitNetwork(ctx, pod, attached); err != nil {
			return err
		}
	}
	if err := w.awaitPolicies(ctx, pod, a.ID, attached); err != nil {
		if ctx.Err() != nil {
			return err
		}
		return fail("NetworkPolicyNotReady", err)
	}
	if err := writeLogLink(w.cfg.Paths, pod, spec.Name, res.ContainerId, a.Attempt); err != nil {
		w.log.Warn("linking the log of a container", "container", spec.Name, "err", err)
	}
	if _, err := w.cfg.Runtime.StartContainer(ctx, &cri.StartContainerRequest{ContainerId: res.ContainerId}); err != nil {
		return fail("RunContainerError", err)
	}
	w.events.event(pod, field, v1.EventTypeNormal, "Started", "Started container "+spec.Name)
	if a.Attempt == 0 {
		w.stage(agent.StageTime{Name: "container started", Start: begin, Duration: w.cfg.now().Sub(begin), Detail: spec.Name})
	}
	w.cfg.Runtime.StageTimes(res.ContainerId)
	if spec.Lifecycle == nil || spec.Lifecycle.PostStart == nil {
		return nil
	}
	if err := w.hook(ctx, pod, spec, res.ContainerId, spec.Lifecycle.PostStart); err != nil {
		if ctx.Err() != nil {
			return err
		}
		w.events.event(pod, field, v1.EventTypeWarning, "FailedPostStartHook", "PostStartHook failed")
		w.mark(res.ContainerId, "FailedPostStartHook")
		if kerr := w.killContainer(ctx, Action{Kind: KillContainer, Container: spec.Name, ID: res.ContainerId, Grace: grace(pod), Why: "FailedPostStartHook"}); kerr != nil {
			w.log.Warn("stopping a container whose postStart hook failed", "container", spec.Name, "err", kerr)
		}
		return &reasoned{"PostStartHookError", err}
	}
	return nil
}

// mark records that the worker itself stopped a container.
func (w *worker) mark(id, why string) {
	w.mu.Lock()
	w.o.Killed[id] = why
	w.mu.Unlock()
}

// killContainer runs the preStop hook and stops the container, both within the grace period.
func (w *worker) killContainer(ctx context.Context, a Action) error {
	pod := w.podWithStatus()
	spec := containerSpec(pod, a.Container)
	w.mu.Lock()
	started := w.o.Probes[a.ID].Started
	w.mu.Unlock()
	if pod.Name != "" {
		w.events.event(pod, fieldPath(pod, a.Container), v1.EventTypeNormal, "Killing", a.Why)
	}
	left := a.Grace
	if spec != nil && spec.Lifecycle != nil && spec.Lifecycle.PreStop != nil && a.Grace > 0 {
		begin := w.cfg.now()
		hctx, cancel := context.WithTimeout(ctx, a.Grace)
		err := w.hook(hctx, pod, spec, a.ID, spec.Lifecycle.PreStop)
		cancel()
		if err != nil && ctx.Err() == nil {
			w.events.event(pod, fieldPath(pod, a.Container), v1.EventTypeWarning, "FailedPreStopHook", "PreStopHook failed")
			w.log.Warn("preStop hook", "container", a.Container, "started", started, "err", err)
		}
		left = max(minStop, a.Grace-w.cfg.now().Sub(begin))
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	// The CRI counts whole seconds: round up, so that a fraction does not become zero.
	_, err := w.cfg.Runtime.StopContainer(ctx, &cri.StopContainerRequest{ContainerId: a.ID, Timeout: int64((left + time.Second - 1) / time.Second)})
	if errors.Is(err, agent.ErrStillRunning) {
		w.log.Warn("a container was killed and does not end: what a file server of the pod was waited for is given up", "container", a.Container)
		err = errors.Join(err, w.cfg.Volumes.AbortIO(ctx, pod.UID))
	}
	return err
}

// minStop is the minimum time to stop a container after its preStop hook has used up the grace
// period.
const minStop = 2 * time.Second

// fieldPath returns the container's field path in the pod, for events.
func fieldPath(pod *v1.Pod, name string) string {
	if name == "" || containerSpec(pod, name) == nil {
		return ""
	}
	if isInit(pod, name) {
		return "spec.initContainers{" + name + "}"
	}
	return "spec.containers{" + name + "}"
}
