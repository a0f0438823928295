package node

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/eviction"
	"keelson.dev/keelson/internal/reservedspace"
	"keelson.dev/keelson/internal/saturate"
	"keelson.dev/keelson/internal/wakeup"
)

// defaultMemoryFloor is Kubernetes' default of the memory that must be available.
var defaultMemoryFloor = reservedspace.Bytes(100 << 20)

func (c *Config) memoryFloor() reservedspace.Amount {
	if c.Node.MemoryFloor == (reservedspace.Amount{}) {
		return defaultMemoryFloor
	}
	return c.Node.MemoryFloor
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
	if c.Node.InodeFloor == (reservedspace.Amount{}) {
		return defaultInodeFloor
	}
	return c.Node.InodeFloor
}

// parseInodeFloor parses the value of the flag for the number or share of inodes that must be free.
func parseInodeFloor(text string) (reservedspace.Amount, error) {
	f, err := reservedspace.Parse(text)
	if err != nil || strings.HasSuffix(text, "i") { // units of bytes do not apply to inodes
		return f, fmt.Errorf("%q: want a number, such as 50000, or a share of the disk's inodes, 1%% to 99%%", text)
	}
	return f, nil
}

// checkInodeFloor returns an error if Config.Node.InodeFloor is so high that a file system with
// this total number of inodes would always cause disk pressure.
func (c *Config) checkInodeFloor(total int64) error {
	if least := c.inodeFloor().BytesOf(total); least >= total {
		return fmt.Errorf("--inode-pressure-below is %s, and the disk of %s has %d inodes: all pods would be evicted "+
			"permanently: set a lower value", c.inodeFloor(), c.Dirs.State, total)
	}
	return nil
}

// checkMemoryFloor returns an error if Config.Node.MemoryFloor is so high that a node with this
// total number of bytes of memory would always have memory pressure.
func (c *Config) checkMemoryFloor(total int64) error {
	if least := c.memoryFloor().BytesOf(total); least >= total {
		return fmt.Errorf("--memory-pressure-below is %s, and the node has %d MiB of memory: all pods would be "+
			"evicted permanently: set a lower value", c.memoryFloor(), total>>20)
	}
	return nil
}

// checkDiskFloor returns an error if Config.Node.DiskFloor is so high that a disk with this total
// number of bytes would always cause disk pressure.
func (c *Config) checkDiskFloor(total int64) error {
	if least := c.Node.DiskFloor.BytesOf(total); least >= total {
		return fmt.Errorf("--disk-pressure-below is %s, and the disk of %s has %d MiB: all pods would be evicted "+
			"permanently: set a lower value", c.Node.DiskFloor, c.Dirs.State, total>>20)
	}
	return nil
}

// memoryOfNode returns the memory capacity of the node in bytes; 0 = unknown.
func (c *Config) memoryOfNode() int64 {
	if q, own := c.Node.Capacity[v1.ResourceMemory]; own {
		return saturate.Value(&q)
	}
	total, _, err := machineMemory()
	if err != nil {
		return 0
	}
	return total
}

// pressureMonitor checks memory and disk, sets the node's pressure conditions, and evicts pods.
// Without pressure, a check reads one file and makes a few system calls.
type pressureMonitor struct {
	read    func() [eviction.Signals]eviction.Level
	records shortageRecords // shortages, stored on disk for the next agent process
	disk    diskReclaimer

	// used by monitorPressure only
	log                 *slog.Logger
	pods                evictablePods
	usage               podUsageReader
	objects             agent.Objects
	events              thresholdEvents
	resumed             bool      // pod workers run, and the pod that the previous agent evicted is known
	noCandidateReported time.Time // time of the last report that no pod can be evicted

	changed wakeup.Signal // signals that a pressure condition changed

	mu      sync.Mutex
	state   eviction.State
	holding [eviction.Signals]bool
	evicted [eviction.Signals]int64
}

// evictablePods is the part of pod.Set that pressureMonitor uses to list, evict and measure pods.
type evictablePods interface {
	WorkersStarted() <-chan struct{}
	EvictablePods() []*v1.Pod
	EvictPod(pod types.UID, message string) bool
	HasEnded(pod types.UID) bool
	EvictingPod() types.UID
	SetDiskReclaim(enabled bool) (left int)
	MeasureStorage(ctx context.Context, pods []*v1.Pod) map[types.UID]agent.PodStorage
}

func newPressureMonitor(cfg *Config, boot string) *pressureMonitor {
	p := &pressureMonitor{read: func() [eviction.Signals]eviction.Level {
		return readLevels(cfg)
	}, records: newShortages(cfg.Dirs.Run, boot),
		events: newThresholdEvents(cfg.NodeName, nil), changed: wakeup.New()}
	p.firstCheck(time.Now())
	return p
}

// firstCheck initializes the pressure state at the start of the agent from a reading and from the
// shortages that the previous agent recorded.
func (p *pressureMonitor) firstCheck(now time.Time) {
	p.state = p.records.loadState(p.state, now)
	p.applyReading(eviction.Reading{At: now, Levels: p.read()})
}

