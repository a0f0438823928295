// Package scheduler assigns pods to nodes. Its thinking is framework.Profile.Schedule, a function of
// a snapshot of the cluster and a pod; plugins say what fits and what is better. Everything else is
// a thin shell: a queue fed by informers, a cluster state that counts pods from the moment their node
// is chosen, and bindings in flight.
//
//	informers ─▶ queue ─▶ one loop: snapshot ▸ Schedule ▸ assume ▸ Reserve ▸ Permit ─▶ many bindings at once
//	          └▶ cluster ◀──────────────────────────────┘                              └▶ events, conditions, timeline
package scheduler

import (
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
	"keelson.dev/keelson/controlplane/scheduler/framework"
	"keelson.dev/keelson/controlplane/scheduler/plugins"
	"keelson.dev/keelson/internal/lifecycle"
)

// Config is everything a Scheduler needs.
type Config struct {
	// Client calls as the scheduler (client.As(api.User{Name: api.UserScheduler ...})).
	Client    *client.Client
	Informers *client.Informers // New registers its informers; the server runs them
	Actor     string            // names this replica in timelines: "scheduler/cp2"
	Timeline  *api.Timeline     // may be nil
	Log       *slog.Logger      // may be nil

	// Plugins make the profile; nil is plugins.Default.
	Plugins func(h *framework.Handle) []framework.Weighted
}

// Limits of what is under way at once. Pods beyond them wait in the queue.
const (
	maxBindings = 256  // API calls
	maxHeld     = 4096 // pods that wait for volumes or for Permit
	maxNotes    = 16384
	noteWorkers = 8
)

// Scheduler schedules while its replica leads. On the other replicas it keeps queue and cluster warm.
type Scheduler struct {
	cfg     Config
	log     *slog.Logger
	profile *framework.Profile
	err     error // of the profile; Run returns it
	handle  *framework.Handle
	cluster *cluster
	queue   *queue
	waiting *waitingPods
	volumes *broadcast

	intake   sync.Mutex                    // held while a change of the informers is taken in
	writer   atomic.Pointer[client.Client] // fenced with the leadership of the current Run
	bindings chan struct{}
	held     chan struct{}
	notes    chan note
	start    int // the node to look at first; the loop's
}

// New prepares a scheduler and registers its informers. Nothing runs until Run.
func New(cfg Config) *Scheduler {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Plugins == nil {
		cfg.Plugins = plugins.Default
	}
	s := &Scheduler{
		cfg: cfg, log: cfg.Log, waiting: newWaitingPods(), volumes: newBroadcast(),
		bindings: make(chan struct{}, maxBindings), held: make(chan struct{}, maxHeld), notes: make(chan note, maxNotes),
	}
	s.handle = s.newHandle()
	s.profile, s.err = framework.NewProfile(cfg.Plugins(s.handle)...)
	if s.err != nil {
		return s
	}
	s.cluster = newCluster(s.handle.Volumes)
	s.queue = newQueue(s.profile, time.Now)
	s.watch()
	return s
}

// Run schedules until ctx (the leadership) ends; every write carries fence, the term of the
// leadership. The informers must be synced. It may be called again for a later leadership.
// It returns early only when the profile is not valid.
func (s *Scheduler) Run(ctx context.Context, fence uint64) error {
	if s.err != nil {
		return s.err
	}
	s.writer.Store(s.cfg.Client.Fenced(fence))
	// Handlers may lag behind what the informers hold. Deciding on less than that could fill a node twice.
	s.adopt(ctx)
	s.queue.restart(ctx)
	defer s.cluster.forgetAssumed()
	parts := []lifecycle.Part{
		{Name: "scheduler: loop", Run: s.loop},
		{Name: "scheduler: overdue", Run: s.overdue},
	}
	for range noteWorkers {
		parts = append(parts, lifecycle.Part{Name: "scheduler: notes", Run: s.writeNotes})
	}
	return lifecycle.Run(ctx, parts...)
}

