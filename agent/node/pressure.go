package node

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/component-helpers/resource"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/eviction"
	"keelson.dev/keelson/internal/reservedspace"
	"keelson.dev/keelson/internal/saturate"
)

// defaultMemoryFloor is Kubernetes' default of the memory that must be available.
var defaultMemoryFloor = reservedspace.Bytes(100 << 20)

func (c *Config) memoryFloor() reservedspace.Amount {
	if c.MemoryFloor == (reservedspace.Amount{}) {
		return defaultMemoryFloor
	}
	return c.MemoryFloor
}

// parseMemoryFloor parses the value of the flag for the memory that must be available.
func parseMemoryFloor(text string) (reservedspace.Amount, error) {
	f, err := reservedspace.Parse(text)
	if err != nil {
		return f, fmt.Errorf("%q: want a size, such as 200Mi, or a share of the node's memory, 1%% to 99%%", text)
	}
	return f, nil
}

// defaultInodeFloor is Kubernetes' default of the share of inodes that must be free.
var defaultInodeFloor = reservedspace.Percent(5)

func (c *Config) inodeFloor() reservedspace.Amount {
	if c.InodeFloor == (reservedspace.Amount{}) {
		return defaultInodeFloor
	}
	return c.InodeFloor
}

// parseInodeFloor parses the value of the flag for the number or share of inodes that must be free.
func parseInodeFloor(text string) (reservedspace.Amount, error) {
	f, err := reservedspace.Parse(text)
	if err != nil || strings.HasSuffix(text, "i") { // units of bytes do not apply to inodes
		return f, fmt.Errorf("%q: want a number, such as 50000, or a share of the disk's inodes, 1%% to 99%%", text)
	}
	return f, nil
}

// checkInodeFloor returns an error if Config.InodeFloor is so high that a file system with total
// inodes would always cause disk pressure.
func (c *Config) checkInodeFloor(total int64) error {
	if least := c.inodeFloor().BytesOf(total); least >= total {
		return fmt.Errorf("--inode-pressure-below is %s, and the disk of %s has %d inodes: all pods would be evicted permanently: set a lower value", c.inodeFloor(), c.StateDir, total)
	}
	return nil
}

// checkMemoryFloor returns an error if Config.MemoryFloor is so high that a node with total bytes
// of memory would always have memory pressure.
func (c *Config) checkMemoryFloor(total int64) error {
	if least := c.memoryFloor().BytesOf(total); least >= total {
		return fmt.Errorf("--memory-pressure-below is %s, and the node has %d MiB of memory: all pods would be evicted permanently: set a lower value", c.memoryFloor(), total>>20)
	}
	return nil
}

// checkDiskFloor returns an error if Config.DiskFloor is so high that a disk of total bytes would
// always cause disk pressure.
func (c *Config) checkDiskFloor(total int64) error {
	if least := c.DiskFloor.BytesOf(total); least >= total {
		return fmt.Errorf("--disk-pressure-below is %s, and the disk of %s has %d MiB: all pods would be evicted permanently: set a lower value", c.DiskFloor, c.StateDir, total>>20)
	}
	return nil
}

// memoryOfNode returns the memory capacity of the node in bytes; 0 = unknown.
func (c *Config) memoryOfNode() int64 {
	if q, own := c.Capacity[v1.ResourceMemory]; own {
		return saturate.Value(&q)
	}
	total, _, err := machineMemory()
	if err != nil {
		return 0
	}
	return total
}

// measureTimeout bounds the measurement of the pods' disk usage for an eviction. When it ends, only
// the pods measured so far are ranked.
const measureTimeout = 20 * time.Second

// measureInterval is the minimum time between two measurements if the last one led to no eviction.
const measureInterval = time.Minute

// pressureMonitor checks memory and disk, sets the node's pressure conditions, and evicts pods.
// Without pressure, a check reads one file and makes a few system calls.
type pressureMonitor struct {
	read    func() [eviction.Signals]eviction.Level
	node    string
	records shortageRecords // for the next agent

	// used by monitorPressure only
	log                 *slog.Logger
	measure             func(context.Context) (*agent.UsageSnapshot, error) // nil: memory usage of pods is unknown, so they are not ranked by it
	pods                evictablePods
	images              imageCollector // nil: an external runtime owns the images
	objects             agent.Objects
	reporter            agent.Reporter
	resumed             bool                          // pod workers run, and the evicted pod of the previous agent is known
	reported            map[eviction.Signal]time.Time // time of the last threshold event, by signal
	noCandidateReported time.Time                     // time of the last report that no pod can be evicted
	measuredInVain      time.Time                     // time of the last disk measurement; zero = it led to an eviction
	diskShortSince      time.Time                     // start of the disk pressure; zero = none
	nothingLeftSince    time.Time                     // time since which no data of exited containers is left; zero = some is left

	changed chan struct{} // capacity 1; signals that a pressure condition changed

	mu      sync.Mutex
	state   eviction.State
	holding [eviction.Signals]bool
	sparing bool // data of exited containers is being removed
	evicted [eviction.Signals]int64
}

