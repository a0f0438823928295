package pod

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/pod/criconfig"
	"keelson.dev/keelson/agent/pod/diskusage"
	"keelson.dev/keelson/agent/pod/lifecycle"
	"keelson.dev/keelson/agent/pod/podfiles"
	"keelson.dev/keelson/agent/pod/subpath"
	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/internal/wakeup"
)

// Set runs exactly one worker for each pod of the node.
type Set struct {
	cfg     Config
	mu      sync.Mutex
	workers map[types.UID]*podEntry
	gone    map[types.UID]bool // reported gone, but still in the local view
	adopted map[types.UID]bool // had a sandbox or container when the agent started
	running map[types.UID]bool // had a ready sandbox or a running container when the agent started

	confirmation confirmation
	// deadlines of pods that were rejected because of the stored Node: until then an updated Node
	// may admit them
	deferred map[types.UID]time.Time
	// pods of which sandboxes, containers or volumes existed when this process started, until the
	// orphans are removed
	remains        map[types.UID]*v1.Pod
	recheck        wakeup.Signal // reconcile again, because a deferred rejection is due or a pod released resources
	workersStarted chan struct{}
	exited         chan types.UID
	disks          diskusage.FileSystemCache
	wg             sync.WaitGroup
}

type podEntry struct {
	worker    *worker
	pod       *v1.Pod
	rejection *lifecycle.Stop
	eviction  *lifecycle.Stop // evicted by an earlier agent process
	vanished  bool            // the pod object no longer exists
}

// New returns a Set without workers. Run starts them.
func New(cfg Config) *Set {
	if cfg.Containers.SubPaths == nil {
		cfg.Containers.SubPaths = &subpath.BindMounter{}
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.ResyncInterval == 0 {
		cfg.ResyncInterval = 30 * time.Second
	}
	cfg.walkTurns = diskusage.NewTurns()
	return &Set{cfg: cfg, workers: map[types.UID]*podEntry{}, gone: map[types.UID]bool{}, adopted: map[types.UID]bool{},
		running:  map[types.UID]bool{},
		deferred: map[types.UID]time.Time{}, recheck: wakeup.New(), workersStarted: make(chan struct{}),
		exited: make(chan types.UID)}
}

// Run waits until the local view of the cluster is synced, and then runs the workers until ctx is
// done. Containers keep running after it returns.
func (s *Set) Run(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-s.cfg.Deps.Objects.Synced():
	}
	ctx, cancel := context.WithCancel(ctx)
	defer s.wg.Wait()
	defer cancel()
	events := s.cfg.Deps.Runtime.Events(ctx)
	changes := s.cfg.Deps.Objects.Changes(ctx)
	claimed := s.cfg.Deps.Devices.Changes(ctx)
	var devices <-chan struct{}
	if s.cfg.Deps.Plugins != nil {
		devices = s.cfg.Deps.Plugins.Changes(ctx)
	}
	relist := time.NewTicker(s.cfg.ResyncInterval)
	defer relist.Stop()
	// Adopt before the first decision: pods that already run are admitted without a check.
	if err := wait.For(ctx, lifecycle.RetryMin, func() error { return s.findRemains(ctx) }); err != nil {
		return ctx.Err()
	}
	s.expectConfirmation()
	confirmed := s.cfg.Deps.Objects.Confirmed()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-confirmed:
			confirmed = nil
			s.acceptConfirmation()
			s.removeOrphans(ctx)
			s.reconcilePods(ctx)
		case kinds, ok := <-changes:
			if !ok {
				if ctx.Err() != nil {
					return ctx.Err()
				}
				return errors.New("the watch of the local cluster view ended")
			}
			s.handleChanges(ctx, kinds)
		case e, ok := <-events:
			if !ok {
				// Lost runtime events are harmless: wake all workers.
				if ctx.Err() != nil {
					return ctx.Err()
				}
				events = s.cfg.Deps.Runtime.Events(ctx)
				s.forEachWorker(func(e *podEntry) { e.worker.wakeUp() })
				continue
			}
			s.mu.Lock()
			if en := s.workers[e.PodUID]; en != nil {
				en.worker.wakeUp()
			}
			s.mu.Unlock()
		case uid := <-s.exited:
			s.removeWorker(ctx, uid)
		case <-devices:
			s.forEachWorker(func(e *podEntry) { e.worker.notifyDeviceChange() })
		case <-claimed:
			s.forEachWorker(func(e *podEntry) { e.worker.notifyDeviceChange() })
		case <-s.recheck:
			s.reconcilePods(ctx)
		case <-relist.C:
			if confirmed == nil {
				s.recordConfirmation()
			}
			s.reconcilePods(ctx)
			s.forEachWorker(func(e *podEntry) { e.worker.requestRefresh(); e.worker.requestStatusCheck() })
		}
	}
}

