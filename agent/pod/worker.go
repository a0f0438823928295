package pod

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"strings"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
)

// worker runs one pod. Its goroutines: run, which alone observes and plans, one for each running
// action, and one for the probes of each running container.
type worker struct {
	cfg    *Config
	log    *slog.Logger
	events *recorder
	wake   chan struct{} // capacity 1: observe and plan again

	hosts sync.Mutex // guards the hosts file

	mu       sync.Mutex
	desired  Desired
	evicted  *Stop  // why this worker stopped the pod
	fenced   bool   // Fence was called
	pressed  bool   // Evict was called
	unsaved  bool   // evicted must still be written to disk
	grant    grant  // granted resources; desired contains them instead of the spec's
	recorded bool   // the grant is on disk
	doubtful bool   // no grant was stored: running containers may have other resources
	pending  string // reason and message (because) why the spec of generation asked is not granted
	because  string
	asked    int64
	limits   *cri.LinuxContainerResources // limits that this process set on the pod's cgroup; nil: none
	freed    func()                       // called when the pod uses fewer resources
	o        Observed                     // results of actions; observe adds the runtime's view
	ended    map[string]Container
	clocks   clocks
	last     v1.PodStatus // last computed
	sent     v1.PodStatus // last reported
	held     time.Time    // since when a minor change is held back
	mountsBy map[string]agent.Mount
	devices  agent.ClaimedDevices
	stored   storageUse // last measured
	storedAt time.Time  // zero = never
	cancels  map[string]context.CancelFunc
	probes   map[string]context.CancelFunc // by container ID
	attached *attachment                   // of the sandbox being created, since o.Early was set
	received time.Time
	quiet    bool // report no stages
	readied  bool
	reported bool // this process has sent a status
	recheck  bool // compare the sent status with the API's
	refresh  bool // projected volumes may be out of date
	wg       sync.WaitGroup
}

func newWorker(cfg *Config, d Desired) *worker {
	w := &worker{cfg: cfg, desired: d, log: cfg.Log.With("pod", d.Pod.Namespace+"/"+d.Pod.Name, "uid", d.Pod.UID), wake: make(chan struct{}, 1),
		o:     Observed{Images: map[string]Image{}, Failures: map[string]Failure{}, Probes: map[string]agent.ProbeState{}, Killed: map[string]string{}, Busy: map[string]Busy{}, Settled: map[string]bool{}},
		ended: map[string]Container{}, clocks: newClocks(), last: *d.Pod.Status.DeepCopy(), cancels: map[string]context.CancelFunc{}, probes: map[string]context.CancelFunc{}, received: cfg.now(),
		grant: grantOf(d.Pod), freed: func() {}}
	w.events = &recorder{reporter: cfg.Reporter, node: cfg.NodeName, mute: d.Stop != nil && d.Stop.Orphan, now: cfg.now, seen: map[string]*v1.Event{}}
	w.o.StartTime, w.o.Since = w.received, w.received
	w.o.Deadline = deletionDeadline(d.Pod, time.Time{}, w.received)
	w.o.Devices.Missing = cfg.wantsDevices(d.Pod)
	if t := d.Pod.Status.StartTime; t != nil {
		// An earlier agent process acknowledged the pod and reported its stages.
		w.o.StartTime, w.o.Since, w.quiet = t.Time, anchor(t.Time, time.Time{}, w.received), true
	}
	return w
}

// poke makes the worker observe and plan again.
func (w *worker) poke() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// update replaces the desired state. A deletion is permanent, and a grace period never grows.
func (w *worker) update(d Desired) {
	w.mu.Lock()
	if old := w.desired.Pod.DeletionTimestamp; !old.Equal(d.Pod.DeletionTimestamp) {
		notBefore := w.received // the pod was not deleted before
		if old != nil {
			notBefore = time.Time{}
		}
		w.o.Deadline = deletionDeadline(d.Pod, notBefore, w.cfg.now())
	}
	if w.desired.Stop != nil && w.desired.Stop.Delete && (d.Stop == nil || !d.Stop.Delete) {
		d.Stop = w.desired.Stop // a deletion cannot be undone
	}
	if d.Stop == nil {
		d.Stop = w.evicted
	}
	if old := w.desired.Stop; old != nil && d.Stop != nil && d.Stop.Delete && (old.Delete || old == w.evicted) {
		d.Stop = d.Stop.within(old.Grace) // a shortened grace period is not extended again
	}
	d.Pod = w.grant.of(d.Pod)
	w.desired = d
	w.mu.Unlock()
	w.poke()
}

