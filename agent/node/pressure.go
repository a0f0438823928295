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

// defaultMemoryFloor is Kubernetes' default.
var defaultMemoryFloor = reservedspace.Bytes(100 << 20)

func (c *Config) memoryFloor() reservedspace.Amount {
	if c.MemoryFloor == (reservedspace.Amount{}) {
		return defaultMemoryFloor
	}
	return c.MemoryFloor
}

// parseMemoryFloor reads how much memory has to be available.
func parseMemoryFloor(text string) (reservedspace.Amount, error) {
	f, err := reservedspace.Parse(text)
	if err != nil {
		return f, fmt.Errorf("%q: want a size, such as 200Mi, or a share of the node's memory, 1%% to 99%%", text)
	}
	return f, nil
}

// defaultInodeFloor is Kubernetes' default.
var defaultInodeFloor = reservedspace.Percent(5)

func (c *Config) inodeFloor() reservedspace.Amount {
	if c.InodeFloor == (reservedspace.Amount{}) {
		return defaultInodeFloor
	}
	return c.InodeFloor
}

// parseInodeFloor reads how many inodes have to be free.
func parseInodeFloor(text string) (reservedspace.Amount, error) {
	f, err := reservedspace.Parse(text)
	if err != nil || strings.HasSuffix(text, "i") { // they are no bytes
		return f, fmt.Errorf("%q: want a number, such as 50000, or a share of the disk's inodes, 1%% to 99%%", text)
	}
	return f, nil
}

// checkInodeFloor refuses to run a node that would be short of inodes, however few its pods took.
func (c *Config) checkInodeFloor(total int64) error {
	if least := c.inodeFloor().BytesOf(total); least >= total {
		return fmt.Errorf("--inode-pressure-below is %s, and the disk of %s has %d inodes: all pods would be evicted, for ever; give less", c.inodeFloor(), c.StateDir, total)
	}
	return nil
}

// checkMemoryFloor refuses to run a node that would be short of memory, however little its pods took.
func (c *Config) checkMemoryFloor(total int64) error {
	if least := c.memoryFloor().BytesOf(total); least >= total {
		return fmt.Errorf("--memory-pressure-below is %s, and the node has %d MiB of memory: all pods would be evicted, for ever; give less", c.memoryFloor(), total>>20)
	}
	return nil
}

// checkDiskFloor does so for the disk.
func (c *Config) checkDiskFloor(total int64) error {
	if least := c.DiskFloor.BytesOf(total); least >= total {
		return fmt.Errorf("--disk-pressure-below is %s, and the disk of %s has %d MiB: all pods would be evicted, for ever; give less", c.DiskFloor, c.StateDir, total>>20)
	}
	return nil
}

// memoryOfNode is what the node has, in bytes; 0 = not known.
func (c *Config) memoryOfNode() int64 {
	if q, own := c.Capacity[v1.ResourceMemory]; own {
		return saturate.Value(&q)
	}
	total, _, err := memory()
	if err != nil {
		return 0
	}
	return total
}

// measuringPatience is how long is measured what the pods have on disk; what was found until then decides.
const measuringPatience = 20 * time.Second

// vainEvery is the time between two such measurings while none of the pods can be told to go.
const vainEvery = time.Minute

// pressure looks whether the node is short of memory or disk, keeps what its conditions say of that, and has pods evicted
// while it is. While there is enough of both, a look costs a file and a call to the kernel.
type pressure struct {
	read func() [eviction.Signals]eviction.Level
	node string
	hold shortages // for the next agent

	// of run alone
	log      *slog.Logger
	measure  func(context.Context) (*agent.UsageSnapshot, error) // nil: memory cannot be measured, nor pods be ranked by it
	pods     evictable
	images   cleared // nil: not the agent's own
	objects  agent.Objects
	reporter agent.Reporter
	resumed  bool                          // there are workers, and it is known whom the agent before has evicted
	told     map[eviction.Signal]time.Time // that the node is short
	helpless time.Time                     // told that no pod can be evicted
	vain     time.Time                     // that pods' disk was measured; zero = one was evicted by that
	since    time.Time                     // that the disk is short; zero = it is not
	bare     time.Time                     // that nothing is left of ended containers; zero = something is

	changed chan struct{} // capacity 1: what holds says is another

	mu      sync.Mutex
	state   eviction.State
	holding [eviction.Signals]bool
	sparing bool // what ended containers have left is going of the disk
	evicted [eviction.Signals]int64
}

// evictable is pod.Set, as far as evictions go.
type evictable interface {
	Begun() <-chan struct{}
	Evictable() []*v1.Pod
	Evict(pod types.UID, message string) bool
	Ended(pod types.UID) bool
	Evicting() types.UID
	Spare(on bool) (left int)
	MeasureStorage(ctx context.Context, pods []*v1.Pod) map[types.UID]agent.PodStorage
}

