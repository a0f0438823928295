package pod

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	v1 "k8s.io/api/core/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent/pod/lifecycle"
	"keelson.dev/keelson/agent/pod/podfiles"
)

// resizer grants the pod's resources and applies the grant to the pod's cgroups during a resize.
// Its fields are guarded by worker.mu, except onFreed, which is set before the worker runs.
type resizer struct {
	w *worker
	// the current grant; worker.desired.Pod has these resources instead of those in the spec
	grant      lifecycle.ResourceGrant
	recorded   bool // the grant is on disk
	unverified bool // no grant was stored: running containers may have other resources

	// pendingReason and pendingMessage state why the spec of generation pendingGeneration is not
	// granted. They are "" if it is granted.
	pendingReason, pendingMessage string
	pendingGeneration             int64

	cgroupLimits *cri.LinuxContainerResources // limits that this process set on the pod's cgroup; nil: none
	onFreed      func()                       // called when the pod uses fewer resources
}

// restoreGrant sets the grant that was loaded from disk. recorded is false if no grant was stored;
// then granted equals the spec.
func (rs *resizer) restoreGrant(granted lifecycle.ResourceGrant, recorded bool) {
	rs.w.mu.Lock()
	defer rs.w.mu.Unlock()
	rs.grant, rs.recorded, rs.unverified = granted, recorded, !recorded
	rs.w.desired.Pod = granted.ApplyTo(rs.w.desired.Pod)
}

// verifyUnrecordedGrant checks the running containers of a pod for which no grant was stored. An
// older release that could not resize may have started them, and the spec may have changed since
// then. If their limits differ from the grant, verifyUnrecordedGrant marks the grant as not in
// effect. The lock is held.
func (rs *resizer) verifyUnrecordedGrant() {
	if !rs.unverified {
		return
	}
	rs.unverified = false
	o := rs.w.observed
	o.Resize = rs.resizeState()
	if p := lifecycle.PlanResize(rs.w.desired.Pod, &o); len(p.Update)+len(p.Restart) > 0 {
		rs.grant.InEffect = false
	}
}

// saveInitialGrant stores the grant with which the pod was admitted, before anything of the pod is
// created.
func (rs *resizer) saveInitialGrant() {
	rs.w.mu.Lock()
	d, g, done := rs.w.desired, rs.grant, rs.recorded
	rs.recorded = true
	rs.w.mu.Unlock()
	if done || d.Stop != nil || lifecycle.IsTerminal(d.Pod) {
		return
	}
	if err := podfiles.SaveGrant(rs.w.cfg.Paths, d.Pod, g); err != nil {
		rs.w.log.Error("cannot record the granted resources of a pod: a restarted agent uses the resources in its spec",
			"err", err)
	}
}

// currentGrant returns the pod's current grant.
func (rs *resizer) currentGrant() lifecycle.ResourceGrant {
	rs.w.mu.Lock()
	defer rs.w.mu.Unlock()
	return rs.grant
}

// acceptResize grants the resources in the pod's spec. It stores the grant on disk first.
func (rs *resizer) acceptResize(pod *v1.Pod) {
	g := lifecycle.GrantFromSpec(pod)
	g.InEffect = false
	if err := podfiles.SaveGrant(rs.w.cfg.Paths, pod, g); err != nil {
		rs.w.log.Warn("cannot grant a resize", "err", err)
		rs.setPendingResize(pod, v1.PodReasonDeferred, err.Error())
		return
	}
	rs.w.mu.Lock()
	rs.grant, rs.recorded = g, true
	rs.w.desired.Pod = g.ApplyTo(pod)
	rs.pendingReason, rs.pendingMessage = "", ""
	delete(rs.w.observed.Failures, (lifecycle.Action{Kind: lifecycle.ResizePod}).Key())
	rs.w.mu.Unlock()
	rs.w.events.Emit(pod, "", v1.EventTypeNormal, "ResizeStarted",
		resizeEventMessage("Pod resize started", pod, pod.Generation, ""))
	rs.w.wakeUp()
}

// setPendingResize sets why the pod's spec is not granted; reason "" means that it is granted.
func (rs *resizer) setPendingResize(pod *v1.Pod, reason, message string) {
	rs.w.mu.Lock()
	same := rs.pendingReason == reason && rs.pendingMessage == message &&
		(reason == "" || rs.pendingGeneration == pod.Generation)
	rs.pendingReason, rs.pendingMessage, rs.pendingGeneration = reason, message, pod.Generation
	rs.w.mu.Unlock()
	if same {
		return
	}
	if reason != "" {
		rs.w.events.Emit(pod, "", v1.EventTypeWarning, "Resize"+reason,
			resizeEventMessage("Pod resize "+reason, pod, pod.Generation, message))
	}
	rs.w.wakeUp()
}

// admissionPod returns the pod with the resources that admission counts. These are the granted
// resources. During a resize, the larger of the granted and the current resources of each container
// and of the pod counts.
func (rs *resizer) admissionPod() *v1.Pod {
	rs.w.mu.Lock()
	defer rs.w.mu.Unlock()
	out := *rs.w.desired.Pod
	out.Status = v1.PodStatus{}
	if rs.grant.InEffect {
		return &out
	}
	keepResources := func(list []v1.ContainerStatus) (kept []v1.ContainerStatus) {
		for _, cs := range list {
			if cs.Resources != nil {
				kept = append(kept, v1.ContainerStatus{Name: cs.Name, Resources: cs.Resources})
			}
		}
		return kept
	}
	out.Status.InitContainerStatuses = keepResources(rs.w.status.last.InitContainerStatuses)
	out.Status.ContainerStatuses = keepResources(rs.w.status.last.ContainerStatuses)
	out.Status.Resources = rs.w.status.last.Resources
	return &out
}