// noClass is the failure reason if the pod's RuntimeClass does not exist.
const noClass = "RuntimeClassNotFound"

// retrySoon makes failed actions retry now if they may have waited for an object that has arrived.
func (w *worker) retrySoon() {
	w.mu.Lock()
	for key, f := range w.o.Failures {
		if f.Reason == "CreateContainerConfigError" || f.Reason == noClass || key == "volumes" {
			f.Retry = time.Time{}
			w.o.Failures[key] = f
		}
	}
	w.mu.Unlock()
	w.poke()
}

// relist makes the worker observe again and compare the reported status with the API's.
func (w *worker) relist() {
	w.mu.Lock()
	w.recheck = true
	w.mu.Unlock()
	w.poke()
}

// stale makes the worker refresh projected volumes and retry: their source objects may have
// changed.
func (w *worker) stale() {
	w.mu.Lock()
	w.refresh = true
	w.mu.Unlock()
	w.retrySoon()
}

// pod returns the desired pod.
func (w *worker) pod() *v1.Pod {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.desired.Pod
}

// podWithStatus returns the desired pod with the last computed status, for the downward API.
func (w *worker) podWithStatus() *v1.Pod {
	w.mu.Lock()
	defer w.mu.Unlock()
	p := *w.desired.Pod
	p.Status = w.last
	return &p
}

