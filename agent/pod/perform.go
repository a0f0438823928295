package pod

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
)

// gateLimit bounds the wait for proxies to forget the pod.
const gateLimit = time.Second

// perform does one action. Events are worded here; retries are Step's.
func (w *worker) perform(ctx context.Context, a Action) error {
	switch a.Kind {
	case AllocateDevices:
		return w.allocateDevices(ctx)
	case MountVolumes:
		return w.mountVolumes(ctx)
	case CreateSandbox:
		return w.createSandbox(ctx, a)
	case EnsureImage:
		return w.ensureImage(ctx, a)
	case StartContainer:
		return w.startContainer(ctx, a)
	case KillContainer:
		return w.killContainer(ctx, a)
	case RemoveContainer:
		return w.removeContainer(ctx, a)
	case AwaitGate:
		t := time.NewTimer(gateLimit)
		defer t.Stop()
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-w.cfg.Reporter.StopGate(w.pod().UID):
		case <-t.C:
		}
		return nil
	case StopSandbox:
		_, err := w.cfg.Runtime.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: a.ID})
		return err
	case RefreshVolumes:
		return w.cfg.Volumes.Refresh(ctx, w.podWithStatus())
	case UnmountVolumes:
		return w.unmountVolumes(ctx)
	case RemoveSandbox:
		_, err := w.cfg.Runtime.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: a.ID})
		return err
	case ReportGone:
		return w.reportGone()
	case ResizePod:
		return w.resizePod(ctx, a.ID)
	}
	return fmt.Errorf("unknown action %d", a.Kind)
}

func (w *worker) mountVolumes(ctx context.Context) error {
	start, pod := w.cfg.now(), w.podWithStatus()
	devices, err := w.cfg.Devices.Prepare(ctx, w.pod()) // whose status names the claims that were made for it
	if err != nil {
		if ctx.Err() == nil {
			w.events.event(pod, "", v1.EventTypeWarning, "FailedPrepareDynamicResources", "Failed to prepare dynamic resources: "+err.Error())
		}
		return err
	}
	mounts, err := w.cfg.Volumes.MountAll(ctx, pod)
	if err != nil {
		if ctx.Err() == nil {
			w.events.event(pod, "", v1.EventTypeWarning, "FailedMount", err.Error())
		}
		return err
	}
	w.mu.Lock()
	w.mountsBy, w.devices = mounts, devices
	w.mu.Unlock()
	w.stage(agent.StageTime{Name: "volumes", Start: start, Duration: w.cfg.now().Sub(start), Detail: strconv.Itoa(len(mounts))})
	return nil
}

func (w *worker) createSandbox(ctx context.Context, a Action) error {
	start, pod := w.cfg.now(), w.podWithStatus()
	if a.Attempt > 0 {
		w.events.event(pod, "", v1.EventTypeNormal, "SandboxChanged", "Pod sandbox changed, it will be killed and re-created.")
	}
	w.mu.Lock()
	w.limits = nil // a cgroup that is made anew has those of its config
	w.mu.Unlock()
	cfg, err := w.sandboxConfig(pod, a.Attempt)
	if err == nil {
		err = os.MkdirAll(cfg.LogDirectory, 0o755)
	}
	var res *cri.RunPodSandboxResponse
	if err == nil {
		var handler string
		if handler, err = w.runtimeHandler(pod); err == nil {
			res, err = w.runSandbox(ctx, &cri.RunPodSandboxRequest{Config: cfg, RuntimeHandler: handler})
		}
	}
	if err != nil {
		if ctx.Err() == nil {
			w.events.event(pod, "", v1.EventTypeWarning, "FailedCreatePodSandBox", fmt.Sprintf("Failed to create pod sandbox: %v", err))
		}
		return err
	}
	took := w.cfg.now().Sub(start)
	var parts []string
	var stages []agent.StageTime
	for _, s := range w.cfg.Runtime.StageTimes(res.PodSandboxId) {
		parts = append(parts, s.Name+" "+s.Duration.Round(100*time.Microsecond).String())
		if s.Name == "cni" {
			s.Name = "network"
			if s.Detail == "" {
				s.Detail = w.address(ctx, res.PodSandboxId)
			}
			stages = append(stages, s)
		}
	}
	stages = append([]agent.StageTime{{Name: "sandbox", Start: start, Duration: took, Detail: strings.Join(parts, ", ")}}, stages...)
	w.stage(stages...)
	return nil
}

// errNoClass says that a pod's RuntimeClass is not there: it comes, or the pod goes.
var errNoClass = errors.New("its RuntimeClass is not there")

