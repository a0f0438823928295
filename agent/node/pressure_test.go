package node

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/eviction"
	"keelson.dev/keelson/agent/fake"
	"keelson.dev/keelson/internal/reservedspace"
	"keelson.dev/keelson/internal/virtual"
	"keelson.dev/keelson/internal/wakeup"
)

// fakePods is a node with pods that use memory and disk until they end.
type fakePods struct {
	mu       sync.Mutex
	capacity [eviction.Signals]int64
	pods     []*v1.Pod
	has      map[types.UID][eviction.Signals]int64
	takes    time.Duration // time that a pod needs to terminate
	log      []string
	begin    time.Time
	ending   map[types.UID]time.Time
	records  int   // of ended pods
	stuck    bool  // they cannot be removed
	unused   int64 // size of unused images
	cleared  bool  // a collection was requested
	walks    int
	spared   bool
	begun    chan struct{}
	deaf     bool      // no pod can be evicted
	before   types.UID // evicted by the previous agent
}

func newFakePods(memory, disk int64) *fakePods {
	begun := make(chan struct{})
	close(begun)
	return &fakePods{begun: begun, capacity: [eviction.Signals]int64{memory, disk},
		has: map[types.UID][eviction.Signals]int64{}, ending: map[types.UID]time.Time{}, begin: time.Now()}
}

// addPod adds a pod with a priority, its usage of memory and disk, and its memory request.
func (c *fakePods) addPod(name string, priority int32, memory, request, disk int64) {
	p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default", UID: types.UID(name)},
		Spec: v1.PodSpec{Priority: &priority, Containers: []v1.Container{{Name: "app"}}}}
	if request > 0 {
		p.Spec.Containers[0].Resources.Requests =
			v1.ResourceList{v1.ResourceMemory: *resource.NewQuantity(request, resource.BinarySI)}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pods = append(c.pods, p)
	c.has[p.UID] = [eviction.Signals]int64{memory, disk}
}

func (c *fakePods) recordEvent(format string, args ...any) {
	c.log = append(c.log, fmt.Sprintf("%s ", time.Since(c.begin).Round(time.Second))+fmt.Sprintf(format, args...))
}

// awaitIdle removes the pods that have ended. The caller holds the lock.
func (c *fakePods) awaitIdle() {
	for uid, at := range c.ending {
		if !time.Now().Before(at) {
			delete(c.has, uid)
		}
	}
}

func (c *fakePods) EvictablePods() (out []*v1.Pod) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, p := range c.pods {
		if _, going := c.ending[p.UID]; !going {
			out = append(out, p)
		}
	}
	return out
}

func (c *fakePods) WorkersStarted() <-chan struct{} { return c.begun }

func (c *fakePods) EvictPod(uid types.UID, message string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.deaf {
		return false
	}
	c.ending[uid] = time.Now().Add(c.takes)
	c.recordEvent("evict %s: %s", uid, message)
	return true
}

func (c *fakePods) HasEnded(uid types.UID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.awaitIdle()
	_, there := c.has[uid]
	return !there
}

func (c *fakePods) EvictingPod() types.UID {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.before
}

func (c *fakePods) SetDiskReclaim(on bool) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	left := c.records
	if on != c.spared {
		c.recordEvent("spare %v", on)
	}
	if c.spared = on; on && !c.stuck {
		c.records = 0
	}
	return left
}

func (c *fakePods) MeasureStorage(_ context.Context, pods []*v1.Pod) map[types.UID]agent.PodStorage {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.walks++
	out := map[types.UID]agent.PodStorage{}
	for _, p := range pods {
		n := uint64(c.has[p.UID][eviction.Disk])
		out[p.UID] = agent.PodStorage{Used: n, Inodes: uint64(c.has[p.UID][eviction.Inodes]),
			Containers: map[string]agent.ContainerStorage{"app": {Layer: n / 2, Logs: n - n/2}}}
	}
	return out
}

