// Package scheduler assigns pods to nodes. framework.Profile.Schedule makes the decision: it is a
// function of a snapshot and a pod, in which plugins filter and score nodes. The rest of the
// package is a queue of pods, the cluster state and concurrent bindings. Informers fill the queue.
// A pod is counted in the cluster state as soon as its node is chosen.
//
//	informers ─▶ queue ─▶ one loop: snapshot ▸ Schedule ▸ assume ▸ Reserve ▸ Permit ─▶ many bindings at once
//	         └▶ cluster ◀──────────────────────────────┘                              └▶ events, conditions, timeline
package scheduler

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/scheduler/config"
	"keelson.dev/keelson/controlplane/scheduler/framework"
	"keelson.dev/keelson/internal/lifecycle"
)

// Config is the configuration of a Scheduler.
type Config struct {
	// Client calls the API as the scheduler (client.As(api.User{Name: api.UserScheduler ...})).
	Client    *client.Client
	Informers *client.Informers // New registers informers; the server runs them
	Actor     string            // name of this replica in timelines, for example "scheduler/cp2"
	Timeline  *api.Timeline     // may be nil
	Log       *slog.Logger      // may be nil

	// Settings is the content of the scheduler configuration file; nil means config.Default.
	Settings *config.Config
	// ConfirmLeadership returns nil if this replica is the raft leader in the term fence. It is
	// called before an extender binds a pod, because a fence cannot stop an extender. If it is nil,
	// extenders bind without confirmation.
	ConfirmLeadership func(ctx context.Context, fence uint64) error
	// Plugins, if set, returns the plugins of the only profile, default-scheduler. Settings are
	// then not used for profiles.
	Plugins func(h *framework.Handle) []framework.Weighted
}

// Limits of concurrent work. When one of the first two is reached, further pods wait in the queue.
// When a queue of notes is full, further notes are dropped.
const (
	maxBindings = 256  // bindings and evictions that run at the same time
	maxHeld     = 4096 // bindings that wait for volumes, devices or Permit
	maxNotes    = 16384
	noteWorkers = 8                     // number of queues of notes; all notes of a pod go to the same one, so that they are written in order
	maxEvents   = 128                   // events written in parallel
	eventDelay  = 50 * time.Millisecond // how long events are collected
)

// Scheduler schedules pods while its replica is the raft leader. On the other replicas it only
// keeps the queue and the cluster state up to date.
type Scheduler struct {
	cfg      Config
	log      *slog.Logger
	profiles *profiles
	err      error // error of the profiles, which Run returns
	cluster  *cluster
	queue    *queue
	groups   *groupTracker
	waiting  *waitingPods
	volumes  *broadcast
	devices  *broadcast

	changeMu     sync.Mutex // held while a change from an informer is applied
	unconfirmed  unconfirmedBindings
	writer       atomic.Pointer[client.Client] // client with the fence of the current Run
	fence        atomic.Uint64                 // fence of the current or last Run
	bindingSlots chan struct{}
	heldSlots    chan struct{}
	evictions    sync.WaitGroup                   // evictions of victims
	notes        [noteWorkers]chan *podUpdateNote // pointers: empty queues of this capacity take 128 KiB
	placedNotes  chan *podUpdateNote              // notes about bound pods
	nextNode     int                              // index of the first node to filter; used by the loop only
}

// New returns a scheduler and registers its informer handlers. It schedules nothing before Run.
func New(cfg Config) *Scheduler {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Settings == nil {
		cfg.Settings = config.Default()
	}
	s := &Scheduler{
		cfg: cfg, log: cfg.Log, waiting: newWaitingPods(), volumes: newBroadcast(), devices: newBroadcast(),
		bindingSlots: make(chan struct{}, maxBindings), heldSlots: make(chan struct{}, maxHeld), placedNotes: make(chan *podUpdateNote, maxNotes),
	}
	for i := range s.notes {
		s.notes[i] = make(chan *podUpdateNote, maxNotes/noteWorkers)
	}
	if s.profiles, s.err = s.makeProfiles(); s.err != nil {
		return s
	}
	s.cluster = newCluster(s.storageAccess(), s.ownerSelector)
	s.groups = s.cluster.groups
	s.queue = newQueue(s.profiles, time.Now)
	s.queue.minBackoff = cmp.Or(cfg.Settings.InitialBackoff, minBackoff)
	s.queue.maxBackoff = max(cmp.Or(cfg.Settings.MaxBackoff, maxBackoff), s.queue.minBackoff)
	s.registerHandlers()
	return s
}

