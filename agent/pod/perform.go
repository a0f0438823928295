package pod

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent/pod/lifecycle"
	"keelson.dev/keelson/agent/pod/podfiles"
	"keelson.dev/keelson/agent/pod/subpath"
)

// gateLimit is how long to wait until proxies no longer route to the pod.
const gateLimit = time.Second

// performAction executes one action and emits its events. It does not retry: Step plans a failed
// action again.
func (ar *actionRunner) performAction(ctx context.Context, action lifecycle.Action) error {
	switch action.Kind {
	case lifecycle.AllocateDevices:
		return ar.allocateDevices(ctx)
	case lifecycle.MountVolumes:
		return ar.w.storage.mountVolumes(ctx)
	case lifecycle.CreateSandbox:
		return ar.w.runtime.createSandbox(ctx, action)
	case lifecycle.EnsureImage:
		return ar.ensureImage(ctx, action)
	case lifecycle.StartContainer:
		return ar.startContainer(ctx, action)
	case lifecycle.KillContainer:
		return ar.killContainer(ctx, action)
	case lifecycle.RemoveContainer:
		return ar.removeContainer(ctx, action)
	case lifecycle.AwaitGate:
		t := time.NewTimer(gateLimit)
		defer t.Stop()
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ar.w.cfg.Deps.Reporter.StopGate(ar.w.desiredPod().UID):
		case <-t.C:
		}
		return nil
	case lifecycle.StopSandbox:
		_, err := ar.w.cfg.Deps.Runtime.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: action.ID})
		return err
	case lifecycle.RefreshVolumes:
		return ar.w.cfg.Deps.Volumes.Refresh(ctx, ar.w.podWithStatus())
	case lifecycle.UnmountVolumes:
		return ar.w.storage.unmountVolumes(ctx)
	case lifecycle.RemoveSandbox:
		_, err := ar.w.cfg.Deps.Runtime.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: action.ID})
		return err
	case lifecycle.ReportGone:
		return ar.reportGone()
	case lifecycle.ResizePod:
		return ar.w.resizer.resizePod(ctx, action.ID)
	}
	return fmt.Errorf("unknown action %d", action.Kind)
}

// reportGone removes the pod's directory and logs, then reports that the pod is gone.
func (ar *actionRunner) reportGone() error {
	ar.w.mu.Lock()
	d := ar.w.desired
	ar.w.mu.Unlock()
	dir := podfiles.PodDirectory(ar.w.cfg.Paths, d.Pod.UID)
	if !podfiles.HasNoSubPaths(dir) {
		if left, err := subpath.MountPointsBelow(dir); err != nil || len(left) > 0 {
			return fmt.Errorf("removing the files of pod %s/%s: still mounted: %v (%v)", d.Pod.Namespace,
				d.Pod.Name, left, err)
		}
	}
	// Remove the logs first: without the pod's directory, a restarted agent could not find their
	// owner.
	if d.Pod.Name != "" {
		if err := podfiles.RemoveLogLinks(ar.w.cfg.Paths, d.Pod); err != nil {
			return fmt.Errorf("removing the links to the logs of pod %s/%s: %w", d.Pod.Namespace, d.Pod.Name, err)
		}
		if err := os.RemoveAll(podfiles.LogDirectory(ar.w.cfg.Paths.Logs, d.Pod)); err != nil {
			return fmt.Errorf("removing the logs of pod %s/%s: %w", d.Pod.Namespace, d.Pod.Name, err)
		}
	}
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("removing the files of pod %s/%s: %w", d.Pod.Namespace, d.Pod.Name, err)
	}
	if d.Stop == nil || !d.Stop.Orphan {
		ar.w.cfg.Deps.Reporter.PodGone(d.Pod.Namespace, d.Pod.Name, d.Pod.UID)
	}
	return nil
}

func (ar *actionRunner) removeContainer(ctx context.Context, action lifecycle.Action) error {
	if _, err := ar.w.cfg.Deps.Runtime.RemoveContainer(ctx,
		&cri.RemoveContainerRequest{ContainerId: action.ID}); err != nil {
		return err
	}
	pod := ar.w.desiredPod()
	if action.Container == "" || pod.Name == "" {
		return nil
	}
	if err := podfiles.RemoveLogLink(ar.w.cfg.Paths, pod, action.Container, action.ID); err != nil {
		return err
	}
	base := filepath.Join(podfiles.LogDirectory(ar.w.cfg.Paths.Logs, pod),
		podfiles.ContainerLogPath(action.Container, action.Attempt))
	files, err := filepath.Glob(base + "*")
	if err != nil {
		return err
	}
	ar.w.mu.Lock()
	_, busy := ar.w.observed.Busy["container/"+action.Container]
	ar.w.mu.Unlock()
	if busy {
		return nil // the next instance may already write to a log of the same name
	}
	term := podfiles.TerminationMessagePath(ar.w.cfg.Paths, pod.UID, action.Container, action.Attempt)
	for _, f := range append(files, term) {
		if err := os.Remove(f); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}