func (c *fakePods) measure(context.Context) (*agent.UsageSnapshot, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.walks++
	m := &agent.UsageSnapshot{}
	for uid, has := range c.has {
		u := agent.Usage{HasMemory: true, WorkingSet: uint64(has[eviction.Memory])}
		m.Pods = append(m.Pods, agent.PodUsage{UID: uid, Usage: u,
			Containers: []agent.ContainerUsage{{Name: "app", Usage: u}}})
	}
	return m, nil
}

const mib = 1 << 20

func (c *fakePods) read() (out [eviction.Signals]eviction.Level) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.awaitIdle()
	for i := range out {
		out[i] = eviction.Level{Left: c.capacity[i], Floor: 100 * mib, Known: c.capacity[i] > 0}
		for _, has := range c.has {
			out[i].Left -= has[i]
		}
	}
	out[eviction.Disk].Left -= c.unused
	return out
}

// requestCollection removes unused images. The second request reports that it has completed.
func (c *fakePods) requestCollection(time.Time) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cleared {
		return true
	}
	c.recordEvent("images")
	c.unused, c.cleared = 0, true
	return false
}

func (c *fakePods) takeEvents() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return strings.Join(c.log, "\n")
}

func (c *fakePods) takeLooks() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.walks
}

// startMonitor runs the pressure monitor until the end of the test.
func (c *fakePods) startMonitor(t *testing.T) (*pressureMonitor, *fake.Cluster) {
	cluster := fake.NewCluster()
	log := slog.New(slog.DiscardHandler)
	p := &pressureMonitor{read: c.read, log: log, usage: podUsageReader{measure: c.measure}, pods: c,
		disk: diskReclaimer{images: c}, objects: cluster,
		events: newThresholdEvents("w1", cluster), changed: wakeup.New()}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- p.monitorPressure(ctx) }()
	t.Cleanup(func() {
		stop()
		<-done
	})
	virtual.Wait()
	return p, cluster
}

func sleepAround(d time.Duration) {
	time.Sleep(d)
	virtual.Wait()
}

// A node without shortages only reads its levels: no pod is measured. F95
func TestNoPressure(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		c := newFakePods(1000*mib, 1000*mib)
		c.addPod("greedy", 0, 900*mib, 0, 900*mib)
		p, cluster := c.startMonitor(t)
		sleepAround(time.Hour)
		if c.takeEvents() != "" || c.takeLooks() != 0 || p.hasPressure(eviction.Memory) ||
			p.hasPressure(eviction.Disk) || len(cluster.Events("w1")) != 0 {
			t.Errorf("%d walks, %s", c.takeLooks(), c.takeEvents())
		}
	})
}

// Short of memory a node evicts one pod after the other, the next when the one before has ended and it is still short; it
// is under pressure from then on until five minutes after, tells of it, and counts. F95
func TestMemoryPressure(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		c := newFakePods(1000*mib, 1000*mib)
		c.takes = 15 * time.Second
		c.addPod("guaranteed", 0, 600*mib, 600*mib, 0)
		c.addPod("burstable", 0, 50*mib, 10*mib, 0)
		c.addPod("best-effort", 0, 60*mib, 0, 0)
		c.addPod("important", 100, 150*mib, 0, 0)
		c.addPod("critical", 2000001000, 80*mib, 0, 0)
		p, cluster := c.startMonitor(t)
		if !p.hasPressure(eviction.Memory) || p.hasPressure(eviction.Disk) || len(p.pressureChanged()) != 1 {
			t.Error("no pressure is said")
		}
		sleepAround(9 * time.Minute)
		const text = "The node was low on resource: memory. Threshold quantity: 100Mi, available: %s. Container app " +
			"was using %s, request is %s, has larger consumption of memory. "
		want := strings.Join([]string{
			"0s evict best-effort: " + fmt.Sprintf(text, "60Mi", "60Mi", "0"),
		}, "\n")
		if got := c.takeEvents(); got != want {
			t.Errorf("%s\nwant\n%s", got, want)
		}
		if p.hasPressure(eviction.Memory) {
			t.Error("it is still said to be under pressure")
		}
		// A large shortage evicts all evictable pods, in order.
		c.addPod("greedy", 2000000000, 900*mib, 0, 0)
		sleepAround(2 * time.Minute)
		var order []string
		for line := range strings.Lines(c.takeEvents()) {
			at, _, _ := strings.Cut(line, ":")
			order = append(order, at)
		}
		if want := []string{"0s evict best-effort", "9m10s evict burstable", "9m30s evict important",
			"9m50s evict guaranteed"}; !slices.Equal(order, want) {
			t.Errorf("%q, want %q", order, want)
		}
		if !p.hasPressure(eviction.Memory) {
			t.Error("it is short and does not say so")
		}
		events := cluster.Events("w1")
		if len(events) != 2 || !strings.Contains(events[0], "EvictionThresholdMet Attempting to reclaim memory") {
			t.Errorf("events: %q", events)
		}
		var metrics strings.Builder
		if err := p.writeMetrics(&metrics); err != nil ||
			!strings.Contains(metrics.String(), "\nkeelson_evictions_total{signal=\"memory.available\"} 4\n") ||
			!strings.Contains(metrics.String(), "\nkeelson_evictions_total{signal=\"nodefs.available\"} 0\n") {
			t.Errorf("%v: %s", err, metrics.String())
		}
	})
}

