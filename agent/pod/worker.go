package pod

import (
	"context"
	"log/slog"
	"maps"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/pod/criconfig"
	"keelson.dev/keelson/agent/pod/diskusage"
	"keelson.dev/keelson/agent/pod/lifecycle"
	"keelson.dev/keelson/agent/pod/podevents"
	"keelson.dev/keelson/internal/wakeup"
)

// worker runs one pod. Its goroutine runUntilGone alone observes the runtime and plans. Each
// running action, and the probes of each running container, have their own goroutine.
type worker struct {
	cfg    *Config
	log    *slog.Logger
	events *podevents.Recorder
	wake   wakeup.Signal // observe and plan again

	configs *criconfig.Builder

	mu       sync.Mutex // also guards the fields of the parts below
	desired  lifecycle.Desired
	observed lifecycle.Observed // results of actions; observeRuntime adds the runtime's view

	actions actionRunner
	runtime podRuntime
	storage podStorage
	probes  probeRunner
	status  statusReporter
	resizer resizer
	evictor evictor
}

func newWorker(cfg *Config, desired lifecycle.Desired) *worker {
	now := cfg.currentTime()
	w := &worker{cfg: cfg, desired: desired,
		log:  cfg.Log.With("pod", desired.Pod.Namespace+"/"+desired.Pod.Name, "uid", desired.Pod.UID),
		wake: wakeup.New(),
		observed: lifecycle.Observed{Images: map[string]lifecycle.Image{}, Failures: map[string]lifecycle.Failure{},
			Probes: map[string]agent.ProbeState{}, Killed: map[string]string{},
			Busy: map[string]lifecycle.RunningAction{}, Finished: map[string]bool{}}}
	w.events = podevents.New(cfg.Deps.Reporter, cfg.Identity.NodeName, cfg.currentTime,
		desired.Stop != nil && desired.Stop.Orphan)
	w.configs = cfg.newBuilder(w.events)
	w.actions = actionRunner{w: w, cancels: map[string]context.CancelFunc{}}
	w.runtime = podRuntime{w: w, ended: map[string]lifecycle.Container{}, times: newObservationTimes()}
	w.storage = podStorage{w: w}
	w.probes = probeRunner{w: w, cancels: map[string]context.CancelFunc{}}
	w.status = statusReporter{w: w, last: *desired.Pod.Status.DeepCopy(), received: now}
	w.resizer = resizer{w: w, grant: lifecycle.GrantFromSpec(desired.Pod), onFreed: func() {}}
	w.evictor = evictor{w: w}
	w.observed.Times.Start, w.observed.Times.Acknowledged = now, now
	w.observed.Times.Deadline = deletionDeadline(desired.Pod, time.Time{}, now)
	w.observed.Devices.Missing = cfg.requestsDevices(desired.Pod)
	if t := desired.Pod.Status.StartTime; t != nil {
		// An earlier agent process acknowledged the pod and reported its stages.
		w.observed.Times.Start, w.observed.Times.Acknowledged, w.status.stagesDone = t.Time,
			monotonicTime(t.Time, time.Time{}, now), true
	}
	return w
}

// wakeUp makes the worker observe and plan again.
func (w *worker) wakeUp() {
	w.wake.Send()
}

// updateDesired replaces the desired state of the pod. A deletion cannot be undone, and its grace
// period is never extended.
func (w *worker) updateDesired(desired lifecycle.Desired) {
	w.mu.Lock()
	if old := w.desired.Pod.DeletionTimestamp; !old.Equal(desired.Pod.DeletionTimestamp) {
		notBefore := w.status.received // the pod was not deleted before
		if old != nil {
			notBefore = time.Time{}
		}
		w.observed.Times.Deadline = deletionDeadline(desired.Pod, notBefore, w.cfg.currentTime())
	}
	if w.desired.Stop != nil && w.desired.Stop.Delete && (desired.Stop == nil || !desired.Stop.Delete) {
		desired.Stop = w.desired.Stop // a deletion cannot be undone
	}
	if desired.Stop == nil {
		desired.Stop = w.evictor.stop
	}
	if old := w.desired.Stop; old != nil && desired.Stop != nil && desired.Stop.Delete &&
		(old.Delete || old == w.evictor.stop) {
		desired.Stop = desired.Stop.LimitGrace(old.Grace) // a shortened grace period is not extended again
	}
	desired.Pod = w.resizer.grant.ApplyTo(desired.Pod)
	w.desired = desired
	w.mu.Unlock()
	w.wakeUp()
}

// retryFailedActions makes failed actions retry immediately if they may have waited for an object
// of the API. These are mounts, and starts that failed with a configuration error or without a
// RuntimeClass.
func (w *worker) retryFailedActions() {
	w.mu.Lock()
	for key, f := range w.observed.Failures {
		if f.Reason == "CreateContainerConfigError" || f.Reason == reasonRuntimeClassNotFound || key == "volumes" {
			f.Retry = time.Time{}
			w.observed.Failures[key] = f
		}
	}
	w.mu.Unlock()
	w.wakeUp()
}

// requestStatusCheck makes the worker observe again, and report its status if the status in the API
// differs.
func (w *worker) requestStatusCheck() {
	w.mu.Lock()
	w.status.checkDue = true
	w.mu.Unlock()
	w.wakeUp()
}

// requestRefresh makes the worker rewrite projected volumes and retry failed actions, because the
// source objects of volumes may have changed.
func (w *worker) requestRefresh() {
	w.mu.Lock()
	w.storage.refreshDue = true
	w.mu.Unlock()
	w.retryFailedActions()
}

// desiredPod returns the pod of the desired state. The pod's spec has the granted resources.
func (w *worker) desiredPod() *v1.Pod {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.desired.Pod
}