// resizeState returns the resize state for Step and Status. The lock is held.
func (rs *resizer) resizeState() lifecycle.Resize {
	return lifecycle.Resize{Pending: rs.pendingReason, Message: rs.pendingMessage,
		RequestedGeneration: rs.pendingGeneration, InProgress: !rs.grant.InEffect,
		GrantedGeneration: rs.grant.Generation, Memory: rs.w.cfg.nodeMemory(), Limits: rs.cgroupLimits}
}

// resizePod applies the grant to the pod's cgroups: first a growing pod cgroup, then the
// containers, then a shrinking pod cgroup. Every step may be repeated, so another agent process can
// continue an interrupted resize.
func (rs *resizer) resizePod(ctx context.Context, sandbox string) error {
	rs.w.mu.Lock()
	pod, o, g := rs.w.desired.Pod, rs.w.observed, rs.grant
	o.Resize = rs.resizeState()
	rs.w.mu.Unlock()
	p := lifecycle.PlanResize(pod, &o)
	if err := rs.setPodLimits(ctx, sandbox, p.During); err != nil {
		return rs.reportResizeError(ctx, pod, g, err)
	}
	var errs []error
	for _, u := range p.Update {
		if _, err := rs.w.cfg.Deps.Runtime.UpdateContainerResources(ctx,
			&cri.UpdateContainerResourcesRequest{ContainerId: u.ID, Linux: u.To}); err != nil {
			errs = append(errs, fmt.Errorf("container %s: %w", u.Name, err))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return rs.reportResizeError(ctx, pod, g, err)
	}
	if len(p.Restart) > 0 {
		return nil // the rest is done when the restarted containers run
	}
	if err := rs.setPodLimits(ctx, sandbox, p.Target); err != nil {
		return rs.reportResizeError(ctx, pod, g, err)
	}
	return rs.completeResize(pod, g)
}

func (rs *resizer) reportResizeError(ctx context.Context, pod *v1.Pod, granted lifecycle.ResourceGrant,
	err error) error {
	if ctx.Err() == nil {
		rs.w.events.Emit(pod, "", v1.EventTypeWarning, "ResizeError",
			resizeEventMessage("Pod resize error", pod, granted.Generation, err.Error()))
	}
	return err
}

func (rs *resizer) setPodLimits(ctx context.Context, sandbox string, target *cri.LinuxContainerResources) error {
	rs.w.mu.Lock()
	current := rs.cgroupLimits
	rs.w.mu.Unlock()
	if current != nil && lifecycle.EqualLimits(current, target) {
		return nil
	}
	if _, err := rs.w.cfg.Deps.Runtime.UpdatePodSandboxResources(ctx,
		&cri.UpdatePodSandboxResourcesRequest{PodSandboxId: sandbox, Resources: target}); err != nil {
		return err
	}
	rs.w.mu.Lock()
	rs.cgroupLimits = target
	rs.w.mu.Unlock()
	return nil
}

// completeResize records that a grant is in effect, unless there is a newer grant.
func (rs *resizer) completeResize(pod *v1.Pod, granted lifecycle.ResourceGrant) error {
	granted.InEffect = true
	rs.w.mu.Lock()
	if rs.grant.Generation != granted.Generation || rs.grant.InEffect {
		rs.w.mu.Unlock()
		return nil
	}
	rs.grant.InEffect = true
	rs.w.mu.Unlock()
	// If the write fails, the next agent process repeats the resize, which changes nothing.
	if err := podfiles.SaveGrant(rs.w.cfg.Paths, pod, granted); err != nil {
		rs.w.log.Warn("cannot record that a resize is complete: a restarted agent repeats it", "err", err)
	}
	rs.w.events.Emit(pod, "", v1.EventTypeNormal, "ResizeCompleted",
		resizeEventMessage("Pod resize completed", pod, granted.Generation, ""))
	rs.onFreed()
	return nil
}

// resizeEventMessage returns the message of a resize event: prefix and a JSON summary. The summary
// has the resources of the containers and of the pod, the generation and, if it is not empty, the
// problem.
func resizeEventMessage(prefix string, pod *v1.Pod, generation int64, problem string) string {
	type container struct {
		Name      string                  `json:"name"`
		Resources v1.ResourceRequirements `json:"resources,omitempty"`
	}
	summary := struct {
		InitContainers []container `json:"initContainers,omitempty"`
		Containers     []container `json:"containers,omitempty"`

		Resources  *v1.ResourceRequirements `json:"resources,omitempty"`
		Generation int64                    `json:"generation"`
		Error      string                   `json:"error,omitempty"`
	}{Resources: pod.Spec.Resources, Generation: generation, Error: problem}
	for i := range pod.Spec.InitContainers {
		c := &pod.Spec.InitContainers[i]
		summary.InitContainers = append(summary.InitContainers, container{c.Name, c.Resources})
	}
	for i := range pod.Spec.Containers {
		c := &pod.Spec.Containers[i]
		summary.Containers = append(summary.Containers, container{c.Name, c.Resources})
	}
	b, err := json.Marshal(summary)
	if err != nil {
		return prefix
	}
	return prefix + ": " + string(b)
}
