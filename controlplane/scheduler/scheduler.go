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
	// Client is the API client with the identity of the scheduler (api.UserScheduler).
	Client    *client.Client
	Informers *client.Informers // New registers its informers here; the server runs them
	Actor     string            // name of this replica in timelines, for example "scheduler/cp2"
	Timeline  *api.Timeline     // records scheduled pods; nil = no timeline
	Log       *slog.Logger      // may be nil

	// Settings is the content of the scheduler configuration file; nil means config.Default.
	Settings *config.Config
	// ConfirmLeadership returns nil if this replica is the raft leader in the given raft term (the
	// fence). It is called before an extender binds a pod: the API rejects writes of an old leader,
	// but an extender does not. If it is nil, extenders bind without confirmation.
	ConfirmLeadership func(ctx context.Context, fence uint64) error
	// Metrics receives the metrics of the scheduler. nil means that they are not exported.
	Metrics *Metrics
	// Plugins, if not nil, returns the plugins of the only profile, default-scheduler. The profiles
	// in Settings are then ignored.
	Plugins func(h *framework.Handle) []framework.WeightedPlugin
}

// Limits of concurrent work. While maxBindings or maxHeld is reached, the scheduling loop waits. If
// a queue of statusReports is full, further reports are dropped.
const (
	maxBindings = 256  // concurrent evictions and bindings, except the bindings that maxHeld counts
	maxHeld     = 4096 // concurrent bindings that may wait for volumes, devices or Permit
	maxReports  = 16384
	// number of report queues, each with one goroutine; all reports about a pod use the same queue,
	// so that they are written in order
	reportWorkers = 8
	maxEvents     = 128                   // Events about bound pods that are written in parallel
	eventDelay    = 50 * time.Millisecond // how long Events about bound pods are collected before they are written
)

// Scheduler schedules pods while its replica is the raft leader. On the other replicas it only
// keeps its queue and cluster state up to date, so that a new leader starts without delay.
type Scheduler struct {
	cfg      Config
	log      *slog.Logger
	profiles *profiles
	err      error // error of building the profiles in New, which Run returns
	cluster  *cluster
	queue    *queue
	groups   *groupTracker
	metrics  *Metrics

	lead      leadership
	access    clusterAccess
	changes   changeHandler
	binding   bindingState
	evictions evictor
	reports   reportWriter
	nextNode  int // index of the node that the next attempt filters first; used only by the scheduling loop
}

// leadership holds the raft term of the current or last Run, and an API client that adds this term
// as a fence to every write. The API rejects a write whose term has ended.
type leadership struct {
	writer atomic.Pointer[client.Client] // API client that adds the fence to every write
	fence  atomic.Uint64                 // raft term of the current or last Run
	// running is true while Run schedules pods
	running atomic.Bool
}

// bindingState holds the bindings that wait for Permit plugins or have an unknown outcome, and
// limits the number of concurrent bindings.
type bindingState struct {
	waiting     *waitingPods
	unconfirmed unconfirmedBindings
	slots       chan struct{}
	heldSlots   chan struct{}
}

