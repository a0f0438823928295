package pod

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	v1 "k8s.io/api/core/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// remember sets the grant that was loaded from disk. recorded is false if there was no file and g
// equals the spec.
func (w *worker) remember(g grant, recorded bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.grant, w.recorded, w.doubtful = g, recorded, !recorded
	w.desired.Pod = g.of(w.desired.Pod)
}

// compare checks the running containers of a pod without a stored grant. Under an older release,
// without resize, the spec may have changed since their start. Then the grant is not settled. The
// lock is held.
func (w *worker) compare() {
	if !w.doubtful {
		return
	}
	w.doubtful = false
	o := w.o
	o.Resize = w.resizeState()
	if p := planResize(w.desired.Pod, &o); len(p.Update)+len(p.Restart) > 0 {
		w.grant.Settled = false
	}
}

// record stores the grant with which the pod was admitted, before anything of the pod is created.
func (w *worker) record() {
	w.mu.Lock()
	d, g, done := w.desired, w.grant, w.recorded
	w.recorded = true
	w.mu.Unlock()
	if done || d.Stop != nil || final(d.Pod) {
		return
	}
	if err := saveGrant(w.cfg.Paths, d.Pod, g); err != nil {
		w.log.Error("an agent that starts anew would not know what the pod was granted", "err", err)
	}
}

// granted returns the pod's current grant.
func (w *worker) granted() grant {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.grant
}

// give grants the resources in the pod's spec. It stores the grant on disk first.
func (w *worker) give(pod *v1.Pod) {
	g := grantOf(pod)
	g.Settled = false
	if err := saveGrant(w.cfg.Paths, pod, g); err != nil {
		w.log.Warn("a resize cannot be granted", "err", err)
		w.refuseResize(pod, v1.PodReasonDeferred, err.Error())
		return
	}
	w.mu.Lock()
	w.grant, w.recorded = g, true
	w.desired.Pod = g.of(pod)
	w.pending, w.because = "", ""
	delete(w.o.Failures, (Action{Kind: ResizePod}).Key())
	w.mu.Unlock()
	w.events.event(pod, "", v1.EventTypeNormal, "ResizeStarted", resizeText("Pod resize started", pod, pod.Generation, ""))
	w.poke()
}

// refuseResize sets why the pod's spec is not granted; reason "" means that it is granted.
func (w *worker) refuseResize(pod *v1.Pod, reason, message string) {
	w.mu.Lock()
	same := w.pending == reason && w.because == message && (reason == "" || w.asked == pod.Generation)
	w.pending, w.because, w.asked = reason, message, pod.Generation
	w.mu.Unlock()
	if same {
		return
	}
	if reason != "" {
		w.events.event(pod, "", v1.EventTypeWarning, "Resize"+reason, resizeText("Pod resize "+reason, pod, pod.Generation, message))
	}
	w.poke()
}

// holding returns the pod as it counts in admission: with its grant, and with the larger current
// resources of its containers during a resize.
func (w *worker) holding() *v1.Pod {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := *w.desired.Pod
	out.Status = v1.PodStatus{}
	if w.grant.Settled {
		return &out
	}
	has := func(list []v1.ContainerStatus) (kept []v1.ContainerStatus) {
		for _, cs := range list {
			if cs.Resources != nil {
				kept = append(kept, v1.ContainerStatus{Name: cs.Name, Resources: cs.Resources})
			}
		}
		return kept
	}
	out.Status.InitContainerStatuses, out.Status.ContainerStatuses = has(w.last.InitContainerStatuses), has(w.last.ContainerStatuses)
	return &out
}

// resizeState returns the resize state for Step and Status. The lock is held.
func (w *worker) resizeState() Resize {
	return Resize{Pending: w.pending, Message: w.because, Asked: w.asked, Open: !w.grant.Settled, Granted: w.grant.Generation,
		Memory: w.cfg.memory(), Limits: w.limits}
}

// resizePod brings a grant into effect: a growing pod cgroup first, then the containers, then a
// shrinking pod cgroup. Every step may be repeated, so another agent process can continue an
// interrupted resize.
func (w *worker) resizePod(ctx context.Context, sandbox string) error {
	w.mu.Lock()
	pod, o, g := w.desired.Pod, w.o, w.grant
	o.Resize = w.resizeState()
	w.mu.Unlock()
	p := planResize(pod, &o)
	if err := w.limitPod(ctx, sandbox, p.During); err != nil {
		return w.resizeFailed(ctx, pod, g, err)
	}
	var errs []error
	for _, u := range p.Update {
		if _, err := w.cfg.Runtime.UpdateContainerResources(ctx, &cri.UpdateContainerResourcesRequest{ContainerId: u.ID, Linux: u.To}); err != nil {
			errs = append(errs, fmt.Errorf("container %s: %w", u.Name, err))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return w.resizeFailed(ctx, pod, g, err)
	}
	if len(p.Restart) > 0 {
		return nil // the rest is done when the restarted containers run
	}
	if err := w.limitPod(ctx, sandbox, p.Target); err != nil {
		return w.resizeFailed(ctx, pod, g, err)
	}
	return w.settleGrant(pod, g)
}

func (w *worker) resizeFailed(ctx context.Context, pod *v1.Pod, g grant, err error) error {
	if ctx.Err() == nil {
		w.events.event(pod, "", v1.EventTypeWarning, "ResizeError", resizeText("Pod resize error", pod, g.Generation, err.Error()))
	}
	return err
}

func (w *worker) limitPod(ctx context.Context, sandbox string, to *cri.LinuxContainerResources) error {
	w.mu.Lock()
	have := w.limits
	w.mu.Unlock()
	if have != nil && sameLimits(have, to) {
		return nil
	}
	if _, err := w.cfg.Runtime.UpdatePodSandboxResources(ctx, &cri.UpdatePodSandboxResourcesRequest{PodSandboxId: sandbox, Resources: to}); err != nil {
		return err
	}
	w.mu.Lock()
	w.limits = to
	w.mu.Unlock()
	return nil
}

// settleGrant records that a grant is in effect, unless there is a newer grant.
func (w *worker) settleGrant(pod *v1.Pod, g grant) error {
	g.Settled = true
	w.mu.Lock()
	if w.grant.Generation != g.Generation || w.grant.Settled {
		w.mu.Unlock()
		return nil
	}
	w.grant.Settled = true
	w.mu.Unlock()
	// If the write fails, the next agent process repeats the resize, which changes nothing.
	if err := saveGrant(w.cfg.Paths, pod, g); err != nil {
		w.log.Warn("a resize is done", "err", err)
	}
	w.events.event(pod, "", v1.EventTypeNormal, "ResizeCompleted", resizeText("Pod resize completed", pod, g.Generation, ""))
	w.freed()
	return nil
}

// resizeText returns the message of a resize event: text and a JSON summary of the containers.
func resizeText(what string, pod *v1.Pod, generation int64, problem string) string {
	type container struct {
		Name      string                  `json:"name"`
		Resources v1.ResourceRequirements `json:"resources,omitempty"`
	}
	summary := struct {
		InitContainers []container `json:"initContainers,omitempty"`
		Containers     []container `json:"containers,omitempty"`
		Generation     int64       `json:"generation"`
		Error          string      `json:"error,omitempty"`
	}{Generation: generation, Error: problem}
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
		return what
	}
	return what + ": " + string(b)
}
