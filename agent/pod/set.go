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
	"keelson.dev/keelson/internal/saturate"
	"keelson.dev/keelson/internal/wait"
)

// Config is the configuration of a Set. Fields are required unless their comment names a default.
type Config struct {
	NodeName   string
	BootID     string   // boot ID of the machine
	HostIPs    []string // the first is the primary address
	Paths      agent.Paths
	CgroupRoot string // parent cgroup of kubepods

	Runtime  agent.Runtime
	Images   agent.Images
	Volumes  agent.Volumes
	Devices  agent.Devices
	Plugins  agent.Plugins // nil: no device plugins
	Objects  agent.Objects
	Reporter agent.Reporter
	Prober   agent.Prober
	Policies agent.PolicyGuard // nil: this agent does not enforce network policies
	SubPaths SubPaths          // nil: BindSubPaths
	// Written returns the directories on disk that a container writes to, except volumes and logs:
	// its own, and those shared with other containers of the pod. nil: only volumes and logs are
	// measured.
	Written func(containerID string) (own, shared []string)

	// VolumeDisk returns the usage of a pod's volume if it is not the usage of the volume's file
	// system. ok is false for other volumes. On an error the usage is unknown. nil: always use the
	// file system's.
	VolumeDisk func(ctx context.Context, pod types.UID, volume string) (disk agent.Disk, ok bool, err error)

	// Node returns the node as it will be reported: labels, taints, allocatable. nil admits every
	// pod.
	Node func() *v1.Node
	// ClusterDNS returns the addresses of the cluster DNS; nil or empty: pods use the node's
	// servers.
	ClusterDNS func() []string
	ResolvConf string // "" = /etc/resolv.conf
	// ResolvedConf is the file with the upstream servers of systemd-resolved; "" = its default
	// path.
	ResolvedConf string
	PodPIDs      int64 // maximum processes and threads per pod; 0 or less = no limit
	// SingleProcessOOMKill makes the kernel kill a single process on OOM instead of the whole
	// container, as cgroup v1 does.
	SingleProcessOOMKill bool
	SeccompDefault       bool     // containers without a profile get the runtime's default
	Ceiling              *Ceiling // highest Pod Security level of pods; nil: no restriction
	RuntimeName          string   // scheme of container IDs; "" = "keelson"
	// StartUnconfirmedPods starts the pods of the checkpoint after a reboot, before a control plane
	// has confirmed them.
	StartUnconfirmedPods bool

	Relist time.Duration // interval of a full resync; 0 = 30 s
	Log    *slog.Logger  // may be nil
	Now    func() time.Time

	turns turns // limits concurrent disk measurements
}

// admit runs all admission checks of the node for a pod.
func (c *Config) admit(p *v1.Pod, others []*v1.Pod) *Stop {
	if refused := c.Ceiling.Check(p); refused != nil {
		return refused
	}
	if refused := Incapable(p); refused != nil {
		return refused
	}
	return Admit(p, others, c.unmanaged(c.Node()))
}

func (c *Config) now() time.Time {
	if c.Now == nil {
		return time.Now()
	}
	return c.Now()
}

func (c *Config) host() Host { return Host{IPs: c.HostIPs, RuntimeName: c.RuntimeName} }

func (c *Config) allocatable() v1.ResourceList {
	if c.Node == nil {
		return nil
	}
	return c.Node().Status.Allocatable
}

func (c *Config) memory() int64 {
	if c.Node == nil {
		return 0
	}
	return saturate.Value(c.Node().Status.Capacity.Memory())
}

// Set runs exactly one worker for each pod of the node.
type Set struct {
	cfg     Config
	mu      sync.Mutex
	workers map[types.UID]*entry
	gone    map[types.UID]bool // reported gone, but still in the local view
	adopted map[types.UID]bool // had a sandbox or container when the agent started
	running map[types.UID]bool // had a ready sandbox or a running container when the agent started

	unconfirmed bool // no control plane has confirmed the assignment since the machine was booted
	waiting     int  // last logged number of pods that wait for the confirmation
	recorded    bool // the confirmation is on disk; used by Run's goroutine only
	// pods rejected because of the stored Node, an update of which may be on its way: when the wait
	// ends
	doubted map[types.UID]time.Time
	found   map[types.UID]*v1.Pod // pods found on the node at the start of this process, until the orphans are removed
	recheck chan struct{}         // buffered: reconcile again, since a doubt has timed out or a pod released resources
	begun   chan struct{}
	done    chan types.UID
	disks   disks
	wg      sync.WaitGroup
}