// evictablePods is the part of pod.Set that pressureMonitor uses to list and evict pods.
type evictablePods interface {
	Begun() <-chan struct{}
	Evictable() []*v1.Pod
	Evict(pod types.UID, message string) bool
	Ended(pod types.UID) bool
	Evicting() types.UID
	Spare(on bool) (left int)
	MeasureStorage(ctx context.Context, pods []*v1.Pod) map[types.UID]agent.PodStorage
}

// imageCollector is the part of imageGC that pressureMonitor uses to free disk space.
type imageCollector interface {
	// requestCollection requests a collection of unused images. It reports whether one that started
	// after since has completed.
	requestCollection(since time.Time) bool
}

func newPressureMonitor(cfg *Config, boot string) *pressureMonitor {
	p := &pressureMonitor{read: func() [eviction.Signals]eviction.Level { return readLevels(cfg) }, node: cfg.NodeName, records: newShortages(cfg.RunDir, boot),
		reported: map[eviction.Signal]time.Time{}, changed: make(chan struct{}, 1)}
	p.firstCheck(time.Now())
	return p
}

// firstCheck initializes the pressure state at the start of the agent, by a reading and by the
// pressure that the previous agent recorded.
func (p *pressureMonitor) firstCheck(now time.Time) {
	p.state = p.records.loadState(p.state, now)
	p.applyReading(eviction.Reading{At: now, Levels: p.read()})
}

// readLevels returns the current level of each eviction signal: available memory, disk space and
// inodes. A level that cannot be read is not Known.
func readLevels(cfg *Config) (out [eviction.Signals]eviction.Level) {
	if capacity, own := cfg.Capacity[v1.ResourceMemory]; own {
		// A configured capacity is a share of the machine, so the usage of this node's pods counts.
		if used, err := cgroupMemory(cfg.CgroupRoot); err == nil {
			out[eviction.Memory] = eviction.Level{Left: saturate.Value(&capacity) - used, Floor: cfg.memoryFloor().BytesOf(saturate.Value(&capacity)), Known: true}
		}
	} else if total, left, err := machineMemory(); err == nil {
		out[eviction.Memory] = eviction.Level{Left: left, Floor: cfg.memoryFloor().BytesOf(total), Known: true}
	}
	if total, left, err := diskSpace(cfg.StateDir); err == nil {
		out[eviction.Disk] = eviction.Level{Left: left, Floor: cfg.DiskFloor.BytesOf(total), Known: true}
	}
	if total, left, err := diskInodes(cfg.StateDir); err == nil && total > 0 {
		out[eviction.Inodes] = eviction.Level{Left: left, Floor: cfg.inodeFloor().BytesOf(total), Known: true}
	}
	return out
}

// hasPressure reports whether the node's pressure condition for a signal is true. It stays true for
// a transition period after the pressure.
func (p *pressureMonitor) hasPressure(s eviction.Signal) bool {
	if p == nil {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.holding[s]
}

// pressureChanged returns a channel that has a value when a pressure condition of the node changed.
func (p *pressureMonitor) pressureChanged() <-chan struct{} {
	if p == nil {
		return nil
	}
	return p.changed
}

// monitorPressure runs a check at regular intervals until ctx ends. It starts when the pods of the
// node are known.
func (p *pressureMonitor) monitorPressure(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-p.objects.Synced():
	}
	next := time.NewTimer(0)
	defer next.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-next.C:
		}
		p.checkOnce(ctx)
		next.Reset(eviction.Interval) // reset after the check: eviction requires Interval between two readings
	}
}