// New returns a scheduler and registers its informer handlers. It schedules nothing before Run.
func New(cfg Config) *Scheduler {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Settings == nil {
		cfg.Settings = config.Default()
	}
	if cfg.Metrics == nil {
		cfg.Metrics = NewMetrics()
	}
	s := &Scheduler{
		cfg: cfg, log: cfg.Log, metrics: cfg.Metrics,
		access: clusterAccess{informers: cfg.Informers, volumes: newBroadcast(), devices: newBroadcast()},
		binding: bindingState{waiting: newWaitingPods(), slots: make(chan struct{}, maxBindings),
			heldSlots: make(chan struct{}, maxHeld)},
		reports: reportWriter{log: cfg.Log, informers: cfg.Informers, placed: make(chan *statusReport, maxReports)},
	}
	s.access.lead, s.reports.lead = &s.lead, &s.lead
	s.binding.unconfirmed.log, s.binding.unconfirmed.lead = cfg.Log, &s.lead
	for i := range s.reports.queues {
		s.reports.queues[i] = make(chan *statusReport, maxReports/reportWorkers)
	}
	if s.profiles, s.err = s.makeProfiles(); s.err != nil {
		return s
	}
	for name, p := range s.profiles.byName {
		p.metrics = s.metrics.profileMetrics(name)
	}
	s.cluster = newCluster(s.access.storageAccess(), s.access.ownerSelector)
	s.groups = s.cluster.groups
	s.queue = newQueue(s.profiles, time.Now)
	s.queue.counts.entered = s.metrics.incoming
	s.queue.minBackoff = cmp.Or(cfg.Settings.InitialBackoff, minBackoff)
	s.queue.maxBackoff = max(cmp.Or(cfg.Settings.MaxBackoff, maxBackoff), s.queue.minBackoff)
	s.reports.cluster = s.cluster
	s.evictions = evictor{
		log: cfg.Log, informers: cfg.Informers, lead: &s.lead, reports: &s.reports, cluster: s.cluster, queue: s.queue,
		groups: s.groups, waiting: s.binding.waiting, metrics: s.metrics.preemption, slots: s.binding.slots,
	}
	s.changes = changeHandler{
		log: cfg.Log, informers: cfg.Informers, profiles: s.profiles, cluster: s.cluster, queue: s.queue,
		groups: s.groups, waiting: s.binding.waiting, access: &s.access,
	}
	s.changes.registerHandlers()
	s.metrics.source.Store(s)
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

// Run schedules pods until ctx ends, which must happen when this replica loses leadership. fence is
// the raft term: it is added to every write, and the API rejects the write if the term has ended.
// The informers must be synced. Run may be called again for a later term. It returns early only if
// the configuration is invalid.
func (s *Scheduler) Run(ctx context.Context, fence uint64) error {
	if s.err != nil {
		return s.err
	}
	for _, w := range s.cfg.Settings.Warnings {
		s.log.Warn("scheduler configuration: " + w)
	}
	s.lead.writer.Store(s.cfg.Client.Fenced(fence))
	// The informers' stores may be newer than the state that their handlers have reported. With
	// older state, a node could get too many pods.
	s.changes.syncFromInformers(ctx)
	if led := s.lead.fence.Swap(fence); led != fence || fence == 0 {
		// Writes of an earlier term are rejected from now on, and the informers contain all earlier
		// writes.
		s.binding.unconfirmed.takeAll()
		if shared := s.profiles.shared; shared != nil {
			shared.Ledger.Settle()
		}
	}
	s.lead.running.Store(true)
	defer s.lead.running.Store(false)
	s.groups.resetAttempts()
	s.queue.requeueAll(ctx)
	resume := s.resumeUnconfirmed()
	defer s.cluster.forgetAssumed()
	parts := []lifecycle.Part{
		{Name: "scheduler: loop", Run: s.runLoop},
		{Name: "scheduler: overdue", Run: s.requeueOverduePods},
		{Name: "scheduler: unconfirmed bindings", Run: resume},
		{Name: "scheduler: unconfirmed claims", Run: s.confirmClaims},
		{Name: "scheduler: events", Run: s.reports.writePlaced},
	}
	for _, reports := range s.reports.queues {
		parts = append(parts, lifecycle.Part{Name: "scheduler: notes", Run: func(ctx context.Context) error {
			return s.reports.writeReports(ctx, reports)
		}})
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

// confirmClaims periodically checks the allocations of ResourceClaims whose write failed with an
// unknown outcome. If such an allocation is certainly not stored, it frees the devices. It returns
// when ctx ends.
func (s *Scheduler) confirmClaims(ctx context.Context) error {
	t := time.NewTicker(2 * time.Second)
	defer t.Stop()
	for {
		select {
		case <-t.C:
			if shared := s.profiles.shared; shared != nil && shared.Ledger.Confirm(ctx, s.access.deviceAccess()) {
				s.queue.handleEvent(ctx, framework.DeviceClaimChanged, nil)
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// runLoop is the scheduling loop: it pops one pod after the other from the queue and schedules it,
// together with its PodGroup if necessary. It returns after ctx has ended and all bindings and
// evictions have returned.
func (s *Scheduler) runLoop(ctx context.Context) error {
	binders := newWorkerPool()
	defer binders.waitForTasks()
	defer s.evictions.running.Wait()
	ties := rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))
	for {
		pod := s.queue.pop(ctx)
		if pod == nil {
			return ctx.Err()
		}
		s.runRecovering(ctx, pod, func() { s.schedulePod(ctx, pod, ties, binders) })
	}
}

// runRecovering calls f, which schedules or binds the pod. It recovers from a panic in f, logs it,
// reports a failure of the pod, and returns the pod to the queue.
func (s *Scheduler) runRecovering(ctx context.Context, pod *queuedPod, f func()) {
	defer func() {
		if x := recover(); x != nil {
			s.log.Error("panic while scheduling a pod", "pod", pod.Pod.Namespace+"/"+pod.Pod.Name, "panic", x, "stack",
				string(debug.Stack()))
			s.cluster.forgetAssumedPod(pod.Pod.UID)
			s.recordAttempt(pod, resultError)
			s.reportFailure(pod, v1.PodReasonSchedulerError, fmt.Sprintf("panic: %v", x))
			s.queue.requeueFailed(ctx, pod, nil)
		}
	}()
	f()
}

// nodeChoice is the result of a successful attempt to schedule a pod: the node that was chosen. The
// pod is assumed on it.
type nodeChoice struct {
	pod    *queuedPod
	cycle  *framework.Cycle
	result framework.Result
	delays map[string]time.Duration // maximum delay of the binding, by name of the Permit plugin
}

// schedulingFailure is the result of a failed attempt to schedule a pod. err is set if no node was
// chosen; if no node fits, it is a framework.FitError. status is set if Reserve or Permit refused
// the chosen node. If neither is set, the pod is already bound to a node or assumed on one.
type schedulingFailure struct {
	pod    *queuedPod
	cycle  *framework.Cycle
	err    error
	node   string
	status *framework.Status
}

// schedulePod chooses a node for the pod and starts its binding in binders. If the pods of its
// PodGroup must be placed together, it does so for all of them. ties chooses among nodes with the
// same score.
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

// chooseNode chooses a node for the pod, assumes the pod on it, and runs the Reserve and Permit
// plugins. If Reserve or Permit refuses, the status of the schedulingFailure is set; the caller
// must then call Unreserve and remove the pod from the node.
func (s *Scheduler) chooseNode(ctx context.Context, pod *queuedPod, ties *rand.Rand) (*nodeChoice, *schedulingFailure) {
	uid := pod.Pod.UID
	if s.cluster.isPlaced(uid) {
		return nil, &schedulingFailure{pod: pod}
	}
	profile := s.profiles.forPod(pod.Pod)
	snap := s.cluster.takeSnapshot()
	c := framework.NewCycle(pod.PodInfo, snap)
	c.Durations = profile.metrics
	n := len(snap.Nodes)
	started := time.Now()
	res, err := profile.Schedule(ctx, c, framework.Options{Sample: framework.SampleSize(n, profile.percentage),
		Start: s.nextNode, Rand: ties})
	if n > 0 {
		s.nextNode = (s.nextNode + res.Evaluated) % n
	}
	if err != nil {
		return nil, &schedulingFailure{pod: pod, cycle: c, err: err}
	}
	s.metrics.algorithm.Observe(time.Since(started).Seconds())
	if !s.cluster.assumePod(pod.PodInfo, res.Node) {
		return nil, &schedulingFailure{pod: pod}
	}
	if kept := snap.NominationOf(uid); kept != "" && kept != res.Node {
		// the resources that were reserved for the pod on its nominated node are free
		s.queue.handleEvent(ctx, framework.PodRemoved, pod.Pod)
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

// handleFailure reports a failed attempt to schedule a pod and returns the pod to the queue. If a
// node was chosen, it first calls Unreserve and removes the pod from that node.
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

// startBinding starts a task in binders that binds the pod x to its chosen node. It waits while the
// maximum number of bindings (maxBindings or maxHeld) is running.
func (s *Scheduler) startBinding(ctx context.Context, x *nodeChoice, binders *workerPool) {
	pod := x.pod
	s.queue.markBinding(pod)
	slots := s.binding.slots
	if len(x.delays) > 0 || len(pod.Pod.Spec.ResourceClaims) > 0 ||
		len(pod.Pod.Spec.Volumes) > 0 && hasClaims(pod.Pod) {
		slots = s.binding.heldSlots
	}
	select {
	case slots <- struct{}{}:
	case <-ctx.Done():
		s.undoPlacement(ctx, pod, x.cycle, x.result.Node, framework.Fail("scheduler", ctx.Err()))
		return
	}
	hold := s.binding.waiting.addWaiting(pod.Pod, x.delays)
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

// handleUnschedulable handles an attempt in which no node was chosen, for the reason err. If no
// node fits, it runs the PostFilter plugins, which may preempt other pods. It reports the failure
// and returns the pod to the queue.
func (s *Scheduler) handleUnschedulable(ctx context.Context, pod *queuedPod, c *framework.Cycle, err error) {
	if ctx.Err() != nil {
		return
	}
	var why *framework.FitError
	if !errors.As(err, &why) {
		s.log.Error("scheduling failed", "pod", pod.Pod.Namespace+"/"+pod.Pod.Name, "err", err)
		s.recordAttempt(pod, resultError)
		s.reportFailure(pod, v1.PodReasonSchedulerError, err.Error())
		s.queue.requeueFailed(ctx, pod, nil)
		return
	}
	if why.Total > 0 {
		profile := s.profiles.forPod(pod.Pod)
		if preemptionPlugin(profile) != nil {
			s.metrics.preemption.attempts.Inc()
		}
		profile.PostFilter(ctx, c, why)
	}
	s.recordAttempt(pod, resultUnschedulable)
	s.reportFailure(pod, v1.PodReasonUnschedulable, why.Error())
	s.reportGroupRefused(pod.Pod, v1.PodReasonUnschedulable, why.Error())
	s.queue.requeueFailed(ctx, pod, why.RefusedBy())
}

// forgetPod removes a pod from the node on which it is assumed. Unschedulable pods that may fit as
// a result are moved to the active or backoff queue.
func (s *Scheduler) forgetPod(ctx context.Context, pod *v1.Pod) {
	s.cluster.forgetAssumedPod(pod.UID)
	s.queue.handleEvent(ctx, framework.PodRemoved, pod)
}

// undoPlacement handles a pod that Reserve or Permit refused or whose binding failed, for the
// reason why. It calls Unreserve, removes the pod from the node on which it is assumed, reports the
// failure and returns the pod to the queue.
func (s *Scheduler) undoPlacement(
	ctx context.Context, pod *queuedPod, c *framework.Cycle, node string, why *framework.Status,
) {
	s.profiles.forPod(pod.Pod).Unreserve(ctx, c, node)
	s.forgetPod(ctx, pod.Pod)
	if ctx.Err() != nil {
		return
	}
	if why.Refused() {
		s.recordAttempt(pod, resultUnschedulable)
		s.reportFailure(pod, v1.PodReasonUnschedulable,
			fmt.Sprintf("0/%d nodes are available: 1 %s.", len(c.Snapshot.Nodes), why.Message()))
		s.queue.requeueFailed(ctx, pod, map[string]bool{why.Plugin: true})
		return
	}
	s.recordAttempt(pod, resultError)
	s.log.Warn("binding failed, will retry", "pod", pod.Pod.Namespace+"/"+pod.Pod.Name, "node", node,
		"err", why.AsError())
	s.reportFailure(pod, v1.PodReasonSchedulerError, why.AsError().Error())
	s.queue.requeueFailed(ctx, pod, nil)
}