// On a full disk, unused images and data of exited containers are removed first. If that is not
// enough, pods are evicted, largest usage first. F95
func TestDiskPressure(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		c := newFakePods(1000*mib, 1000*mib)
		c.unused, c.records = 200*mib, 3
		c.addPod("small", 0, 0, 0, 100*mib)
		c.addPod("large", 0, 0, 0, 500*mib)
		c.addPod("log", 0, 0, 0, 150*mib)
		p, _ := c.startMonitor(t)
		sleepAround(2 * time.Minute)
		if got := c.takeEvents(); got != "0s spare true\n10s images\n10s spare false" || c.takeLooks() != 0 ||
			!p.hasPressure(eviction.Disk) {
			t.Errorf("%d walks, %s", c.takeLooks(), got)
		}
		c.mu.Lock()
		c.log, c.records, c.cleared = nil, 3, false
		c.mu.Unlock()
		c.addPod("hog", 0, 0, 0, 180*mib)
		sleepAround(time.Minute)
		want := "2m10s spare true\n2m20s images\n2m30s evict large: The node was low on resource: ephemeral-storage. " +
			"Threshold quantity: 100Mi, available: 70Mi. " +
			"Container app was using 500Mi, request is 0, has larger consumption of ephemeral-storage. With its " +
			"volumes the pod was using 500Mi, request is 0. \n2m40s spare false"
		if got := c.takeEvents(); got != want {
			t.Errorf("%s\nwant\n%s", got, want)
		}
	})
}

// Images wait while data of exited containers is being removed, but for a limited time, and not if
// there is no shortage. F95 F106
func TestImagesWaitForWhatHasEnded(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		c, store := newFakePods(1000*mib, 1000*mib), &fakeStore{}
		c.records = 3
		p, cluster := c.startMonitor(t)
		r := &imageGC{images: store, objects: cluster, reporter: cluster, node: "w1",
			log: slog.New(slog.DiscardHandler), requested: wakeup.New(), isHeld: p.disk.isSparing}
		looks := func(when string, want int) {
			t.Helper()
			before, _ := store.lastRequest()
			r.collectOnce(t.Context(), time.Now())
			if after, _ := store.lastRequest(); after-before != want {
				t.Errorf("%s: %d looks at images, want %d", when, after-before, want)
			}
		}
		looks("nothing is short", 1)
		c.addPod("hog", 2000000000, 0, 0, 950*mib)
		sleepAround(10 * time.Second)
		looks("what ended containers have left is going", 0)
		if r.requestCollection(time.Now()) {
			t.Error("a look that did not take place counts")
		}
		sleepAround(10 * time.Second)
		looks("it has gone", 1)
		c.mu.Lock()
		c.records, c.stuck = 1, true
		c.mu.Unlock()
		sleepAround(10 * time.Second)
		looks("there is more of it", 0)
		sleepAround(eviction.ReclaimTimeout)
		looks("it does not go", 1)
		c.mu.Lock()
		c.has["hog"] = [eviction.Signals]int64{}
		c.mu.Unlock()
		sleepAround(10 * time.Second)
		c.mu.Lock()
		c.has["hog"] = [eviction.Signals]int64{0, 950 * mib}
		c.mu.Unlock()
		sleepAround(10 * time.Second)
		looks("the disk is short once more", 0)
		c.mu.Lock()
		c.has["hog"] = [eviction.Signals]int64{}
		c.mu.Unlock()
		sleepAround(10 * time.Second)
		looks("it no longer is", 1)
	})
}