func (s *Scheduler) overdue(ctx context.Context) error {
	t := time.NewTicker(30 * time.Second)
	defer t.Stop()
	for {
		select {
		case <-t.C:
			s.queue.overdue(ctx)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// loop takes one pod at a time. It ends when all bindings have.
func (s *Scheduler) loop(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	ties := rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))
	for {
		p := s.queue.pop(ctx)
		if p == nil {
			return ctx.Err()
		}
		s.guarded(ctx, p, func() { s.attempt(ctx, p, ties, &wg) })
	}
}

// guarded makes a panic over one pod a failed attempt at that pod.
func (s *Scheduler) guarded(ctx context.Context, p *queued, f func()) {
	defer func() {
		if x := recover(); x != nil {
			s.log.Error("scheduling a pod panicked", "pod", p.Pod.Namespace+"/"+p.Pod.Name, "panic", x, "stack", string(debug.Stack()))
			s.cluster.forget(p.Pod.UID)
			s.report(p, v1.PodReasonSchedulerError, fmt.Sprintf("panic: %v", x))
			s.queue.failed(ctx, p, nil)
		}
	}()
	f()
}

// attempt chooses a node for one pod and sends the binding off.
func (s *Scheduler) attempt(ctx context.Context, p *queued, ties *rand.Rand, wg *sync.WaitGroup) {
	uid := p.Pod.UID
	if s.cluster.placed(uid) {
		s.queue.remove(uid)
		return
	}
	snap := s.cluster.takeSnapshot()
	c := framework.NewCycle(p.PodInfo, snap)
	n := len(snap.Nodes)
	res, err := s.profile.Schedule(ctx, c, framework.Options{Sample: framework.SampleSize(n), Start: s.start, Rand: ties})
	if n > 0 {
		s.start = (s.start + res.Evaluated) % n
	}
	if err != nil {
		s.unschedulable(ctx, p, c, err)
		return
	}
	if !s.cluster.assume(p.PodInfo, res.Node) {
		s.queue.remove(uid)
		return
	}
	s.queue.chosen(p)
	if st := s.profile.Reserve(ctx, c, res.Node); !st.OK() {
		s.undo(ctx, p, c, res.Node, st)
		return
	}
	st, delays := s.profile.Permit(ctx, c, res.Node)
	if !st.OK() {
		s.undo(ctx, p, c, res.Node, st)
		return
	}
	slots := s.bindings
	if len(delays) > 0 || len(p.Pod.Spec.Volumes) > 0 && hasClaims(p.Pod) {
		slots = s.held
	}
	select {
	case slots <- struct{}{}:
	case <-ctx.Done():
		s.undo(ctx, p, c, res.Node, framework.Fail("scheduler", ctx.Err()))
		return
	}
	hold := s.waiting.hold(p.Pod, delays)
	wg.Go(func() {
		defer func() { <-slots }()
		s.guarded(ctx, p, func() { s.bind(ctx, p, c, res, hold) })
	})
}

func hasClaims(p *v1.Pod) bool {
	for i := range p.Spec.Volumes {
		if v := &p.Spec.Volumes[i]; v.PersistentVolumeClaim != nil || v.Ephemeral != nil {
			return true
		}
	}
	return false
}

// unschedulable tells why and puts the pod back.
func (s *Scheduler) unschedulable(ctx context.Context, p *queued, c *framework.Cycle, err error) {
	if ctx.Err() != nil {
		return
	}
	var why *framework.FitError
	if !errors.As(err, &why) {
		s.log.Error("scheduling failed", "pod", p.Pod.Namespace+"/"+p.Pod.Name, "err", err)
		s.report(p, v1.PodReasonSchedulerError, err.Error())
		s.queue.failed(ctx, p, nil)
		return
	}
	s.profile.PostFilter(ctx, c, why)
	s.report(p, v1.PodReasonUnschedulable, why.Error())
	plugins := why.Plugins
	if len(plugins) == 0 { // no node at all: any event that brings one helps
		plugins = map[string]bool{noNodes: true}
	}
	s.queue.failed(ctx, p, plugins)
}

// noNodes stands for the plugin that refused when there is no node: it has no hints, so that every event counts.
const noNodes = "NoNodes"

// undo takes back what was done for a pod that is not bound in the end.
func (s *Scheduler) undo(ctx context.Context, p *queued, c *framework.Cycle, node string, why *framework.Status) {
	s.profile.Unreserve(ctx, c, node)
	s.cluster.forget(p.Pod.UID)
	if ctx.Err() != nil {
		return
	}
	if why.Refused() {
		s.report(p, v1.PodReasonUnschedulable, fmt.Sprintf("0/%d nodes are available: 1 %s.", len(c.Snapshot.Nodes), why.Message()))
		s.queue.failed(ctx, p, map[string]bool{why.Plugin: true})
		return
	}
	s.log.Warn("binding failed, will retry", "pod", p.Pod.Namespace+"/"+p.Pod.Name, "node", node, "err", why.AsError())
	s.report(p, v1.PodReasonSchedulerError, why.AsError().Error())
	s.queue.failed(ctx, p, nil)
}