// readLevels returns the current level of each eviction signal: available memory, disk space and
// inodes. Known is false for a level that cannot be read.
func readLevels(cfg *Config) (out [eviction.Signals]eviction.Level) {
	if capacity, own := cfg.Node.Capacity[v1.ResourceMemory]; own {
		// A configured capacity is a share of the machine, so the usage of this node's pods counts.
		if used, err := cgroupMemory(cfg.Dirs.CgroupRoot); err == nil {
			out[eviction.Memory] = eviction.Level{Left: saturate.Value(&capacity) - used,
				Floor: cfg.memoryFloor().BytesOf(saturate.Value(&capacity)), Known: true}
		}
	} else if total, left, err := machineMemory(); err == nil {
		out[eviction.Memory] = eviction.Level{Left: left, Floor: cfg.memoryFloor().BytesOf(total), Known: true}
	}
	if total, left, err := diskSpace(cfg.Dirs.State); err == nil {
		out[eviction.Disk] = eviction.Level{Left: left, Floor: cfg.Node.DiskFloor.BytesOf(total), Known: true}
	}
	if total, left, err := diskInodes(cfg.Dirs.State); err == nil && total > 0 {
		out[eviction.Inodes] = eviction.Level{Left: left, Floor: cfg.inodeFloor().BytesOf(total), Known: true}
	}
	return out
}

// hasPressure reports whether the node's pressure condition for a signal is true. The condition
// stays true for eviction.PressureTransition after a shortage.
func (p *pressureMonitor) hasPressure(s eviction.Signal) bool {
	if p == nil {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.holding[s]
}

// pressureChanged returns a channel that is signaled when a pressure condition of the node has
// changed.
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
		r.Ended = p.pods.HasEnded(victim)
	}
	if p.disk.isShort() {
		r.Reclaiming, r.Reclaimed = r.At.Sub(p.disk.shortSince), p.disk.reclaimDisk(p.pods, r.At)
	}
	r.Levels = p.read()
	v := p.applyReading(r)
	p.records.saveState(p.currentState(), r, p.log)
	switch {
	case v.Reclaim && !p.disk.isShort():
		p.disk.startReclaim(p.pods, r.At)
	case !v.Reclaim && p.disk.isShort():
		p.disk.endReclaim(p.pods)
	}
	for s := range eviction.Signals {
		p.events.reportThreshold(s, r)
	}
	if v.Evict && p.resumed {
		// before that, pod workers do not run, or the evicted pod of the previous agent is unknown
		p.evictOne(ctx, v.Signal, r)
	}
}

// resumeEviction adds the pod that the previous agent process was evicting to the state. checkOnce
// therefore waits for the end of this pod before it evicts another pod. resumeEviction does nothing
// before the pod workers run.
func (p *pressureMonitor) resumeEviction(now time.Time) {
	if p.resumed {
		return
	}
	select {
	case <-p.pods.WorkersStarted():
	default:
		return
	}
	p.resumed = true
	if uid := p.pods.EvictingPod(); uid != "" {
		p.mu.Lock()
		p.state = p.state.WithEvicted(uid, now)
		p.mu.Unlock()
	}
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
		p.changed.Send()
	}
	return v
}

// evictOne ranks the pods by their usage of the signal's resource and evicts the first one that can
// be evicted. reading is the reading that requires the eviction.
func (p *pressureMonitor) evictOne(ctx context.Context, signal eviction.Signal, reading eviction.Reading) {
	if signal.IsDisk() && reading.At.Sub(p.usage.measuredInVain) < measureInterval {
		return
	}
	l := reading.Levels[signal]
	candidates, err := p.usage.evictionCandidates(ctx, p.pods, signal)
	if err != nil && ctx.Err() == nil {
		p.log.Warn("the resource usage of some pods is unknown", "signal", signal, "err", err)
	}
	for _, c := range eviction.Rank(candidates) {
		if ctx.Err() != nil || !p.pods.EvictPod(c.Pod.UID, eviction.Message(signal, l, c)) {
			continue // it has ended meanwhile
		}
		p.mu.Lock()
		p.state = p.state.WithEvicted(c.Pod.UID, reading.At)
		p.evicted[signal]++
		p.mu.Unlock()
		p.usage.measuredInVain = time.Time{}
		p.log.Warn("evicting a pod because of a resource shortage of the node", "signal", signal, "available", l.Left,
			"threshold", l.Floor,
			"pod", c.Pod.Namespace+"/"+c.Pod.Name, "uid", c.Pod.UID, "used", c.Used, "requested", c.Request)
		return
	}
	if ctx.Err() == nil && reading.At.Sub(p.noCandidateReported) >= eventInterval {
		p.noCandidateReported = reading.At
		p.log.Warn("the node has a resource shortage, but no pod can be evicted", "signal", signal, "available", l.Left,
			"threshold", l.Floor)
	}
}

// writeMetrics writes the eviction counters in the Prometheus text format.
func (p *pressureMonitor) writeMetrics(to io.Writer) error {
	p.mu.Lock()
	evicted := p.evicted
	p.mu.Unlock()
	const name = "keelson_evictions_total"
	_, err := fmt.Fprintf(to, "# HELP %s Pods that were evicted because the node was short of something\n# TYPE %s "+
		"counter\n", name, name)
	for s := range eviction.Signals {
		if err == nil {
			_, err = fmt.Fprintf(to, "%s{signal=%q} %d\n", name, s.String(), evicted[s])
		}
	}
	return err
}