type entry struct {
	w        *worker
	pod      *v1.Pod
	refused  *Stop
	evicted  *Stop // evicted by an earlier agent process
	vanished bool  // the pod object no longer exists
}

// New returns a Set without workers. Run starts them.
func New(cfg Config) *Set {
	if cfg.SubPaths == nil {
		cfg.SubPaths = &BindSubPaths{}
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Relist == 0 {
		cfg.Relist = 30 * time.Second
	}
	cfg.turns = newTurns()
	return &Set{cfg: cfg, workers: map[types.UID]*entry{}, gone: map[types.UID]bool{}, adopted: map[types.UID]bool{},
		running: map[types.UID]bool{},
		doubted: map[types.UID]time.Time{}, recheck: make(chan struct{}, 1), begun: make(chan struct{}), done: make(chan types.UID)}
}

// Run waits until the local view of the cluster is synced, and then runs the workers until ctx is
// done. Containers keep running after it returns.
func (s *Set) Run(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-s.cfg.Objects.Synced():
	}
	ctx, cancel := context.WithCancel(ctx)
	defer s.wg.Wait()
	defer cancel()
	events := s.cfg.Runtime.Events(ctx)
	changes := s.cfg.Objects.Changes(ctx)
	claimed := s.cfg.Devices.Changes(ctx)
	var devices <-chan struct{}
	if s.cfg.Plugins != nil {
		devices = s.cfg.Plugins.Changes(ctx)
	}
	relist := time.NewTicker(s.cfg.Relist)
	defer relist.Stop()
	// Adopt before the first decision: pods that already run are admitted without a check.
	if err := wait.For(ctx, retryMin, func() error { return s.adopt(ctx) }); err != nil {
		return ctx.Err()
	}
	s.expectConfirmation()
	confirmed := s.cfg.Objects.Confirmed()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-confirmed:
			confirmed = nil
			s.confirm()
			s.removeOrphans(ctx)
			s.reconcile(ctx)
		case kinds, ok := <-changes:
			if !ok {
				if ctx.Err() != nil {
					return ctx.Err()
				}
				return errors.New("the view of the cluster ended")
			}
			s.changed(ctx, kinds)
		case e, ok := <-events:
			if !ok {
				// Lost runtime events are harmless: wake all workers.
				if ctx.Err() != nil {
					return ctx.Err()
				}
				events = s.cfg.Runtime.Events(ctx)
				s.each(func(e *entry) { e.w.poke() })
				continue
			}
			s.mu.Lock()
			if en := s.workers[e.PodUID]; en != nil {
				en.w.poke()
			}
			s.mu.Unlock()
		case uid := <-s.done:
			s.ended(ctx, uid)
		case <-devices:
			s.each(func(e *entry) { e.w.devicesChanged() })
		case <-claimed:
			s.each(func(e *entry) { e.w.devicesChanged() })
		case <-s.recheck:
			s.reconcile(ctx)
		case <-relist.C:
			if confirmed == nil {
				s.recordConfirmation()
			}
			s.reconcile(ctx)
			s.each(func(e *entry) { e.w.stale(); e.w.relist() })
		}
	}
}

func (s *Set) each(f func(*entry)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range s.workers {
		f(e)
	}
}

func (s *Set) changed(ctx context.Context, kinds map[string]struct{}) {
	for _, k := range []string{"ConfigMap", "Secret", "PersistentVolumeClaim", "PersistentVolume", "CSIDriver"} {
		if _, ok := kinds[k]; ok {
			s.each(func(e *entry) { e.w.stale() })
			break
		}
	}
	for _, k := range []string{"RuntimeClass", "VolumeAttachment", "Node"} { // the last two contain the attached volumes
		if _, ok := kinds[k]; ok {
			s.each(func(e *entry) { e.w.retrySoon() })
			break
		}
	}
	_, pods := kinds["Pod"]
	if _, node := kinds["Node"]; pods || node && s.doubts() {
		s.reconcile(ctx)
	}
}