// podWithStatus returns the desired pod with the last computed status, for the downward API.
func (w *worker) podWithStatus() *v1.Pod {
	w.mu.Lock()
	defer w.mu.Unlock()
	p := *w.desired.Pod
	p.Status = w.status.last
	return &p
}

// runUntilGone observes the pod and performs the planned actions until the pod is gone or ctx ends.
// If ctx ends, it cancels running actions and waits for them; containers keep running. It returns
// nil if the pod is gone.
func (w *worker) runUntilGone(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer w.actions.wg.Wait()
	defer cancel()
	w.status.reportStage(agent.StageTime{Name: "received", Start: w.status.received})
	w.resizer.saveInitialGrant()
	if !diskusage.PodLimits(w.desiredPod()).IsEmpty() {
		w.actions.wg.Go(func() { w.storage.monitorStorage(ctx) })
	}
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		plan := w.reconcileOnce(ctx)
		if plan.Done {
			return nil
		}
		var due <-chan time.Time
		if !plan.Wake.IsZero() {
			timer.Reset(max(0, plan.Wake.Sub(w.cfg.currentTime())))
			due = timer.C
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-w.wake:
		case <-due:
		}
	}
}

// reconcileOnce observes the pod once, plans, reports the status and starts the planned actions. It
// returns the plan.
func (w *worker) reconcileOnce(ctx context.Context) lifecycle.Plan {
	w.evictor.retrySaveEviction()
	// Copy the running actions before observing. An action that ends during the observation may
	// have had its effect after it, and must not be planned a second time.
	w.mu.Lock()
	busy := maps.Clone(w.observed.Busy)
	w.mu.Unlock()
	seen, ok := w.runtime.observeRuntime(ctx)
	w.mu.Lock()
	if ok {
		w.observed.Sandboxes, w.observed.Containers, w.observed.Listed = seen.Sandboxes, seen.Containers, true
		w.dropStaleState()
		w.resizer.verifyUnrecordedGrant()
	} else {
		w.observed.Listed = false
	}
	if ok {
		// Sync probes before planning and reporting: the probe states must match the observed
		// containers.
		w.probes.syncProbes(ctx)
	}
	w.observed.Resize = w.resizer.resizeState()
	w.updateDeviceHealth()
	d, o := w.desired, w.observed
	// Actions write to the maps: Step gets copies.
	o.Images, o.Failures, o.Probes = maps.Clone(o.Images), maps.Clone(o.Failures), maps.Clone(o.Probes)
	o.Killed, o.Busy, o.Finished = maps.Clone(o.Killed), busy, maps.Clone(o.Finished)
	w.mu.Unlock()

	now := w.cfg.currentTime()
	plan := lifecycle.Step(d, o, now)
	if ok {
		plan.WakeAt(w.status.reportStatus(d, o, now))
	}
	for _, a := range plan.Actions {
		w.actions.launchAction(ctx, a, now)
	}
	w.mu.Lock()
	refresh := w.storage.refreshDue && d.Stop == nil && w.observed.Volumes.Mounted && !w.observed.IsBusy("volumes")
	if refresh {
		w.storage.refreshDue = false
	}
	w.mu.Unlock()
	if refresh {
		w.actions.launchAction(ctx, lifecycle.Action{Kind: lifecycle.RefreshVolumes}, now)
	}
	return plan
}

// dropStaleState drops the recorded state of containers and sandboxes that no longer exist.
func (w *worker) dropStaleState() {
	live := map[string]bool{}
	for _, c := range w.observed.Containers {
		live[c.ID] = true
	}
	maps.DeleteFunc(w.observed.Probes, func(id string, _ agent.ProbeState) bool { return !live[id] })
	maps.DeleteFunc(w.observed.Killed, func(id string, _ string) bool { return !live[id] })
	maps.DeleteFunc(w.runtime.ended, func(id string, _ lifecycle.Container) bool { return !live[id] })
	for _, sb := range w.observed.Sandboxes {
		live[sb.ID] = true
	}
	for _, m := range []map[string]time.Time{w.runtime.times.lastAlive, w.runtime.times.started,
		w.runtime.times.created} {
		maps.DeleteFunc(m, func(id string, _ time.Time) bool { return !live[id] })
	}
}

// hasRemains reports whether an evicted pod still has running containers or mounted volumes. While
// disk space is being reclaimed, exited containers count too. The lock is held.
func (w *worker) hasRemains() bool {
	return w.observed.HasRunningContainer() || !w.observed.Volumes.Unmounted ||
		w.observed.ReclaimDisk && len(w.observed.Containers) > 0
}

func (w *worker) setDiskReclaim(enabled bool) (left int) {
	w.mu.Lock()
	changed := enabled && !w.observed.ReclaimDisk
	w.observed.ReclaimDisk = enabled
	if lifecycle.IsEndRecorded(w.desired) {
		left = len(w.observed.Containers)
	}
	w.mu.Unlock()
	if changed {
		w.wakeUp()
	}
	return left
}

// hasEnded reports whether the pod's phase is terminal, in the API or in the last computed status.
// The lock is held.
func (w *worker) hasEnded() bool {
	return lifecycle.IsTerminal(w.desired.Pod) || agent.IsTerminalPhase(w.status.last.Phase)
}

// usesNodeResources reports whether the pod's requests still count against the node's resources.
// They count until the pod has ended or, for a deleted pod, until it has no sandbox and no running
// container.
func (w *worker) usesNodeResources() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.desired.Stop != nil && w.desired.Stop.Delete && len(w.observed.Sandboxes) == 0 &&
		!w.observed.HasRunningContainer() {
		return false // it has ended, although its worker may live longer than its object
	}
	return !lifecycle.IsTerminal(w.desired.Pod) && !agent.IsTerminalPhase(w.status.last.Phase)
}