// cleared is imageRoom, as far as evictions go.
type cleared interface {
	// clear has unused images looked for soon, and says whether that has been done wholly since the time.
	clear(since time.Time) bool
}

func newPressure(cfg *Config, boot string) *pressure {
	p := &pressure{read: func() [eviction.Signals]eviction.Level { return levels(cfg) }, node: cfg.NodeName, hold: newShortages(cfg.RunDir, boot),
		told: map[eviction.Signal]time.Time{}, changed: make(chan struct{}, 1)}
	p.begin(time.Now())
	return p
}

// begin looks for the first time. What the agent before this one has seen counts.
func (p *pressure) begin(now time.Time) {
	p.state = p.hold.load(p.state, now)
	p.judge(eviction.Reading{At: now, Levels: p.read()})
}

// levels looks at the node once. What it does not find out is not known.
func levels(cfg *Config) (out [eviction.Signals]eviction.Level) {
	if capacity, own := cfg.Capacity[v1.ResourceMemory]; own {
		// A configured capacity is a share of the machine: what counts is what this node's pods have taken of it.
		if used, err := cgroupMemory(cfg.CgroupRoot); err == nil {
			out[eviction.Memory] = eviction.Level{Left: saturate.Value(&capacity) - used, Floor: cfg.memoryFloor().BytesOf(saturate.Value(&capacity)), Known: true}
		}
	} else if total, left, err := memory(); err == nil {
		out[eviction.Memory] = eviction.Level{Left: left, Floor: cfg.memoryFloor().BytesOf(total), Known: true}
	}
	if total, left, err := disk(cfg.StateDir); err == nil {
		out[eviction.Disk] = eviction.Level{Left: left, Floor: cfg.DiskFloor.BytesOf(total), Known: true}
	}
	if total, left, err := inodes(cfg.StateDir); err == nil && total > 0 {
		out[eviction.Inodes] = eviction.Level{Left: left, Floor: cfg.inodeFloor().BytesOf(total), Known: true}
	}
	return out
}

// holds says that the node is under pressure, or was a moment ago.
func (p *pressure) holds(s eviction.Signal) bool {
	if p == nil {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.holding[s]
}

// news wakes who tells what holds says.
func (p *pressure) news() <-chan struct{} {
	if p == nil {
		return nil
	}
	return p.changed
}

// run works until ctx ends. Pods are evicted from when it is known which the node has.
func (p *pressure) run(ctx context.Context) error {
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
		p.look(ctx)
		next.Reset(eviction.Interval) // no look comes sooner after one: it would find that too little time has passed
	}
}

// look does it once.
func (p *pressure) look(ctx context.Context) {
	r := eviction.Reading{At: time.Now()}
	p.resume(r.At)
	if victim := p.remembers().Victim(); victim != "" {
		r.Ended = p.pods.Ended(victim)
	}
	if !p.since.IsZero() {
		r.Reclaiming, r.Reclaimed = r.At.Sub(p.since), p.reclaim(r.At)
	}
	r.Levels = p.read()
	v := p.judge(r)
	p.hold.save(p.remembers(), r, p.log)
	switch {
	case v.Reclaim && p.since.IsZero():
		p.since = r.At
		p.reclaim(r.At)
	case !v.Reclaim && !p.since.IsZero():
		p.since, p.bare = time.Time{}, time.Time{}
		p.spare(false)
		p.pods.Spare(false)
	}
	for s := range eviction.Signals {
		p.tell(s, r)
	}
	if v.Evict && p.resumed { // else there are no workers yet that could be told, or were not when it was asked for whom to wait
		p.evict(ctx, v.Signal, r)
	}
}

// resume has the pod waited for that the agent before this one has evicted: what it has is not free yet.
func (p *pressure) resume(now time.Time) {
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
		p.state = p.state.Evicted(uid, now)
		p.mu.Unlock()
	}
}

// reclaim has the disk freed of what nobody needs, first of what ended containers have left, then of the images that these
// stood on, and says whether all has gone.
func (p *pressure) reclaim(now time.Time) bool {
	p.spare(now.Sub(p.since) < eviction.ReclaimPatience) // before any of it goes, and with it what an image is in use for
	if p.pods.Spare(true) > 0 {
		p.bare = time.Time{}
		return false
	}
	p.spare(false)
	if p.bare.IsZero() {
		p.bare = now
	}
	return p.images == nil || p.images.clear(p.bare)
}

func (p *pressure) spare(on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.sparing = on
}

// spares says that what ended containers have left is going of a disk that is short, which may be enough.
func (p *pressure) spares() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.sparing
}

func (p *pressure) remembers() eviction.State {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.state
}