// run observes and acts until the pod is gone (it returns nil) or ctx ends. Then it cancels running
// actions and waits for them. Containers keep running.
func (w *worker) run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer w.wg.Wait()
	defer cancel()
	w.stage(agent.StageTime{Name: "received", Start: w.received})
	w.record()
	if !limitsOf(w.pod()).none() {
		w.wg.Go(func() { w.keepStorage(ctx) })
	}
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		plan := w.turn(ctx)
		if plan.Done {
			return nil
		}
		var due <-chan time.Time
		if !plan.Wake.IsZero() {
			timer.Reset(max(0, plan.Wake.Sub(w.cfg.now())))
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

// turn observes the pod once, plans, reports the status and starts the actions.
func (w *worker) turn(ctx context.Context) Plan {
	w.keepEviction()
	// Copy the running actions before observing. An action that ends during the observation may
	// have had its effect after it, and must not be planned a second time.
	w.mu.Lock()
	busy := maps.Clone(w.o.Busy)
	w.mu.Unlock()
	seen, ok := w.observe(ctx)
	w.mu.Lock()
	if ok {
		w.o.Sandboxes, w.o.Containers, w.o.Listed = seen.Sandboxes, seen.Containers, true
		w.forget()
		w.compare()
	} else {
		w.o.Listed = false
	}
	if ok {
		// Sync probes before planning and reporting: the probe states must match the observed
		// containers.
		w.syncProbes(ctx)
	}
	w.o.Resize = w.resizeState()
	w.lookAtDevices()
	d, o := w.desired, w.o
	// Actions write to the maps: Step gets copies.
	o.Images, o.Failures, o.Probes = maps.Clone(o.Images), maps.Clone(o.Failures), maps.Clone(o.Probes)
	o.Killed, o.Busy, o.Settled = maps.Clone(o.Killed), busy, maps.Clone(o.Settled)
	w.mu.Unlock()

	now := w.cfg.now()
	plan := Step(d, o, now)
	if ok {
		plan.wakeAt(w.report(d, o, now))
	}
	for _, a := range plan.Actions {
		w.launch(ctx, a, now)
	}
	w.mu.Lock()
	refresh := w.refresh && d.Stop == nil && w.o.Volumes.Mounted && !w.o.busy("volumes")
	if refresh {
		w.refresh = false
	}
	w.mu.Unlock()
	if refresh {
		w.launch(ctx, Action{Kind: RefreshVolumes}, now)
	}
	return plan
}

// forget drops the recorded state of containers and sandboxes that no longer exist.
func (w *worker) forget() {
	live := map[string]bool{}
	for _, c := range w.o.Containers {
		live[c.ID] = true
	}
	maps.DeleteFunc(w.o.Probes, func(id string, _ agent.ProbeState) bool { return !live[id] })
	maps.DeleteFunc(w.o.Killed, func(id string, _ string) bool { return !live[id] })
	maps.DeleteFunc(w.ended, func(id string, _ Container) bool { return !live[id] })
	for _, sb := range w.o.Sandboxes {
		live[sb.ID] = true
	}
	for _, m := range []map[string]time.Time{w.clocks.alive, w.clocks.began, w.clocks.born} {
		maps.DeleteFunc(m, func(id string, _ time.Time) bool { return !live[id] })
	}
}

// launch starts an action in its own goroutine.
func (w *worker) launch(ctx context.Context, a Action, now time.Time) {
	if a.Kind == Cancel {
		w.mu.Lock()
		if b, ok := w.o.Busy[a.Target]; ok {
			b.Cancelled = true
			w.o.Busy[a.Target] = b
			w.cancels[a.Target]()
		}
		w.mu.Unlock()
		return
	}
	key := a.Key()
	actx, cancel := context.WithCancel(ctx)
	w.mu.Lock()
	if w.o.busy(key) {
		w.mu.Unlock()
		cancel()
		return
	}
	b := Busy{Kind: a.Kind, Since: now}
	if a.Kind == KillContainer {
		b.Until = now.Add(a.Grace)
		if w.desired.Stop == nil {
			w.o.Killed[a.ID] = a.Why // record it before the container can exit, or its exit would count as its own
		}
	}
	w.o.Busy[key], w.cancels[key] = b, cancel
	w.mu.Unlock()
	w.log.Debug("begin", "action", a.String())
	w.wg.Go(func() {
		err := w.perform(actx, a)
		cancelled := actx.Err() != nil
		cancel()
		w.mu.Lock()
		delete(w.o.Busy, key)
		delete(w.cancels, key)
		w.settle(a, err, cancelled)
		w.mu.Unlock()
		if err != nil && !cancelled {
			w.log.Warn("action failed", "action", a.String(), "err", err)
		}
		w.poke()
	})
}

// settle records the result of an action. The lock is held.
func (w *worker) settle(a Action, err error, cancelled bool) {
	key := a.Key()
	if a.Kind == CreateSandbox {
		w.o.Early = ""
	}
	if errors.Is(err, errNoSandbox) {
		return // not a failure of the container: it is started in the next sandbox
	}
	if err == nil {
		delete(w.o.Failures, key)
		switch a.Kind {
		case StopSandbox, AwaitGate, ReportGone:
			w.o.Settled[key] = true
		case AllocateDevices:
			w.o.Devices.Missing = false
		case MountVolumes:
			w.o.Volumes = Volumes{Mounted: true}
		case UnmountVolumes:
			w.o.Volumes = Volumes{Away: true}
		}
		return
	}
	if cancelled {
		return
	}
	now := w.cfg.now()
	f := Failure{Message: err.Error(), Count: w.o.Failures[key].Count + 1, At: now, Attempt: a.Attempt}
	switch a.Kind {
	case EnsureImage:
		f.Reason, f.Message = imageReason(err)
		f.Retry = now.Add(grow(imageMin, imageMax, f.Count))
	case StartContainer:
		f.Reason, f.Message = startReason(err)
		if errors.Is(err, agent.ErrImageNotPresent) {
			delete(w.o.Images, a.Container) // the image was removed since its lookup: look it up again, or pull it
		}
		f.Retry = now.Add(grow(restartMin, restartMax, f.Count))
	default:
		if errors.Is(err, errNoClass) {
			f.Reason = noClass
		}
		f.Retry = now.Add(grow(retryMin, retryMax, f.Count))
	}
	f.Message = bothEnds(f.Message)
	w.o.Failures[key] = f
}

// bothEnds truncates a failure message for the status. A registry may return a page of text, and
// each mirror too. It keeps the start and the end, because the last one tried is the registry
// itself.
func bothEnds(message string) string {
	const head, tail = 3 << 10, 1 << 10
	if len(message) > head+tail {
		message = message[:head] + " ... (the agent's log says all) ... " + message[len(message)-tail:]
	}
	return strings.ToValidUTF8(message, "")
}

// stage reports measured steps of the pod's start, until it is first Ready. Later steps are not
// part of the start.
func (w *worker) stage(stages ...agent.StageTime) {
	w.mu.Lock()
	p, over := w.desired.Pod, w.quiet || w.readied
	w.mu.Unlock()
	if !over {
		w.tell(p, stages)
	}
}

func (w *worker) tell(p *v1.Pod, stages []agent.StageTime) {
	if tp := p.Annotations["keelson.dev/traceparent"]; tp != "" && len(stages) > 0 {
		w.cfg.Reporter.Stages(tp, "pod/"+p.Namespace+"/"+p.Name, stages)
	}
}