// Critical pods are not measured. While no pod can be evicted, the disk is measured rarely. Pods
// are not evicted before their workers run. F95
func TestPressureWithoutVictims(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		c := newFakePods(1000*mib, 1000*mib)
		c.begun = make(chan struct{})
		c.deaf = true
		c.addPod("critical", 2000001000, 950*mib, 0, 950*mib)
		p, _ := c.startMonitor(t)
		sleepAround(time.Minute)
		if !p.noCandidateReported.IsZero() || !p.hasPressure(eviction.Memory) || !p.hasPressure(eviction.Disk) {
			t.Error("before there are workers it says that there are no pods, or not that the node is short")
		}
		close(c.begun)
		sleepAround(time.Hour)
		if c.takeLooks() != 0 || p.noCandidateReported.IsZero() {
			t.Errorf("%d walks, for a pod that may not go; told of: %s", c.takeLooks(), p.noCandidateReported)
		}
		c.mu.Lock()
		c.has["critical"] = [eviction.Signals]int64{0, 950 * mib}
		c.mu.Unlock()
		c.addPod("stubborn", 0, 0, 0, mib)
		sleepAround(time.Hour)
		if got := c.takeLooks(); got < 55 || got > 61 {
			t.Errorf("%d walks in an hour", got)
		}
	})
}

// Workers that start during a check do not affect it: the evicted pod of the previous agent is read
// first. F95
func TestWorkersComeDuringALook(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		c := newFakePods(1000*mib, 1000*mib)
		c.begun = make(chan struct{})
		c.addPod("other", 0, 500*mib, 0, 0)
		c.addPod("before", 0, 600*mib, 0, 0)
		c.before, c.ending["before"] = "before", time.Now().Add(15*time.Second)
		come := sync.OnceFunc(func() { close(c.begun) })
		p := &pressureMonitor{read: func() [eviction.Signals]eviction.Level {
			come()
			return c.read()
		}, log: slog.New(slog.DiscardHandler), usage: podUsageReader{measure: c.measure}, pods: c,
			changed: wakeup.New(),
			events:  newThresholdEvents("w1", fake.NewCluster())}
		for range 5 {
			p.checkOnce(t.Context())
			sleepAround(eviction.Interval)
		}
		if c.takeEvents() != "" || !p.hasPressure(eviction.Memory) {
			t.Errorf("it evicts another: %s", c.takeEvents())
		}
	})
}

// Available memory is the kernel's estimate. The page cache is no reason to evict pods. F95
func TestMemoryLeft(t *testing.T) {
	total, left, err := parseMeminfo("MemTotal:       1000 kB\nMemFree:         200 kB\nMemAvailable:    900 " +
		"kB\nActive(file):    300 kB\nInactive(file):  100 kB\nHugePages_Total:       0\n")
	if err != nil || total != 1000<<10 || left != 900<<10 {
		t.Errorf("%d of %d, %v", left, total, err)
	}
	for _, text := range []string{"", "MemTotal: 1 kB\nMemFree: 1 kB\n", "MemTotal: x kB\nMemAvailable: 1 kB\n"} {
		if _, _, err := parseMeminfo(text); err == nil {
			t.Errorf("%q is taken", text)
		}
	}
	if total, left, err := machineMemory(); err != nil || total <= 0 || left <= 0 || left > total {
		t.Errorf("of this machine: %d of %d, %v", left, total, err)
	}
}