func (s *Set) forEachWorker(visit func(*podEntry)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range s.workers {
		visit(e)
	}
}

func (s *Set) handleChanges(ctx context.Context, kinds map[string]struct{}) {
	for _, k := range []string{"ConfigMap", "Secret", "PersistentVolumeClaim", "PersistentVolume", "CSIDriver"} {
		if _, ok := kinds[k]; ok {
			s.forEachWorker(func(e *podEntry) { e.worker.requestRefresh() })
			break
		}
	}
	// the last two contain the attached volumes
	for _, k := range []string{"RuntimeClass", "VolumeAttachment", "Node"} {
		if _, ok := kinds[k]; ok {
			s.forEachWorker(func(e *podEntry) { e.worker.retryFailedActions() })
			break
		}
	}
	_, pods := kinds["Pod"]
	if _, node := kinds["Node"]; pods || node && s.hasDeferredRejections() {
		s.reconcilePods(ctx)
	}
}

// reconcilePods starts missing workers, updates the workers of changed pods, and starts the
// deletion of pods without an object.
func (s *Set) reconcilePods(ctx context.Context) {
	pods := slices.Clone(s.cfg.Deps.Objects.Pods())
	s.mu.Lock()
	defer s.mu.Unlock()
	// If not all pods fit, those that already run stay: adopted pods first, then the oldest.
	slices.SortStableFunc(pods, func(a, b *v1.Pod) int {
		if x, y := s.adopted[a.UID], s.adopted[b.UID]; x != y {
			if x {
				return -1
			}
			return 1
		}
		return a.CreationTimestamp.Compare(b.CreationTimestamp.Time)
	})
	present := map[types.UID]bool{}
	waiting := 0
	var changed []*podEntry
	for _, p := range pods {
		present[p.UID] = true
	}
	for uid, e := range s.workers {
		if !present[uid] && !e.vanished {
			// The object is gone before PodGone was reported: a forced deletion, or a pod that was
			// replaced elsewhere.
			e.vanished = true
			e.worker.updateDesired(lifecycle.Desired{Pod: e.pod, Stop: lifecycle.DeletionStop(e.pod)})
		}
	}
	for _, p := range pods {
		e := s.workers[p.UID]
		switch {
		case e != nil && e.pod != p:
			if !maps.Equal(e.pod.Labels, p.Labels) || !maps.Equal(e.pod.Annotations, p.Annotations) {
				e.worker.requestRefresh() // the downward API exposes them
			}
			e.pod = p
			changed = append(changed, e)
		case e == nil && !s.gone[p.UID] && s.awaitsConfirmation(p):
			waiting++
		case e == nil && !s.gone[p.UID]:
			s.admitAndLaunch(ctx, p)
		}
	}
	s.logWaitingPods(waiting)
	// Decide about resizes before the workers run, so that the grant and the observed generation
	// match.
	s.decideResizes()
	for _, e := range changed {
		e.worker.updateDesired(s.desiredState(e, e.pod))
	}
	for uid := range s.gone {
		if !present[uid] {
			delete(s.gone, uid)
		}
	}
	for uid := range s.deferred {
		if !present[uid] {
			delete(s.deferred, uid)
		}
	}
	select {
	case <-s.workersStarted:
	default:
		close(s.workersStarted)
	}
}

// WorkersStarted returns a channel that is closed when every pod that was on the node at the start
// of the agent has a worker.
func (s *Set) WorkersStarted() <-chan struct{} { return s.workersStarted }

func (s *Set) desiredState(pod *podEntry, other *v1.Pod) lifecycle.Desired {
	if other.DeletionTimestamp != nil {
		return lifecycle.Desired{Pod: other, Stop: lifecycle.DeletionStop(other)}
	}
	return lifecycle.Desired{Pod: other, Stop: pod.rejection}
}