// checkOnce runs one check: it reads the levels, sets the pressure conditions, frees disk space and
// evicts at most one pod.
func (p *pressureMonitor) checkOnce(ctx context.Context) {
	r := eviction.Reading{At: time.Now()}
	p.resumeEviction(r.At)
	if victim := p.currentState().Victim(); victim != "" {
		r.Ended = p.pods.Ended(victim)
	}
	if !p.diskShortSince.IsZero() {
		r.Reclaiming, r.Reclaimed = r.At.Sub(p.diskShortSince), p.reclaimDisk(r.At)
	}
	r.Levels = p.read()
	v := p.applyReading(r)
	p.records.saveState(p.currentState(), r, p.log)
	switch {
	case v.Reclaim && p.diskShortSince.IsZero():
		p.diskShortSince = r.At
		p.reclaimDisk(r.At)
	case !v.Reclaim && !p.diskShortSince.IsZero():
		p.diskShortSince, p.nothingLeftSince = time.Time{}, time.Time{}
		p.setSparing(false)
		p.pods.Spare(false)
	}
	for s := range eviction.Signals {
		p.reportThreshold(s, r)
	}
	if v.Evict && p.resumed { // before that, pod workers do not run, or the evicted pod of the previous agent is unknown
		p.evictOne(ctx, v.Signal, r)
	}
}

// resumeEviction restores an eviction that the previous agent process started. The state then
// contains the evicted pod, so that checkOnce waits for its end before it evicts another pod. It
// takes effect once the pod workers run.
func (p *pressureMonitor) resumeEviction(now time.Time) {
	if p.resumed {
		return
	}
	select {
	case <-p.pods.Begun():
	default:
		return
	}
	p.resumed = true
	if uid := p.pods.Evicting(); uid != "" {
		p.mu.Lock()
		p.state = p.state.WithEvicted(uid, now)
		p.mu.Unlock()
	}
}

// reclaimDisk frees disk space: first it removes data of exited containers, then the images that
// they used. It returns true when nothing reclaimable is left.
func (p *pressureMonitor) reclaimDisk(now time.Time) bool {
	p.setSparing(now.Sub(p.diskShortSince) < eviction.ReclaimTimeout) // set before the removal, which makes images unused
	if p.pods.Spare(true) > 0 {
		p.nothingLeftSince = time.Time{}
		return false
	}
	p.setSparing(false)
	if p.nothingLeftSince.IsZero() {
		p.nothingLeftSince = now
	}
	return p.images == nil || p.images.requestCollection(p.nothingLeftSince)
}

func (p *pressureMonitor) setSparing(on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.sparing = on
}

// isSparing reports whether data of exited containers is being removed. That may free enough disk
// space, so images should not be removed yet.
func (p *pressureMonitor) isSparing() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.sparing
}

func (p *pressureMonitor) currentState() eviction.State {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.state
}

func (p *pressureMonitor) applyReading(r eviction.Reading) eviction.Verdict {
	p.mu.Lock()
	defer p.mu.Unlock()
	var v eviction.Verdict
	p.state, v = p.state.Next(r)
	if p.holding != v.Pressure {
		p.holding = v.Pressure
		select {
		case p.changed <- struct{}{}:
		default:
		}
	}
	return v
}

// evictOne evicts the first pod, in the ranking for the signal s, that can be evicted.
func (p *pressureMonitor) evictOne(ctx context.Context, s eviction.Signal, r eviction.Reading) {
	if s.IsDisk() && r.At.Sub(p.measuredInVain) < measureInterval {
		return
	}
	l := r.Levels[s]
	candidates, err := p.evictionCandidates(ctx, s)
	if err != nil && ctx.Err() == nil {
		p.log.Warn("the resource usage of some pods is unknown", "signal", s, "err", err)
	}
	for _, c := range eviction.Rank(candidates) {
		if ctx.Err() != nil || !p.pods.Evict(c.Pod.UID, eviction.Message(s, l, c)) {
			continue // it has ended meanwhile
		}
		p.mu.Lock()
		p.state = p.state.WithEvicted(c.Pod.UID, r.At)
		p.evicted[s]++
		p.mu.Unlock()
		p.measuredInVain = time.Time{}
		p.log.Warn("evicting a pod because of a resource shortage of the node", "signal", s, "available", l.Left, "threshold", l.Floor,
			"pod", c.Pod.Namespace+"/"+c.Pod.Name, "uid", c.Pod.UID, "used", c.Used, "requested", c.Request)
		return
	}
	if ctx.Err() == nil && r.At.Sub(p.noCandidateReported) >= eventInterval {
		p.noCandidateReported = r.At
		p.log.Warn("the node has a resource shortage, but no pod can be evicted", "signal", s, "available", l.Left, "threshold", l.Floor)
	}
}