// reconcile starts missing workers, updates changed pods, and deletes pods that have no object any
// more.
func (s *Set) reconcile(ctx context.Context) {
	pods := slices.Clone(s.cfg.Objects.Pods())
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
	var changed []*entry
	for _, p := range pods {
		present[p.UID] = true
	}
	for uid, e := range s.workers {
		if !present[uid] && !e.vanished {
			// The object is gone before PodGone was reported: a forced deletion, or a pod that was
			// replaced elsewhere.
			e.vanished = true
			e.w.update(Desired{Pod: e.pod, Stop: DeletionStop(e.pod)})
		}
	}
	for _, p := range pods {
		e := s.workers[p.UID]
		switch {
		case e != nil && e.pod != p:
			if !maps.Equal(e.pod.Labels, p.Labels) || !maps.Equal(e.pod.Annotations, p.Annotations) {
				e.w.stale() // the downward API exposes them
			}
			e.pod = p
			changed = append(changed, e)
		case e == nil && !s.gone[p.UID] && s.waits(p):
			waiting++
		case e == nil && !s.gone[p.UID]:
			s.start(ctx, p)
		}
	}
	s.tellWaiting(waiting)
	// Decide about resizes before the workers run, so that the grant and the observed generation
	// match.
	s.resize()
	for _, e := range changed {
		e.w.update(s.desired(e, e.pod))
	}
	for uid := range s.gone {
		if !present[uid] {
			delete(s.gone, uid)
		}
	}
	for uid := range s.doubted {
		if !present[uid] {
			delete(s.doubted, uid)
		}
	}
	select {
	case <-s.begun:
	default:
		close(s.begun)
	}
}

// Begun returns a channel that is closed when the pods which the node had at the start of the agent
// have workers.
func (s *Set) Begun() <-chan struct{} { return s.begun }

func (s *Set) desired(e *entry, p *v1.Pod) Desired {
	if p.DeletionTimestamp != nil {
		return Desired{Pod: p, Stop: DeletionStop(p)}
	}
	return Desired{Pod: p, Stop: e.refused}
}

// start admits a pod and starts its worker. The lock is held.
func (s *Set) start(ctx context.Context, p *v1.Pod) {
	e := &entry{pod: p}
	has, _ := s.hold(p)
	var err error
	if e.evicted, err = loadEviction(s.cfg.Paths, p); err != nil {
		s.cfg.Log.Error("a pod may be started that was evicted", "err", err)
	}
	if s.cfg.Node != nil && p.DeletionTimestamp == nil && !final(p) && !s.adopted[p.UID] && e.evicted == nil {
		e.refused = s.cfg.admit(has.of(p), s.others(e))
		if e.refused != nil && s.doubt(p, e.refused) {
			return
		}
	}
	delete(s.doubted, p.UID)
	s.launch(ctx, e, s.desired(e, p))
	if e.refused != nil {
		e.w.events.event(p, "", v1.EventTypeWarning, e.refused.Reason, e.refused.Message)
	}
}

// patience is how long a rejected pod waits for an update of the Node that might admit it.
const patience = time.Second

// doubt reports whether a rejection must be checked again later. A pod and the Node object arrive
// separately: the label for which the scheduler chose this node may arrive after the pod. The lock
// is held.
func (s *Set) doubt(p *v1.Pod, refused *Stop) bool {
	if !refused.Stored {
		return false
	}
	until, known := s.doubted[p.UID]
	if !known {
		s.doubted[p.UID] = s.cfg.now().Add(patience)
		time.AfterFunc(patience, s.again)
		return true
	}
	return s.cfg.now().Before(until)
}

// again schedules a reconcile.
func (s *Set) again() {
	select {
	case s.recheck <- struct{}{}:
	default:
	}
}

func (s *Set) doubts() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.doubted) > 0
}

// holds reports whether the pod still uses resources of the node.
func (w *worker) holds() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.desired.Stop != nil && w.desired.Stop.Delete && len(w.o.Sandboxes) == 0 && !w.o.anyRunning() {
		return false // it has ended, although its worker may live longer than its object
	}
	return !final(w.desired.Pod) && w.last.Phase != v1.PodSucceeded && w.last.Phase != v1.PodFailed
}