// runtimeHandler is the handler that the pod's RuntimeClass names; "" is the node's own.
func (w *worker) runtimeHandler(pod *v1.Pod) (string, error) {
	name := pod.Spec.RuntimeClassName
	if name == nil || *name == "" {
		return "", nil
	}
	class, ok := w.cfg.Objects.RuntimeClass(*name)
	if !ok {
		return "", fmt.Errorf("failed to get sandbox runtime: RuntimeClass %q not found: the pod waits until there is one of that name: %w",
			*name, errNoClass)
	}
	return class.Handler, nil
}

// address is the sandbox's IP, for the timeline.
func (w *worker) address(ctx context.Context, id string) string {
	st, err := w.cfg.Runtime.PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: id})
	if err != nil {
		return "" // the next look at the pod meets the same error and tells it
	}
	return st.GetStatus().GetNetwork().GetIp()
}

func (w *worker) unmountVolumes(ctx context.Context) error {
	pod := w.pod() // whose status names the claims that were made for it
	uid := pod.UID
	dir := directory(w.cfg.Paths, uid)
	if !noSubPaths(dir) {
		if err := w.cfg.SubPaths.Release(dir); err != nil {
			return err
		}
	}
	err := errors.Join(w.releaseDevices(ctx, pod), w.releaseVolumes(ctx, pod)) // neither waits for the other's driver
	if w.cfg.Plugins != nil {
		err = errors.Join(err, w.cfg.Plugins.Release(uid))
	}
	if err != nil {
		return err
	}
	w.mu.Lock()
	w.mountsBy, w.devices = nil, nil
	w.mu.Unlock()
	return nil
}

// releaseVolumes unmounts what the pod has. What cannot be unmounted holds the pod, and the user is told what that is.
func (w *worker) releaseVolumes(ctx context.Context, pod *v1.Pod) error {
	err := w.cfg.Volumes.UnmountAll(ctx, pod.UID)
	if err != nil && ctx.Err() == nil {
		w.events.event(pod, "", v1.EventTypeWarning, "FailedUnMount", err.Error()) // kubelet's word
	}
	return err
}

// releaseDevices gives back what the pod claimed. A record that cannot be read holds the pod until somebody acts, who is told.
func (w *worker) releaseDevices(ctx context.Context, pod *v1.Pod) error {
	err := w.cfg.Devices.Release(ctx, pod)
	if errors.Is(err, agent.ErrDamagedRecord) {
		w.events.event(pod, "", v1.EventTypeWarning, "FailedUnprepareDynamicResources", "Failed to unprepare dynamic resources: "+err.Error())
	}
	return err
}

// reportGone removes the pod's own files and says that nothing is left.
func (w *worker) reportGone() error {
	w.mu.Lock()
	d := w.desired
	w.mu.Unlock()
	dir := directory(w.cfg.Paths, d.Pod.UID)
	if !noSubPaths(dir) {
		if left, err := mountPoints(dir); err != nil || len(left) > 0 {
			return fmt.Errorf("removing the files of pod %s/%s: still mounted: %v (%v)", d.Pod.Namespace, d.Pod.Name, left, err)
		}
	}
	// The logs first: without the pod's folder nobody would know any more whose they are.
	if d.Pod.Name != "" {
		if err := removeLogLinks(w.cfg.Paths, d.Pod); err != nil {
			return fmt.Errorf("removing the links to the logs of pod %s/%s: %w", d.Pod.Namespace, d.Pod.Name, err)
		}
		if err := os.RemoveAll(logDirectory(w.cfg.Paths.Logs, d.Pod)); err != nil {
			return fmt.Errorf("removing the logs of pod %s/%s: %w", d.Pod.Namespace, d.Pod.Name, err)
		}
	}
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("removing the files of pod %s/%s: %w", d.Pod.Namespace, d.Pod.Name, err)
	}
	if d.Stop == nil || !d.Stop.Orphan {
		w.cfg.Reporter.PodGone(d.Pod.Namespace, d.Pod.Name, d.Pod.UID)
	}
	return nil
}

func (w *worker) removeContainer(ctx context.Context, a Action) error {
	if _, err := w.cfg.Runtime.RemoveContainer(ctx, &cri.RemoveContainerRequest{ContainerId: a.ID}); err != nil {
		return err
	}
	pod := w.pod()
	if a.Container == "" || pod.Name == "" {
		return nil
	}
	if err := removeLogLink(w.cfg.Paths, pod, a.Container, a.ID); err != nil {
		return err
	}
	base := filepath.Join(logDirectory(w.cfg.Paths.Logs, pod), logPath(a.Container, a.Attempt))
	files, err := filepath.Glob(base + "*")
	if err != nil {
		return err
	}
	w.mu.Lock()
	_, again := w.o.Busy["container/"+a.Container]
	w.mu.Unlock()
	if again {
		return nil // the next instance may write to a log of that very name
	}
	term := terminationPath(w.cfg.Paths, pod.UID, a.Container, a.Attempt)
	for _, f := range append(files, term) {
		if err := os.Remove(f); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}