// A node has memory pressure if less than the floor is available. The floor is not allocatable. F95
func TestMemoryFloor(t *testing.T) {
	total, left, err := machineMemory()
	if err != nil || left < 200*mib {
		t.Skipf("the machine is short of memory itself: %d bytes, %v", left, err)
	}
	for above, short := range map[reservedspace.Amount]bool{{}: false, reservedspace.Bytes(mib): false,
		reservedspace.Bytes(total - 1): true} {
		cfg, _, _ := fakeConfig("w1", t.TempDir())
		cfg.Parts.Runtime, cfg.Node.MemoryFloor = nil, above
		n := newNodeFacts(&cfg).currentNode()
		if got := condition(n, v1.NodeMemoryPressure); (got.Status == v1.ConditionTrue) != short {
			t.Errorf("%s are to be left, %d are: %+v", above, left, got)
		}
		if cfg.memoryOfNode() != total || cfg.checkMemoryFloor(total) != nil {
			t.Errorf("of %d bytes no %s can be left: %v", cfg.memoryOfNode(), cfg.memoryFloor(),
				cfg.checkMemoryFloor(total))
		}
		const want = "--memory-pressure-below is 100Mi, and the node has 64 MiB of memory"
		if err := cfg.checkMemoryFloor(64 * mib); above == (reservedspace.Amount{}) &&
			(err == nil || !strings.Contains(err.Error(), want)) {
			t.Error(err)
		}
		if got, want := n.Status.Allocatable.Memory().Value(), total-cfg.memoryFloor().BytesOf(total); got != want {
			t.Errorf("pods may have %d, want %d", got, want)
		}
	}
}

// With a configured capacity the floor is not allocatable, but the cgroup limit includes it.
// Otherwise the node could not detect pressure. F95
func TestFloorOfACapacity(t *testing.T) {
	cfg, _, _ := fakeConfig("w1", t.TempDir())
	cfg.Node.Capacity = v1.ResourceList{v1.ResourceMemory: resource.MustParse("1000Mi"),
		v1.ResourceCPU: resource.MustParse("2")}
	f := newNodeFacts(&cfg)
	n, limits := f.currentNode().Status, f.podLimits()
	for what, q := range map[string]struct{ got, want int64 }{
		"capacity":    {n.Capacity.Memory().Value(), 1000 * mib},
		"allocatable": {n.Allocatable.Memory().Value(), 900 * mib},
		"limit":       {limits.Memory().Value(), 1000 * mib}, "CPUs": {n.Allocatable.Cpu().Value(), 2},
		"limit of CPUs": {limits.Cpu().Value(), 2},
	} {
		if q.got != q.want {
			t.Errorf("%s: %d, want %d", what, q.got, q.want)
		}
	}
	cfg.Node.Capacity = nil
	f = newNodeFacts(&cfg)
	if limits = f.podLimits(); limits.Memory().Cmp(*f.currentNode().Status.Allocatable.Memory()) != 0 {
		t.Errorf("pods of a machine are held to %s", limits.Memory())
	}
}

// Of a configured capacity, pods use what the kernel cannot reclaim: page cache does not count,
// even if it was read repeatedly. F95
func TestHeldOfACapacity(t *testing.T) {
	const stat = "anon 100\nfile 1000\ninactive_file 300\nactive_file 200\nslab_reclaimable " +
		"50\nslab_unreclaimable 7\nbroken x\n"
	if got := subtractSpare(2000, stat, []string{"inactive_file", "active_file", "slab_reclaimable", "broken"}); got !=
		1450 {
		t.Errorf("%d", got)
	}
	if got := subtractSpare(400, stat, []string{"inactive_file", "active_file"}); got != 0 {
		t.Errorf("%d: more is kept than used", got)
	}
}

