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

// gateLimit is how long to wait until proxies no longer route to the pod.
const gateLimit = time.Second

// perform executes one action and emits its events. Step decides about retries.
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
	devices, err := w.cfg.Devices.Prepare(ctx, w.pod()) // the pod's own status contains the names of its generated claims
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
	w.limits = nil // a new cgroup has the limits of its sandbox config
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

// errNoClass is the error if the pod's RuntimeClass does not exist. The pod waits until it is
// created.
var errNoClass = errors.New("its RuntimeClass is not there")

// runtimeHandler returns the handler of the pod's RuntimeClass; "" is the node's default.
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

// address returns the sandbox's IP address, for the stage report; "" on an error.
func (w *worker) address(ctx context.Context, id string) string {
	st, err := w.cfg.Runtime.PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: id})
	if err != nil {
		return "" // the next observation meets the same error and logs it
	}
	return st.GetStatus().GetNetwork().GetIp()
}

func (w *worker) unmountVolumes(ctx context.Context) error {
	pod := w.pod() // its status contains the names of its generated claims
	uid := pod.UID
	dir := directory(w.cfg.Paths, uid)
	if !noSubPaths(dir) {
		if err := w.cfg.SubPaths.Release(dir); err != nil {
			return err
		}
	}
	err := errors.Join(w.releaseDevices(ctx, pod), w.releaseVolumes(ctx, pod)) // call both, so that neither waits for the other's driver
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

// releaseVolumes unmounts the pod's volumes. A volume that cannot be unmounted keeps the pod on the
// node, and an event names it.
func (w *worker) releaseVolumes(ctx context.Context, pod *v1.Pod) error {
	err := w.cfg.Volumes.UnmountAll(ctx, pod.UID)
	if err != nil && ctx.Err() == nil {
		w.events.event(pod, "", v1.EventTypeWarning, "FailedUnMount", err.Error()) // the kubelet's reason
	}
	return err
}

// releaseDevices releases the devices of the pod's claims. An unreadable record keeps the pod on
// the node until an administrator repairs it, and an event reports it.
func (w *worker) releaseDevices(ctx context.Context, pod *v1.Pod) error {
	err := w.cfg.Devices.Release(ctx, pod)
	if errors.Is(err, agent.ErrDamagedRecord) {
		w.events.event(pod, "", v1.EventTypeWarning, "FailedUnprepareDynamicResources", "Failed to unprepare dynamic resources: "+err.Error())
	}
	return err
}

// reportGone removes the pod's directory and logs, then reports that the pod is gone.
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
	// Remove the logs first: without the pod's directory, a restarted agent could not find their
	// owner.
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
		return nil // the next instance may already write to a log of the same name
	}
	term := terminationPath(w.cfg.Paths, pod.UID, a.Container, a.Attempt)
	for _, f := range append(files, term) {
		if err := os.Remove(f); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}