func (p *pressure) judge(r eviction.Reading) eviction.Verdict {
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

// evict has the pod end that has to go first, if there is one.
func (p *pressure) evict(ctx context.Context, s eviction.Signal, r eviction.Reading) {
	if s.OfDisk() && r.At.Sub(p.vain) < vainEvery {
		return
	}
	l := r.Levels[s]
	candidates, err := p.candidates(ctx, s)
	if err != nil && ctx.Err() == nil {
		p.log.Warn("not all is known of what pods use of what the node is short of", "signal", s, "err", err)
	}
	for _, c := range eviction.Rank(candidates) {
		if ctx.Err() != nil || !p.pods.Evict(c.Pod.UID, eviction.Message(s, l, c)) {
			continue // it has ended by itself meanwhile
		}
		p.mu.Lock()
		p.state = p.state.Evicted(c.Pod.UID, r.At)
		p.evicted[s]++
		p.mu.Unlock()
		p.vain = time.Time{}
		p.log.Warn("a pod is evicted: the node is short", "signal", s, "available", l.Left, "threshold", l.Floor,
			"pod", c.Pod.Namespace+"/"+c.Pod.Name, "uid", c.Pod.UID, "used", c.Used, "requested", c.Request)
		return
	}
	if ctx.Err() == nil && r.At.Sub(p.helpless) >= roomToldEvery {
		p.helpless = r.At
		p.log.Warn("the node is short and there is no pod that could be evicted", "signal", s, "available", l.Left, "threshold", l.Floor)
	}
}

// candidates are the pods with what they have of what the node is short of. One of which nothing is known has nothing.
func (p *pressure) candidates(ctx context.Context, s eviction.Signal) ([]eviction.Candidate, error) {
	// Those that may not go are not measured either.
	pods := slices.DeleteFunc(p.pods.Evictable(), agent.IsCritical)
	if len(pods) == 0 {
		return nil, nil
	}
	var used map[types.UID]use
	var err error
	if s.OfDisk() {
		p.vain = time.Now()
		used = p.onDisk(ctx, pods, s)
	} else {
		used, err = p.inMemory(ctx)
	}
	var out []eviction.Candidate
	for _, pod := range pods {
		u, ok := used[pod.UID]
		if !ok {
			continue
		}
		c := eviction.Candidate{Pod: pod, Used: u.all, Request: requested(resource.PodRequests(pod, resource.PodResourcesOptions{}), s)}
		for _, list := range [][]v1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
			for i := range list {
				if n, ok := u.containers[list[i].Name]; ok {
					c.Containers = append(c.Containers, eviction.Container{Name: list[i].Name, Used: n, Request: requested(list[i].Resources.Requests, s)})
				}
			}
		}
		out = append(out, c)
	}
	return out, err
}

func requested(l v1.ResourceList, s eviction.Signal) int64 {
	q := l[s.Resource()]
	return saturate.Value(&q)
}

// use is what a pod and its containers have of something, in bytes or how many.
type use struct {
	all        int64
	containers map[string]int64
}

func (p *pressure) inMemory(ctx context.Context) (map[types.UID]use, error) {
	if p.measure == nil {
		return nil, nil
	}
	m, err := p.measure(ctx)
	if m == nil {
		return nil, err
	}
	out := map[types.UID]use{}
	for i := range m.Pods {
		u := use{capped(m.Pods[i].WorkingSet), map[string]int64{}}
		for _, c := range m.Pods[i].Containers {
			u.containers[c.Name] = capped(c.WorkingSet)
		}
		out[m.Pods[i].UID] = u
	}
	return out, err
}

func (p *pressure) onDisk(ctx context.Context, pods []*v1.Pod, s eviction.Signal) map[types.UID]use {
	bounded, cancel := context.WithTimeout(ctx, measuringPatience)
	defer cancel()
	out := map[types.UID]use{}
	for uid, st := range p.pods.MeasureStorage(bounded, pods) {
		if s == eviction.Inodes {
			out[uid] = use{all: capped(st.Inodes)}
			continue
		}
		u := use{capped(st.Used), map[string]int64{}}
		for name, c := range st.Containers {
			u.containers[name] = capped(c.Layer + c.Logs)
		}
		out[uid] = u
	}
	return out
}

func capped(n uint64) int64 { return int64(min(n, math.MaxInt64)) }

// tell makes an event of the node when it becomes short, as kubelet words it, and again while that lasts, not often.
func (p *pressure) tell(s eviction.Signal, r eviction.Reading) {
	if !r.Levels[s].Short() {
		return
	}
	if last, ok := p.told[s]; ok && r.At.Sub(last) < roomToldEvery {
		return
	}
	p.told[s] = r.At
	p.reporter.Event(nodeEvent(p.node, v1.EventTypeWarning, "EvictionThresholdMet", fmt.Sprintf("Attempting to reclaim %s", s.Resource()), r.At))
}

// writeMetrics counts evictions, in Prometheus' text form.
func (p *pressure) writeMetrics(to io.Writer) error {
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