// admitAndLaunch decides about the admission of a pod and starts its worker, which runs the pod or
// reports its rejection. A rejection may be deferred; then no worker is started yet. The lock is
// held.
func (s *Set) admitAndLaunch(ctx context.Context, pod *v1.Pod) {
	e := &podEntry{pod: pod}
	granted, _ := s.loadPodGrant(pod)
	var err error
	if e.eviction, err = podfiles.LoadEviction(s.cfg.Paths, pod); err != nil {
		s.cfg.Log.Error("cannot read the eviction record of a pod: an evicted pod may be started again", "err", err)
	}
	if s.cfg.Node != nil && pod.DeletionTimestamp == nil && !lifecycle.IsTerminal(pod) && !s.adopted[pod.UID] &&
		e.eviction == nil {
		e.rejection = s.cfg.admitPod(granted.ApplyTo(pod), s.otherPods(e))
		if e.rejection != nil && s.deferRejection(pod, e.rejection) {
			return
		}
	}
	delete(s.deferred, pod.UID)
	s.launchWorker(ctx, e, s.desiredState(e, pod))
	if e.rejection != nil {
		e.worker.events.Emit(pod, "", v1.EventTypeWarning, e.rejection.Reason, e.rejection.Message)
	}
}

// rejectionPatience is how long a rejected pod waits for an update of the Node that might admit it.
const rejectionPatience = time.Second

// deferRejection reports whether the pod must be checked again later instead of being rejected now.
// A pod and the Node object arrive separately: the label for which the scheduler chose this node
// may arrive after the pod. The lock is held.
func (s *Set) deferRejection(pod *v1.Pod, refused *lifecycle.Stop) bool {
	if !refused.StoredNode {
		return false
	}
	until, known := s.deferred[pod.UID]
	if !known {
		s.deferred[pod.UID] = s.cfg.currentTime().Add(rejectionPatience)
		time.AfterFunc(rejectionPatience, s.scheduleReconcile)
		return true
	}
	return s.cfg.currentTime().Before(until)
}

// scheduleReconcile makes the loop of the set reconcile its pods again soon.
func (s *Set) scheduleReconcile() {
	s.recheck.Send()
}

func (s *Set) hasDeferredRejections() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.deferred) > 0
}

func (s *Set) launchWorker(ctx context.Context, pod *podEntry, desired lifecycle.Desired) {
	pod.worker = newWorker(&s.cfg, desired)
	pod.worker.resizer.onFreed = s.scheduleReconcile
	if pod.eviction != nil {
		pod.worker.evictor.stop = pod.eviction
		if stop := pod.worker.desired.Stop; stop == nil {
			pod.worker.desired.Stop = pod.eviction
		} else if stop.Delete {
			pod.worker.desired.Stop = stop.LimitGrace(pod.eviction.Grace)
		}
	}
	if desired.Stop == nil || !desired.Stop.Orphan {
		pod.worker.resizer.restoreGrant(s.loadPodGrant(desired.Pod))
	}
	uid := desired.Pod.UID
	s.workers[uid] = pod
	s.wg.Go(func() {
		if pod.worker.runUntilGone(ctx) != nil {
			return
		}
		select {
		case s.exited <- uid:
		case <-ctx.Done():
		}
	})
}

func (s *Set) removeWorker(ctx context.Context, uid types.UID) {
	s.mu.Lock()
	delete(s.workers, uid)
	delete(s.adopted, uid)
	delete(s.running, uid)
	s.gone[uid] = true
	s.mu.Unlock()
	s.reconcilePods(ctx)
}