// evictionCandidates returns the pods that may be evicted, with their usage of the resource of the
// signal s. It omits pods with unknown usage.
func (p *pressureMonitor) evictionCandidates(ctx context.Context, s eviction.Signal) ([]eviction.Candidate, error) {
	// Critical pods are not evicted, so they are not measured.
	pods := slices.DeleteFunc(p.pods.Evictable(), agent.IsCritical)
	if len(pods) == 0 {
		return nil, nil
	}
	var used map[types.UID]podUse
	var err error
	if s.IsDisk() {
		p.measuredInVain = time.Now()
		used = p.diskUsage(ctx, pods, s)
	} else {
		used, err = p.memoryUsage(ctx)
	}
	var out []eviction.Candidate
	for _, pod := range pods {
		u, ok := used[pod.UID]
		if !ok {
			continue
		}
		c := eviction.Candidate{Pod: pod, Used: u.total, Request: requestOf(resource.PodRequests(pod, resource.PodResourcesOptions{}), s)}
		for _, list := range [][]v1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
			for i := range list {
				if n, ok := u.containers[list[i].Name]; ok {
					c.Containers = append(c.Containers, eviction.Container{Name: list[i].Name, Used: n, Request: requestOf(list[i].Resources.Requests, s)})
				}
			}
		}
		out = append(out, c)
	}
	return out, err
}

func requestOf(l v1.ResourceList, s eviction.Signal) int64 {
	q := l[s.Resource()]
	return saturate.Value(&q)
}

// podUse is the usage of a pod and its containers, in bytes or inodes.
type podUse struct {
	total      int64
	containers map[string]int64
}

func (p *pressureMonitor) memoryUsage(ctx context.Context) (map[types.UID]podUse, error) {
	if p.measure == nil {
		return nil, nil
	}
	m, err := p.measure(ctx)
	if m == nil {
		return nil, err
	}
	out := map[types.UID]podUse{}
	for i := range m.Pods {
		u := podUse{toInt64(m.Pods[i].WorkingSet), map[string]int64{}}
		for _, c := range m.Pods[i].Containers {
			u.containers[c.Name] = toInt64(c.WorkingSet)
		}
		out[m.Pods[i].UID] = u
	}
	return out, err
}

func (p *pressureMonitor) diskUsage(ctx context.Context, pods []*v1.Pod, s eviction.Signal) map[types.UID]podUse {
	bounded, cancel := context.WithTimeout(ctx, measureTimeout)
	defer cancel()
	out := map[types.UID]podUse{}
	for uid, st := range p.pods.MeasureStorage(bounded, pods) {
		if s == eviction.Inodes {
			out[uid] = podUse{total: toInt64(st.Inodes)}
			continue
		}
		u := podUse{toInt64(st.Used), map[string]int64{}}
		for name, c := range st.Containers {
			u.containers[name] = toInt64(c.Layer + c.Logs)
		}
		out[uid] = u
	}
	return out
}

func toInt64(n uint64) int64 { return int64(min(n, math.MaxInt64)) }

// reportThreshold reports the kubelet's event when the level of a signal crosses its threshold, and
// again at intervals while that lasts.
func (p *pressureMonitor) reportThreshold(s eviction.Signal, r eviction.Reading) {
	if !r.Levels[s].IsShort() {
		return
	}
	if last, ok := p.reported[s]; ok && r.At.Sub(last) < eventInterval {
		return
	}
	p.reported[s] = r.At
	p.reporter.Event(nodeEvent(p.node, v1.EventTypeWarning, "EvictionThresholdMet", fmt.Sprintf("Attempting to reclaim %s", s.Resource()), r.At))
}

// writeMetrics writes the eviction counters in the Prometheus text format.
func (p *pressureMonitor) writeMetrics(to io.Writer) error {
	p.mu.Lock()
	evicted := p.evicted
	p.mu.Unlock()
	const name = "keelson_evictions_total"
	_, err := fmt.Fprintf(to, "# HELP %s Pods that were evicted because the node was short of something\n# TYPE %s counter\n", name, name)
	for s := range eviction.Signals {
		if err == nil {
			_, err = fmt.Fprintf(to, "%s{signal=%q} %d\n", name, s.String(), evicted[s])
		}
	}
	return err
}