func (s *Set) launch(ctx context.Context, e *entry, d Desired) {
	e.w = newWorker(&s.cfg, d)
	e.w.freed = s.again
	if e.evicted != nil {
		e.w.evicted = e.evicted
		if stop := e.w.desired.Stop; stop == nil {
			e.w.desired.Stop = e.evicted
		} else if stop.Delete {
			e.w.desired.Stop = stop.within(e.evicted.Grace)
		}
	}
	if d.Stop == nil || !d.Stop.Orphan {
		e.w.remember(s.hold(d.Pod))
	}
	uid := d.Pod.UID
	s.workers[uid] = e
	s.wg.Go(func() {
		if e.w.run(ctx) != nil {
			return
		}
		select {
		case s.done <- uid:
		case <-ctx.Done():
		}
	})
}

func (s *Set) ended(ctx context.Context, uid types.UID) {
	s.mu.Lock()
	delete(s.workers, uid)
	delete(s.adopted, uid)
	delete(s.running, uid)
	s.gone[uid] = true
	s.mu.Unlock()
	s.reconcile(ctx)
}

// adopt finds the pods that an earlier agent process left on the node. Workers of assigned pods
// continue with them. The others are removed by removeOrphans.
func (s *Set) adopt(ctx context.Context) error {
	orphans := map[types.UID]*v1.Pod{} // unless they turn out to be assigned
	res, err := s.cfg.Runtime.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
	if err != nil {
		s.cfg.Log.Warn("looking for pods of an earlier life: listing sandboxes", "err", err)
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
		orphans[uid] = &v1.Pod{ObjectMeta: metav1.ObjectMeta{UID: uid, Namespace: sb.Labels[agent.LabelPodNamespace], Name: sb.Labels[agent.LabelPodName]}}
		if d, err := time.ParseDuration(sb.Annotations[annGrace] + "s"); err == nil {
			seconds := int64(d / time.Second)
			orphans[uid].Spec.TerminationGracePeriodSeconds = &seconds
		}
	}
	// After a power failure, only the records of ended containers may be left of a pod.
	cs, err := s.cfg.Runtime.ListContainers(ctx, &cri.ListContainersRequest{})
	if err != nil {
		s.cfg.Log.Warn("looking for pods of an earlier life: listing containers", "err", err)
		return err
	}
	if err := s.restoreLogLinks(cs.Containers); err != nil {
		s.cfg.Log.Warn("linking the logs of containers", "err", err)
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
	uids, err := s.cfg.Volumes.Pods()
	if err != nil {
		s.cfg.Log.Warn("looking for pods of an earlier life: listing volumes", "err", err)
		return err
	}
	having, err := s.cfg.Devices.Pods()
	if err != nil {
		s.cfg.Log.Warn("looking for pods of an earlier life: listing devices", "err", err)
		return err
	}
	uids = append(uids, having...)
	if s.cfg.Plugins != nil {
		if having, err = s.cfg.Plugins.Pods(); err != nil {
			s.cfg.Log.Warn("looking for pods of an earlier life: listing devices of plugins", "err", err)
			return err
		}
		uids = append(uids, having...)
	}
	dirs, err := os.ReadDir(filepath.Join(s.cfg.Paths.State, "pods"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("looking for pods of an earlier life: %w", err)
	}
	for _, d := range dirs {
		uids = append(uids, types.UID(d.Name()))
	}
	for _, uid := range uids {
		if orphans[uid] == nil {
			orphans[uid] = &v1.Pod{ObjectMeta: metav1.ObjectMeta{UID: uid}}
		}
	}
	if err := nameByLogs(s.cfg.Paths.Logs, orphans); err != nil {
		return fmt.Errorf("looking for pods of an earlier life: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.found = orphans
	return nil
}

// removeOrphans removes the pods that adopt found and that are not assigned to this node. It runs
// only after a control plane has confirmed the assignment: a checkpoint may be older than the
// running pods.
func (s *Set) removeOrphans(ctx context.Context) {
	assigned := map[types.UID]bool{}
	for _, p := range s.cfg.Objects.Pods() {
		assigned[p.UID] = true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for uid, p := range s.found {
		if s.workers[uid] == nil && !assigned[uid] {
			s.cfg.Log.Info("removing what belongs to no pod of this node", "namespace", p.Namespace, "pod", p.Name, "uid", uid)
			stop := DeletionStop(p)
			stop.Orphan = true
			s.launch(ctx, &entry{pod: p, vanished: true}, Desired{Pod: p, Stop: stop})
		}
	}
	s.found = nil
}