// On a disk without free inodes, the pod with most inodes is evicted, whatever its size. The node
// has disk pressure. F95
func TestInodePressure(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		c := newFakePods(1000*mib, 1000*mib)
		c.capacity[eviction.Inodes] = 1000 * mib // all pods together
		c.addPod("large", 0, 0, 0, 500*mib)
		c.addPod("many files", 0, 0, 0, 10*mib)
		c.addPod("some", 0, 0, 0, 20*mib)
		c.has["many files"] = [eviction.Signals]int64{eviction.Disk: 10 * mib, eviction.Inodes: 900 * mib}
		c.has["some"] = [eviction.Signals]int64{eviction.Disk: 20 * mib, eviction.Inodes: 50 * mib}
		c.records = 1
		p, cluster := c.startMonitor(t)
		cfg, _, _ := fakeConfig("w1", t.TempDir())
		if o := (&nodeFacts{cfg: &Config{NodeName: cfg.NodeName}, pressure: p}).observeMachine(); !o.diskPressure ||
			o.memoryPressure || p.hasPressure(eviction.Disk) {
			t.Errorf("it says %+v", o)
		}
		sleepAround(2 * time.Minute)
		const want = "0s spare true\n10s images\n20s evict many files: The node was low on resource: inodes. " +
			"Threshold quantity: 104857600, available: 52428800. " +
			"With its volumes the pod was using 943718400. \n30s spare false"
		if got := c.takeEvents(); got != want {
			t.Errorf("%s\nwant\n%s", got, want)
		}
		var metrics strings.Builder
		if err := p.writeMetrics(&metrics); err != nil ||
			!strings.Contains(metrics.String(), "\nkeelson_evictions_total{signal=\"nodefs.inodesFree\"} 1\n") {
			t.Errorf("%v: %s", err, metrics.String())
		}
		if e := strings.Join(cluster.Events("w1"), "\n"); !strings.Contains(e,
			"EvictionThresholdMet Attempting to reclaim inodes") {
			t.Errorf("events: %s", e)
		}
	})
}

// The floor of inodes is a share or a number; Kubernetes' default is 5 %. A floor above all inodes
// is refused. A disk without inode numbers never has a shortage. F95
func TestInodeFloor(t *testing.T) {
	total, left, err := diskInodes(t.TempDir())
	if err != nil || left < 1000 {
		t.Skipf("the machine's disk has %d of %d inodes, %v", left, total, err)
	}
	for above, short := range map[reservedspace.Amount]bool{{}: left < total/100*5, reservedspace.Bytes(10): false,
		reservedspace.Bytes(total - 1): true} {
		cfg, _, _ := fakeConfig("w1", t.TempDir())
		cfg.Parts.Runtime, cfg.Node.DiskFloor, cfg.Node.InodeFloor = nil, reservedspace.Bytes(1), above
		if got := condition(newNodeFacts(&cfg).currentNode(), v1.NodeDiskPressure); (got.Status == v1.ConditionTrue) !=
			short {
			t.Errorf("%s are to be free, %d of %d are: %+v", cfg.inodeFloor(), left, total, got)
		}
	}
	var cfg Config
	if err := cfg.checkInodeFloor(1000); err != nil || cfg.inodeFloor().BytesOf(1000) != 50 {
		t.Errorf("%d of 1,000, %v", cfg.inodeFloor().BytesOf(1000), err)
	}
	cfg.Node.InodeFloor = reservedspace.Bytes(1000)
	const want = "--inode-pressure-below is 1000, and the disk of  has 1000 inodes"
	if err := cfg.checkInodeFloor(1000); err == nil || !strings.HasPrefix(err.Error(), want) {
		t.Error(err)
	}
	if l := readLevels(&Config{Dirs: DirConfig{State: "/proc"}})[eviction.Inodes]; l.Known {
		t.Errorf("of a disk that does not count them: %+v", l)
	}
}

// A floor above the size of the disk is refused. F95
func TestFloorAboveTheDisk(t *testing.T) {
	cfg, _, _ := fakeConfig("w1", t.TempDir())
	cfg.Node.DiskFloor = reservedspace.Bytes(20 << 30)
	const want = "--disk-pressure-below is 20Gi, and the disk of "
	if err := cfg.checkDiskFloor(16 << 30); err == nil || !strings.HasPrefix(err.Error(), want) {
		t.Error(err)
	}
	if err := cfg.checkDiskFloor(21 << 30); err != nil {
		t.Error(err)
	}
	if cfg.Node.DiskFloor = (reservedspace.Amount{}); cfg.checkDiskFloor(1<<30) != nil {
		t.Error(cfg.checkDiskFloor(1 << 30))
	}
}