// Names returns the schedulerNames for which this scheduler has a profile.
func (s *Scheduler) Names() []string { return s.cfg.Settings.Names() }

func (s *Scheduler) makeProfiles() (*profiles, error) {
	if s.cfg.Plugins == nil {
		return newProfiles(s.cfg.Settings, s.newHandle, s.confirmLeadership)
	}
	h := s.newHandle()
	p, err := framework.NewProfile(s.cfg.Plugins(h)...)
	if err != nil {
		return nil, err
	}
	h.Fits = p.Fits
	return singleProfile(p), nil
}

// Run schedules pods until ctx ends, which is when this replica loses leadership. fence is the raft
// term; every write carries it. The informers must be synced. Run may be called again in a later
// term. It returns early only if the configuration is invalid.
func (s *Scheduler) Run(ctx context.Context, fence uint64) error {
	if s.err != nil {
		return s.err
	}
	for _, w := range s.cfg.Settings.Warnings {
		s.log.Warn("scheduler configuration: " + w)
	}
	s.writer.Store(s.cfg.Client.Fenced(fence))
	// Handlers may lag behind the informers' stores. Scheduling on older state could overcommit a
	// node.
	s.syncFromInformers(ctx)
	if led := s.fence.Swap(fence); led != fence || fence == 0 {
		// No write of an earlier leadership is still pending, and the informers contain all its
		// writes.
		s.unconfirmed.takeAll()
		if shared := s.profiles.shared; shared != nil {
			shared.Ledger.Settle()
		}
	}
	s.groups.resetAttempts()
	s.queue.requeueAll(ctx)
	resume := s.resumeUnconfirmed()
	defer s.cluster.forgetAssumed()
	parts := []lifecycle.Part{
		{Name: "scheduler: loop", Run: s.runLoop},
		{Name: "scheduler: overdue", Run: s.requeueOverduePods},
		{Name: "scheduler: unconfirmed bindings", Run: resume},
		{Name: "scheduler: unconfirmed claims", Run: s.confirmClaims},
		{Name: "scheduler: events", Run: s.writePlaced},
	}
	for _, notes := range s.notes {
		parts = append(parts, lifecycle.Part{Name: "scheduler: notes", Run: func(ctx context.Context) error { return s.writeNotes(ctx, notes) }})
	}
	return lifecycle.Run(ctx, parts...)
}