// findRemains finds the pods of which an earlier agent process left sandboxes, containers, volumes
// or devices on the node. The workers of assigned pods take them over. removeOrphans removes the
// others.
func (s *Set) findRemains(ctx context.Context) error {
	orphans := map[types.UID]*v1.Pod{} // unless they turn out to be assigned
	res, err := s.cfg.Deps.Runtime.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
	if err != nil {
		s.cfg.Log.Warn("finding pods of an earlier agent process: listing sandboxes", "err", err)
		return err
	}
	for _, sb := range res.Items {
		uid := types.UID(sb.Labels[agent.LabelPodUID])
		if uid == "" {
			continue
		}
		s.mu.Lock()
		s.adopted[uid] = true
		s.running[uid] = s.running[uid] || sb.State == cri.PodSandboxState_SANDBOX_READY
		s.mu.Unlock()
		orphans[uid] = &v1.Pod{ObjectMeta: metav1.ObjectMeta{UID: uid, Namespace: sb.Labels[agent.LabelPodNamespace],
			Name: sb.Labels[agent.LabelPodName]}}
		if d, err := time.ParseDuration(sb.Annotations[criconfig.AnnotationGrace] + "s"); err == nil {
			seconds := int64(d / time.Second)
			orphans[uid].Spec.TerminationGracePeriodSeconds = &seconds
		}
	}
	// After a power failure, only the records of ended containers may be left of a pod.
	cs, err := s.cfg.Deps.Runtime.ListContainers(ctx, &cri.ListContainersRequest{})
	if err != nil {
		s.cfg.Log.Warn("finding pods of an earlier agent process: listing containers", "err", err)
		return err
	}
	if err := podfiles.RestoreLogLinks(s.cfg.Paths, cs.Containers); err != nil {
		s.cfg.Log.Warn("cannot link the logs of containers", "err", err)
	}
	for _, c := range cs.Containers {
		if uid := types.UID(c.Labels[agent.LabelPodUID]); c.State == cri.ContainerState_CONTAINER_RUNNING {
			s.mu.Lock()
			s.running[uid] = true
			s.mu.Unlock()
		}
		if uid := types.UID(c.Labels[agent.LabelPodUID]); uid != "" && orphans[uid] == nil {
			s.mu.Lock()
			s.adopted[uid] = true
			s.mu.Unlock()
			orphans[uid] = &v1.Pod{ObjectMeta: metav1.ObjectMeta{UID: uid, Namespace: c.Labels[agent.LabelPodNamespace],
				Name: c.Labels[agent.LabelPodName]}}
		}
	}
	uids, err := s.cfg.Deps.Volumes.Pods()
	if err != nil {
		s.cfg.Log.Warn("finding pods of an earlier agent process: listing volumes", "err", err)
		return err
	}
	devicePods, err := s.cfg.Deps.Devices.Pods()
	if err != nil {
		s.cfg.Log.Warn("finding pods of an earlier agent process: listing devices", "err", err)
		return err
	}
	uids = append(uids, devicePods...)
	if s.cfg.Deps.Plugins != nil {
		if devicePods, err = s.cfg.Deps.Plugins.Pods(); err != nil {
			s.cfg.Log.Warn("finding pods of an earlier agent process: listing devices of plugins", "err", err)
			return err
		}
		uids = append(uids, devicePods...)
	}
	dirs, err := os.ReadDir(filepath.Join(s.cfg.Paths.State, "pods"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("finding pods of an earlier agent process: %w", err)
	}
	for _, d := range dirs {
		uids = append(uids, types.UID(d.Name()))
	}
	for _, uid := range uids {
		if orphans[uid] == nil {
			orphans[uid] = &v1.Pod{ObjectMeta: metav1.ObjectMeta{UID: uid}}
		}
	}
	if err := podfiles.FillNamesFromLogs(s.cfg.Paths.Logs, orphans); err != nil {
		return fmt.Errorf("finding pods of an earlier agent process: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.remains = orphans
	return nil
}

// removeOrphans removes the pods that findRemains found and that are not assigned to this node. It
// runs only after a control plane has confirmed the assignment: a checkpoint may be older than the
// running pods.
func (s *Set) removeOrphans(ctx context.Context) {
	assigned := map[types.UID]bool{}
	for _, p := range s.cfg.Deps.Objects.Pods() {
		assigned[p.UID] = true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for uid, p := range s.remains {
		if s.workers[uid] == nil && !assigned[uid] {
			s.cfg.Log.Info("removing the remains of a pod that is not assigned to this node", "namespace", p.Namespace,
				"pod", p.Name, "uid", uid)
			stop := lifecycle.DeletionStop(p)
			stop.Orphan = true
			s.launchWorker(ctx, &podEntry{pod: p, vanished: true}, lifecycle.Desired{Pod: p, Stop: stop})
		}
	}
	s.remains = nil
}
