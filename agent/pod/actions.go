package pod

import (
	"context"
	"errors"
	"strings"
	"sync"
	"time"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/pod/admission"
	"keelson.dev/keelson/agent/pod/lifecycle"
)

// actionRunner runs the actions of a worker, each in its own goroutine. Its fields are guarded by
// worker.mu, except wg.
type actionRunner struct {
	w       *worker
	cancels map[string]context.CancelFunc // cancel functions of running actions, by action key
	wg      sync.WaitGroup                // running actions, probes and measurements
}

// launchAction starts an action in its own goroutine, unless an action with the same key is
// running. It performs a Cancel action immediately instead.
func (ar *actionRunner) launchAction(ctx context.Context, action lifecycle.Action, currentTime time.Time) {
	if action.Kind == lifecycle.Cancel {
		ar.w.mu.Lock()
		if b, ok := ar.w.observed.Busy[action.Target]; ok {
			b.Cancelled = true
			ar.w.observed.Busy[action.Target] = b
			ar.cancels[action.Target]()
		}
		ar.w.mu.Unlock()
		return
	}
	key := action.Key()
	actx, cancel := context.WithCancel(ctx)
	ar.w.mu.Lock()
	if ar.w.observed.IsBusy(key) {
		ar.w.mu.Unlock()
		cancel()
		return
	}
	b := lifecycle.RunningAction{Kind: action.Kind, Since: currentTime}
	if action.Kind == lifecycle.KillContainer {
		b.Until = currentTime.Add(action.Grace)
		if ar.w.desired.Stop == nil {
			// record it before the container can exit, or its exit would count as its own
			ar.w.observed.Killed[action.ID] = action.Message
		}
	}
	ar.w.observed.Busy[key], ar.cancels[key] = b, cancel
	ar.w.mu.Unlock()
	ar.w.log.Debug("action started", "action", action.String())
	ar.wg.Go(func() {
		err := ar.performAction(actx, action)
		cancelled := actx.Err() != nil
		cancel()
		ar.w.mu.Lock()
		delete(ar.w.observed.Busy, key)
		delete(ar.cancels, key)
		ar.recordResult(action, err, cancelled)
		ar.w.mu.Unlock()
		if err != nil && !cancelled {
			ar.w.log.Warn("action failed", "action", action.String(), "err", err)
		}
		ar.w.wakeUp()
	})
}

// recordResult updates the worker's observed state with the result of an action: its effect, or its
// failure and the time of the next attempt. A cancelled action is not a failure. The lock is held.
func (ar *actionRunner) recordResult(action lifecycle.Action, err error, cancelled bool) {
	key := action.Key()
	if action.Kind == lifecycle.CreateSandbox {
		ar.w.observed.EarlySandbox = ""
	}
	if errors.Is(err, errSandboxFailed) {
		return // not a failure of the container: it is started in the next sandbox
	}
	if err == nil {
		delete(ar.w.observed.Failures, key)
		switch action.Kind {
		case lifecycle.StopSandbox, lifecycle.AwaitGate, lifecycle.ReportGone:
			ar.w.observed.Finished[key] = true
		case lifecycle.AllocateDevices:
			ar.w.observed.Devices.Missing = false
		case lifecycle.MountVolumes:
			ar.w.observed.Volumes = lifecycle.Volumes{Mounted: true}
		case lifecycle.UnmountVolumes:
			ar.w.observed.Volumes = lifecycle.Volumes{Unmounted: true}
		}
		return
	}
	if cancelled {
		return
	}
	now := ar.w.cfg.currentTime()
	f := lifecycle.Failure{Message: err.Error(), Count: ar.w.observed.Failures[key].Count + 1, At: now,
		Attempt: action.Attempt}
	switch action.Kind {
	case lifecycle.EnsureImage:
		f.Reason, f.Message = imageFailureReason(err)
		f.Retry = now.Add(lifecycle.ExponentialDelay(lifecycle.ImageMin, lifecycle.ImageMax, f.Count))
	case lifecycle.StartContainer:
		f.Reason, f.Message = startFailureReason(err)
		if errors.Is(err, agent.ErrImageNotPresent) {
			// the image was removed since its lookup: look it up again, or pull it
			delete(ar.w.observed.Images, action.Container)
		}
		f.Retry = now.Add(lifecycle.ExponentialDelay(lifecycle.RestartMin, lifecycle.RestartMax, f.Count))
	default:
		if errors.Is(err, errNoRuntimeClass) {
			f.Reason = reasonRuntimeClassNotFound
		}
		f.Retry = now.Add(lifecycle.ExponentialDelay(lifecycle.RetryMin, lifecycle.RetryMax, f.Count))
	}
	f.Message = truncateMiddle(f.Message)
	ar.w.observed.Failures[key] = f
}

// truncateMiddle removes the middle of a failure message that is too long for the pod's status. A
// registry and each of its mirrors may return a page of text. The message keeps its start, and its
// end, which has the response of the registry itself: mirrors are tried first.
func truncateMiddle(message string) string {
	const head, tail = 3 << 10, 1 << 10
	if len(message) > head+tail {
		message = message[:head] + " ... (truncated, the agent's log has the whole message) ... " +
			message[len(message)-tail:]
	}
	return strings.ToValidUTF8(message, "")
}

// reasonRuntimeClassNotFound is the failure reason if the pod's RuntimeClass does not exist.
const reasonRuntimeClassNotFound = "RuntimeClassNotFound"

// allocateDevices allocates the pod's devices. If that fails, the pod fails permanently, as in a
// kubelet. Its controller creates another pod, which is scheduled again.
func (ar *actionRunner) allocateDevices(ctx context.Context) error {
	pod := ar.w.desiredPod()
	err := ar.w.cfg.Deps.Plugins.Allocate(ctx, pod)
	if err == nil || ctx.Err() != nil {
		return err
	}
	ar.w.evictor.rejectPod(pod, admission.NewRejection(pod, reasonNotAdmitted,
		"Allocate failed due to %v, which is unexpected", err))
	return err
}