func (s *Scheduler) requeueOverduePods(ctx context.Context) error {
	t := time.NewTicker(30 * time.Second)
	defer t.Stop()
	for {
		select {
		case <-t.C:
			s.queue.requeueOverdue(ctx)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// confirmClaims periodically determines the outcome of ResourceClaim allocations that were sent
// with an unknown outcome. It frees the devices of those that certainly are not stored.
func (s *Scheduler) confirmClaims(ctx context.Context) error {
	t := time.NewTicker(2 * time.Second)
	defer t.Stop()
	for {
		select {
		case <-t.C:
			if shared := s.profiles.shared; shared != nil && shared.Ledger.Confirm(ctx, s.deviceAccess()) {
				s.queue.handleEvent(ctx, framework.DeviceClaimChanged, nil)
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// runLoop schedules one pod, or one group of pods, at a time. It returns after ctx has ended and
// all bindings and evictions have returned.
func (s *Scheduler) runLoop(ctx context.Context) error {
	binders := newWorkerPool()
	defer binders.waitForTasks()
	defer s.evictions.Wait()
	ties := rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))
	for {
		pod := s.queue.pop(ctx)
		if pod == nil {
			return ctx.Err()
		}
		s.runRecovering(ctx, pod, func() { s.schedulePod(ctx, pod, ties, binders) })
	}
}

// runRecovering calls f. A panic is logged and handled as a failed attempt to schedule the pod.
func (s *Scheduler) runRecovering(ctx context.Context, pod *queuedPod, f func()) {
	defer func() {
		if x := recover(); x != nil {
			s.log.Error("panic while scheduling a pod", "pod", pod.Pod.Namespace+"/"+pod.Pod.Name, "panic", x, "stack",
				string(debug.Stack()))
			s.cluster.forgetAssumedPod(pod.Pod.UID)
			s.reportFailure(pod, v1.PodReasonSchedulerError, fmt.Sprintf("panic: %v", x))
			s.queue.requeueFailed(ctx, pod, nil)
		}
	}()
	f()
}

// nodeChoice is a pod with the node that was chosen for it and on which it is assumed.
type nodeChoice struct {
	pod    *queuedPod
	cycle  *framework.Cycle
	result framework.Result
	delays map[string]time.Duration // maximum delay of the binding, by Permit plugin
}

// schedulingFailure is the reason why an attempt to schedule a pod failed. err is set if no node
// was found; it is a *framework.FitError if no node fits. status is set if a plugin refused the
// chosen node. If neither is set, the pod already is on a node.
type schedulingFailure struct {
	pod    *queuedPod
	cycle  *framework.Cycle
	err    error
	node   string
	status *framework.Status
}

// schedulePod chooses a node for one pod, or for all pods of its group, and starts the bindings.
// ties decides between equally good nodes; binders run the bindings.
func (s *Scheduler) schedulePod(ctx context.Context, pod *queuedPod, ties *rand.Rand, binders *workerPool) {
	if g, ok := s.gangToPlace(pod.Pod); ok {
		s.attemptGroup(ctx, pod, g, ties, binders)
		return
	}
	x, f := s.chooseNode(ctx, pod, ties)
	if f != nil {
		s.handleFailure(ctx, *f)
		return
	}
	s.startBinding(ctx, x, binders)
}

// chooseNode chooses a node for a pod, assumes the pod on it, and runs the Reserve and Permit
// plugins. If it fails after that, the caller must undo these steps.
func (s *Scheduler) chooseNode(ctx context.Context, pod *queuedPod, ties *rand.Rand) (*nodeChoice, *schedulingFailure) {
	uid := pod.Pod.UID
	if s.cluster.isPlaced(uid) {
		return nil, &schedulingFailure{pod: pod}
	}
	profile := s.profiles.forPod(pod.Pod)
	snap := s.cluster.takeSnapshot()
	c := framework.NewCycle(pod.PodInfo, snap)
	n := len(snap.Nodes)
	res, err := profile.Schedule(ctx, c, framework.Options{Sample: framework.SampleSize(n, profile.percentage), Start: s.nextNode, Rand: ties})
	if n > 0 {
		s.nextNode = (s.nextNode + res.Evaluated) % n
	}
	if err != nil {
		return nil, &schedulingFailure{pod: pod, cycle: c, err: err}
	}
	if !s.cluster.assumePod(pod.PodInfo, res.Node) {
		return nil, &schedulingFailure{pod: pod}
	}
	if kept := snap.NominationOf(uid); kept != "" && kept != res.Node {
		s.queue.handleEvent(ctx, framework.PodRemoved, pod.Pod) // the capacity that was reserved for the pod elsewhere is free
	}
	if st := profile.Reserve(ctx, c, res.Node); !st.OK() {
		return nil, &schedulingFailure{pod: pod, cycle: c, node: res.Node, status: st}
	}
	st, delays := profile.Permit(ctx, c, res.Node)
	if !st.OK() {
		return nil, &schedulingFailure{pod: pod, cycle: c, node: res.Node, status: st}
	}
	return &nodeChoice{pod, c, res, delays}, nil
}

// handleFailure reports a failed attempt to schedule a pod, undoes its effects and returns the pod
// to the queue.
func (s *Scheduler) handleFailure(ctx context.Context, f schedulingFailure) {
	switch {
	case f.err != nil:
		s.handleUnschedulable(ctx, f.pod, f.cycle, f.err)
	case f.status != nil:
		s.undoPlacement(ctx, f.pod, f.cycle, f.node, f.status)
	default:
		s.queue.removePod(f.pod.Pod.UID)
	}
}

// startBinding starts the binding of a pod in a goroutine of binders. It blocks while the maximum
// number of bindings is running.
func (s *Scheduler) startBinding(ctx context.Context, x *nodeChoice, binders *workerPool) {
	pod := x.pod
	s.queue.markBinding(pod)
	slots := s.bindingSlots
	if len(x.delays) > 0 || len(pod.Pod.Spec.ResourceClaims) > 0 || len(pod.Pod.Spec.Volumes) > 0 && hasClaims(pod.Pod) {
		slots = s.heldSlots
	}
	select {
	case slots <- struct{}{}:
	case <-ctx.Done():
		s.undoPlacement(ctx, pod, x.cycle, x.result.Node, framework.Fail("scheduler", ctx.Err()))
		return
	}
	hold := s.waiting.addWaiting(pod.Pod, x.delays)
	binders.startTask(ctx, func() {
		defer func() { <-slots }()
		s.runRecovering(ctx, pod, func() { s.bindPod(ctx, pod, x.cycle, x.result, hold) })
	})
}

func hasClaims(pod *v1.Pod) bool {
	for i := range pod.Spec.Volumes {
		if v := &pod.Spec.Volumes[i]; v.PersistentVolumeClaim != nil || v.Ephemeral != nil {
			return true
		}
	}
	return false
}

// handleUnschedulable runs the PostFilter plugins, which may preempt other pods, reports the
// failure and returns the pod to the queue.
func (s *Scheduler) handleUnschedulable(ctx context.Context, pod *queuedPod, c *framework.Cycle, err error) {
	if ctx.Err() != nil {
		return
	}
	var why *framework.FitError
	if !errors.As(err, &why) {
		s.log.Error("scheduling failed", "pod", pod.Pod.Namespace+"/"+pod.Pod.Name, "err", err)
		s.reportFailure(pod, v1.PodReasonSchedulerError, err.Error())
		s.queue.requeueFailed(ctx, pod, nil)
		return
	}
	if why.Total > 0 {
		s.profiles.forPod(pod.Pod).PostFilter(ctx, c, why)
	}
	s.reportFailure(pod, v1.PodReasonUnschedulable, why.Error())
	s.reportGroupRefused(pod.Pod, v1.PodReasonUnschedulable, why.Error())
	s.queue.requeueFailed(ctx, pod, why.RefusedBy())
}

// forgetPod removes a pod from the node on which it was assumed. Unschedulable pods that may fit
// then are queued.
func (s *Scheduler) forgetPod(ctx context.Context, pod *v1.Pod) {
	s.cluster.forgetAssumedPod(pod.UID)
	s.queue.handleEvent(ctx, framework.PodRemoved, pod)
}

// undoPlacement runs Unreserve for a pod that could not be bound, removes it from its assumed node,
// reports why, and returns it to the queue.
func (s *Scheduler) undoPlacement(ctx context.Context, pod *queuedPod, c *framework.Cycle, node string, why *framework.Status) {
	s.profiles.forPod(pod.Pod).Unreserve(ctx, c, node)
	s.forgetPod(ctx, pod.Pod)
	if ctx.Err() != nil {
		return
	}
	if why.Refused() {
		s.reportFailure(pod, v1.PodReasonUnschedulable, fmt.Sprintf("0/%d nodes are available: 1 %s.", len(c.Snapshot.Nodes), why.Message()))
		s.queue.requeueFailed(ctx, pod, map[string]bool{why.Plugin: true})
		return
	}
	s.log.Warn("binding failed, will retry", "pod", pod.Pod.Namespace+"/"+pod.Pod.Name, "node", node, "err", why.AsError())
	s.reportFailure(pod, v1.PodReasonSchedulerError, why.AsError().Error())
	s.queue.requeueFailed(ctx, pod, nil)
}
