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
)

// crowd is a node with pods of which each has some memory and disk, both of which end with it.
type crowd struct {
	mu       sync.Mutex
	capacity [eviction.Signals]int64
	pods     []*v1.Pod
	has      map[types.UID][eviction.Signals]int64
	takes    time.Duration // how long a pod needs to end
	log      []string
	begin    time.Time
	ending   map[types.UID]time.Time
	records  int   // of ended pods
	stuck    bool  // they do not go
	unused   int64 // what images take that nothing uses
	cleared  bool  // images have been looked for
	walks    int
	spared   bool
	begun    chan struct{}
	deaf     bool      // no pod can be told to go
	before   types.UID // evicted by the agent before this one
}

func newCrowd(memory, disk int64) *crowd {
	begun := make(chan struct{})
	close(begun)
	return &crowd{begun: begun, capacity: [eviction.Signals]int64{memory, disk}, has: map[types.UID][eviction.Signals]int64{}, ending: map[types.UID]time.Time{}, begin: time.Now()}
}

// pod adds one of a priority that uses memory and disk, and has requested so much memory.
func (c *crowd) pod(name string, priority int32, memory, request, disk int64) {
	p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default", UID: types.UID(name)}, Spec: v1.PodSpec{Priority: &priority, Containers: []v1.Container{{Name: "app"}}}}
	if request > 0 {
		p.Spec.Containers[0].Resources.Requests = v1.ResourceList{v1.ResourceMemory: *resource.NewQuantity(request, resource.BinarySI)}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pods = append(c.pods, p)
	c.has[p.UID] = [eviction.Signals]int64{memory, disk}
}

func (c *crowd) note(format string, args ...any) {
	c.log = append(c.log, fmt.Sprintf("%s ", time.Since(c.begin).Round(time.Second))+fmt.Sprintf(format, args...))
}

// settle takes away what has ended by now. The lock is held.
func (c *crowd) settle() {
	for uid, at := range c.ending {
		if !time.Now().Before(at) {
			delete(c.has, uid)
		}
	}
}

func (c *crowd) Evictable() (out []*v1.Pod) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, p := range c.pods {
		if _, going := c.ending[p.UID]; !going {
			out = append(out, p)
		}
	}
	return out
}

func (c *crowd) Begun() <-chan struct{} { return c.begun }

func (c *crowd) Evict(uid types.UID, message string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.deaf {
		return false
	}
	c.ending[uid] = time.Now().Add(c.takes)
	c.note("evict %s: %s", uid, message)
	return true
}

func (c *crowd) Ended(uid types.UID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.settle()
	_, there := c.has[uid]
	return !there
}

func (c *crowd) Evicting() types.UID {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.before
}

func (c *crowd) Spare(on bool) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	left := c.records
	if on != c.spared {
		c.note("spare %v", on)
	}
	if c.spared = on; on && !c.stuck {
		c.records = 0
	}
	return left
}

func (c *crowd) MeasureStorage(_ context.Context, pods []*v1.Pod) map[types.UID]agent.PodStorage {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.walks++
	out := map[types.UID]agent.PodStorage{}
	for _, p := range pods {
		n := uint64(c.has[p.UID][eviction.Disk])
		out[p.UID] = agent.PodStorage{Used: n, Inodes: uint64(c.has[p.UID][eviction.Inodes]), Containers: map[string]agent.ContainerStorage{"app": {Layer: n / 2, Logs: n - n/2}}}
	}
	return out
}

func (c *crowd) measure(context.Context) (*agent.UsageSnapshot, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.walks++
	m := &agent.UsageSnapshot{}
	for uid, has := range c.has {
		u := agent.Usage{HasMemory: true, WorkingSet: uint64(has[eviction.Memory])}
		m.Pods = append(m.Pods, agent.PodUsage{UID: uid, Usage: u, Containers: []agent.ContainerUsage{{Name: "app", Usage: u}}})
	}
	return m, nil
}

const mib = 1 << 20

func (c *crowd) read() (out [eviction.Signals]eviction.Level) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.settle()
	for i := range out {
		out[i] = eviction.Level{Left: c.capacity[i], Floor: 100 * mib, Known: c.capacity[i] > 0}
		for _, has := range c.has {
			out[i].Left -= has[i]
		}
	}
	out[eviction.Disk].Left -= c.unused
	return out
}

// clear removes the images that nothing uses, and is through with that when it is asked again.
func (c *crowd) clear(time.Time) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cleared {
		return true
	}
	c.note("images")
	c.unused, c.cleared = 0, true
	return false
}

func (c *crowd) said() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return strings.Join(c.log, "\n")
}

func (c *crowd) looks() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.walks
}

// watch runs the node's part until the test ends.
func (c *crowd) watch(t *testing.T) (*pressure, *fake.Cluster) {
	cluster := fake.NewCluster()
	log := slog.New(slog.DiscardHandler)
	p := &pressure{read: c.read, node: "w1", log: log, measure: c.measure, pods: c, images: c, objects: cluster, reporter: cluster,
		told: map[eviction.Signal]time.Time{}, changed: make(chan struct{}, 1)}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- p.run(ctx) }()
	t.Cleanup(func() {
		stop()
		<-done
	})
	virtual.Wait()
	return p, cluster
}

func sleep(d time.Duration) {
	time.Sleep(d)
	virtual.Wait()
}

// A node with enough of everything looks, and does nothing: no pod is measured. F95
func TestNoPressure(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		c := newCrowd(1000*mib, 1000*mib)
		c.pod("greedy", 0, 900*mib, 0, 900*mib)
		p, cluster := c.watch(t)
		sleep(time.Hour)
		if c.said() != "" || c.looks() != 0 || p.holds(eviction.Memory) || p.holds(eviction.Disk) || len(cluster.Events("w1")) != 0 {
			t.Errorf("%d walks, %s", c.looks(), c.said())
		}
	})
}

// Short of memory a node evicts one pod after the other, the next when the one before has ended and it is still short; it
// is under pressure from then on until five minutes after, tells of it, and counts. F95
func TestMemoryPressure(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		c := newCrowd(1000*mib, 1000*mib)
		c.takes = 15 * time.Second
		c.pod("guaranteed", 0, 600*mib, 600*mib, 0)
		c.pod("burstable", 0, 50*mib, 10*mib, 0)
		c.pod("best-effort", 0, 60*mib, 0, 0)
		c.pod("important", 100, 150*mib, 0, 0)
		c.pod("critical", 2000001000, 80*mib, 0, 0)
		p, cluster := c.watch(t)
		if !p.holds(eviction.Memory) || p.holds(eviction.Disk) || len(p.news()) != 1 {
			t.Error("no pressure is said")
		}
		sleep(9 * time.Minute)
		const text = "The node was low on resource: memory. Threshold quantity: 100Mi, available: %s. Container app was using %s, request is %s, has larger consumption of memory. "
		want := strings.Join([]string{
			"0s evict best-effort: " + fmt.Sprintf(text, "60Mi", "60Mi", "0"),
		}, "\n")
		if got := c.said(); got != want {
			t.Errorf("%s\nwant\n%s", got, want)
		}
		if p.holds(eviction.Memory) {
			t.Error("it is still said to be under pressure")
		}
		// Much more is needed: all go that may, in their order.
		c.pod("greedy", 2000000000, 900*mib, 0, 0)
		sleep(2 * time.Minute)
		var order []string
		for line := range strings.Lines(c.said()) {
			at, _, _ := strings.Cut(line, ":")
			order = append(order, at)
		}
		if want := []string{"0s evict best-effort", "9m10s evict burstable", "9m30s evict important", "9m50s evict guaranteed"}; !slices.Equal(order, want) {
			t.Errorf("%q, want %q", order, want)
		}
		if !p.holds(eviction.Memory) {
			t.Error("it is short and does not say so")
		}
		events := cluster.Events("w1")
		if len(events) != 2 || !strings.Contains(events[0], "EvictionThresholdMet Attempting to reclaim memory") {
			t.Errorf("events: %q", events)
		}
		var metrics strings.Builder
		if err := p.writeMetrics(&metrics); err != nil || !strings.Contains(metrics.String(), "\nkeelson_evictions_total{signal=\"memory.available\"} 4\n") ||
			!strings.Contains(metrics.String(), "\nkeelson_evictions_total{signal=\"nodefs.available\"} 0\n") {
			t.Errorf("%v: %s", err, metrics.String())
		}
	})
}

// Of a short disk first goes what nobody needs: images that nothing uses, and what ended containers have left. Pods go when
// that does not help, who has most of it first. F95
func TestDiskPressure(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		c := newCrowd(1000*mib, 1000*mib)
		c.unused, c.records = 200*mib, 3
		c.pod("small", 0, 0, 0, 100*mib)
		c.pod("large", 0, 0, 0, 500*mib)
		c.pod("log", 0, 0, 0, 150*mib)
		p, _ := c.watch(t)
		sleep(2 * time.Minute)
		if got := c.said(); got != "0s spare true\n10s images\n10s spare false" || c.looks() != 0 || !p.holds(eviction.Disk) {
			t.Errorf("%d walks, %s", c.looks(), got)
		}
		c.mu.Lock()
		c.log, c.records, c.cleared = nil, 3, false
		c.mu.Unlock()
		c.pod("hog", 0, 0, 0, 180*mib)
		sleep(time.Minute)
		want := "2m10s spare true\n2m20s images\n2m30s evict large: The node was low on resource: ephemeral-storage. Threshold quantity: 100Mi, available: 70Mi. " +
			"Container app was using 500Mi, request is 0, has larger consumption of ephemeral-storage. With its volumes the pod was using 500Mi, request is 0. \n2m40s spare false"
		if got := c.said(); got != want {
			t.Errorf("%s\nwant\n%s", got, want)
		}
	})
}

// Images wait while what ended containers have left is going, and not for ever; not at all while there is enough. F95 F106
func TestImagesWaitForWhatHasEnded(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		c, store := newCrowd(1000*mib, 1000*mib), &rooms{}
		c.records = 3
		p, cluster := c.watch(t)
		r := &imageRoom{images: store, objects: cluster, reporter: cluster, node: "w1", log: slog.New(slog.DiscardHandler), soon: make(chan struct{}, 1), held: p.spares}
		looks := func(when string, want int) {
			t.Helper()
			before, _ := store.asked()
			r.look(t.Context(), time.Now())
			if after, _ := store.asked(); after-before != want {
				t.Errorf("%s: %d looks at images, want %d", when, after-before, want)
			}
		}
		looks("nothing is short", 1)
		c.pod("hog", 2000000000, 0, 0, 950*mib)
		sleep(10 * time.Second)
		looks("what ended containers have left is going", 0)
		if r.clear(time.Now()) {
			t.Error("a look that did not take place counts")
		}
		sleep(10 * time.Second)
		looks("it has gone", 1)
		c.mu.Lock()
		c.records, c.stuck = 1, true
		c.mu.Unlock()
		sleep(10 * time.Second)
		looks("there is more of it", 0)
		sleep(eviction.ReclaimPatience)
		looks("it does not go", 1)
		c.mu.Lock()
		c.has["hog"] = [eviction.Signals]int64{}
		c.mu.Unlock()
		sleep(10 * time.Second)
		c.mu.Lock()
		c.has["hog"] = [eviction.Signals]int64{0, 950 * mib}
		c.mu.Unlock()
		sleep(10 * time.Second)
		looks("the disk is short once more", 0)
		c.mu.Lock()
		c.has["hog"] = [eviction.Signals]int64{}
		c.mu.Unlock()
		sleep(10 * time.Second)
		looks("it no longer is", 1)
	})
}

// Pods that may not go are not measured, and while none can be told to go the disk is measured seldom. Before there are
// workers nothing is said of pods. F95
func TestPressureWithoutVictims(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		c := newCrowd(1000*mib, 1000*mib)
		c.begun = make(chan struct{})
		c.deaf = true
		c.pod("critical", 2000001000, 950*mib, 0, 950*mib)
		p, _ := c.watch(t)
		sleep(time.Minute)
		if !p.helpless.IsZero() || !p.holds(eviction.Memory) || !p.holds(eviction.Disk) {
			t.Error("before there are workers it says that there are no pods, or not that the node is short")
		}
		close(c.begun)
		sleep(time.Hour)
		if c.looks() != 0 || p.helpless.IsZero() {
			t.Errorf("%d walks, for a pod that may not go; told of: %s", c.looks(), p.helpless)
		}
		c.mu.Lock()
		c.has["critical"] = [eviction.Signals]int64{0, 950 * mib}
		c.mu.Unlock()
		c.pod("stubborn", 0, 0, 0, mib)
		sleep(time.Hour)
		if got := c.looks(); got < 55 || got > 61 {
			t.Errorf("%d walks in an hour", got)
		}
	})
}

// Workers that come while the node is looked at change nothing of that look: whom the agent before has evicted is asked first. F95
func TestWorkersComeDuringALook(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		c := newCrowd(1000*mib, 1000*mib)
		c.begun = make(chan struct{})
		c.pod("other", 0, 500*mib, 0, 0)
		c.pod("before", 0, 600*mib, 0, 0)
		c.before, c.ending["before"] = "before", time.Now().Add(15*time.Second)
		come := sync.OnceFunc(func() { close(c.begun) })
		p := &pressure{read: func() [eviction.Signals]eviction.Level {
			come()
			return c.read()
		}, node: "w1", log: slog.New(slog.DiscardHandler), measure: c.measure, pods: c, told: map[eviction.Signal]time.Time{}, changed: make(chan struct{}, 1), reporter: fake.NewCluster()}
		for range 5 {
			p.look(t.Context())
			sleep(eviction.Interval)
		}
		if c.said() != "" || !p.holds(eviction.Memory) {
			t.Errorf("it evicts another: %s", c.said())
		}
	})
}

// What counts as left is what the kernel says can be had: files that it keeps in memory are no reason to evict pods. F95
func TestMemoryLeft(t *testing.T) {
	total, left, err := memoryOf("MemTotal:       1000 kB\nMemFree:         200 kB\nMemAvailable:    900 kB\nActive(file):    300 kB\nInactive(file):  100 kB\nHugePages_Total:       0\n")
	if err != nil || total != 1000<<10 || left != 900<<10 {
		t.Errorf("%d of %d, %v", left, total, err)
	}
	for _, text := range []string{"", "MemTotal: 1 kB\nMemFree: 1 kB\n", "MemTotal: x kB\nMemAvailable: 1 kB\n"} {
		if _, _, err := memoryOf(text); err == nil {
			t.Errorf("%q is taken", text)
		}
	}
	if total, left, err := memory(); err != nil || total <= 0 || left <= 0 || left > total {
		t.Errorf("of this machine: %d of %d, %v", left, total, err)
	}
}

// A node is short of memory when less than the floor is available, and pods are promised nothing of what the floor keeps.
// F95
func TestMemoryFloor(t *testing.T) {
	total, left, err := memory()
	if err != nil || left < 200*mib {
		t.Skipf("the machine is short of memory itself: %d bytes, %v", left, err)
	}
	for above, short := range map[reservedspace.Amount]bool{{}: false, reservedspace.Bytes(mib): false, reservedspace.Bytes(total - 1): true} {
		cfg, _, _ := fakeConfig("w1", t.TempDir())
		cfg.Runtime, cfg.MemoryFloor = nil, above
		n := newFacts(&cfg).node()
		if got := condition(n, v1.NodeMemoryPressure); (got.Status == v1.ConditionTrue) != short {
			t.Errorf("%s are to be left, %d are: %+v", above, left, got)
		}
		if cfg.memoryOfNode() != total || cfg.checkMemoryFloor(total) != nil {
			t.Errorf("of %d bytes no %s can be left: %v", cfg.memoryOfNode(), cfg.memoryFloor(), cfg.checkMemoryFloor(total))
		}
		const want = "--memory-pressure-below is 100Mi, and the node has 64 MiB of memory"
		if err := cfg.checkMemoryFloor(64 * mib); above == (reservedspace.Amount{}) && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Error(err)
		}
		if got, want := n.Status.Allocatable.Memory().Value(), total-cfg.memoryFloor().BytesOf(total); got != want {
			t.Errorf("pods may have %d, want %d", got, want)
		}
	}
}

// Of a configured capacity pods are promised nothing of what the floor keeps, and the kernel leaves them all of it: else the
// node could not see that they have too much. F95
func TestFloorOfACapacity(t *testing.T) {
	cfg, _, _ := fakeConfig("w1", t.TempDir())
	cfg.Capacity = v1.ResourceList{v1.ResourceMemory: resource.MustParse("1000Mi"), v1.ResourceCPU: resource.MustParse("2")}
	f := newFacts(&cfg)
	n, limits := f.node().Status, f.limits()
	for what, q := range map[string]struct{ got, want int64 }{
		"capacity": {n.Capacity.Memory().Value(), 1000 * mib}, "allocatable": {n.Allocatable.Memory().Value(), 900 * mib},
		"limit": {limits.Memory().Value(), 1000 * mib}, "CPUs": {n.Allocatable.Cpu().Value(), 2}, "limit of CPUs": {limits.Cpu().Value(), 2},
	} {
		if q.got != q.want {
			t.Errorf("%s: %d, want %d", what, q.got, q.want)
		}
	}
	cfg.Capacity = nil
	f = newFacts(&cfg)
	if limits = f.limits(); limits.Memory().Cmp(*f.node().Status.Allocatable.Memory()) != 0 {
		t.Errorf("pods of a machine are held to %s", limits.Memory())
	}
}

// What pods hold of a capacity is what the kernel cannot take back: files that it keeps in memory are not counted, however
// often they were read. F95
func TestHeldOfACapacity(t *testing.T) {
	const stat = "anon 100\nfile 1000\ninactive_file 300\nactive_file 200\nslab_reclaimable 50\nslab_unreclaimable 7\nbroken x\n"
	if got := without(2000, stat, []string{"inactive_file", "active_file", "slab_reclaimable", "broken"}); got != 1450 {
		t.Errorf("%d", got)
	}
	if got := without(400, stat, []string{"inactive_file", "active_file"}); got != 0 {
		t.Errorf("%d: more is kept than used", got)
	}
}

// Of a disk without inodes the pod goes that has most of them, whatever room it takes, and the node says that it is short of disk. F95
func TestInodePressure(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		c := newCrowd(1000*mib, 1000*mib)
		c.capacity[eviction.Inodes] = 1000 * mib // of the crowd all has one floor
		c.pod("large", 0, 0, 0, 500*mib)
		c.pod("many files", 0, 0, 0, 10*mib)
		c.pod("some", 0, 0, 0, 20*mib)
		c.has["many files"] = [eviction.Signals]int64{eviction.Disk: 10 * mib, eviction.Inodes: 900 * mib}
		c.has["some"] = [eviction.Signals]int64{eviction.Disk: 20 * mib, eviction.Inodes: 50 * mib}
		c.records = 1
		p, cluster := c.watch(t)
		cfg, _, _ := fakeConfig("w1", t.TempDir())
		if o := (&facts{cfg: &Config{NodeName: cfg.NodeName}, pressure: p}).machine(); !o.diskShort || o.memoryShort || p.holds(eviction.Disk) {
			t.Errorf("it says %+v", o)
		}
		sleep(2 * time.Minute)
		const want = "0s spare true\n10s images\n20s evict many files: The node was low on resource: inodes. Threshold quantity: 104857600, available: 52428800. " +
			"With its volumes the pod was using 943718400. \n30s spare false"
		if got := c.said(); got != want {
			t.Errorf("%s\nwant\n%s", got, want)
		}
		var metrics strings.Builder
		if err := p.writeMetrics(&metrics); err != nil || !strings.Contains(metrics.String(), "\nkeelson_evictions_total{signal=\"nodefs.inodesFree\"} 1\n") {
			t.Errorf("%v: %s", err, metrics.String())
		}
		if e := strings.Join(cluster.Events("w1"), "\n"); !strings.Contains(e, "EvictionThresholdMet Attempting to reclaim inodes") {
			t.Errorf("events: %s", e)
		}
	})
}

// Which inodes have to be free is a share or a number, by Kubernetes' default a twentieth; none of which no pod could ever leave
// enough. A disk that has no such number is never short of them. F95
func TestInodeFloor(t *testing.T) {
	total, left, err := inodes(t.TempDir())
	if err != nil || left < 1000 {
		t.Skipf("the machine's disk has %d of %d inodes, %v", left, total, err)
	}
	for above, short := range map[reservedspace.Amount]bool{{}: left < total/100*5, reservedspace.Bytes(10): false, reservedspace.Bytes(total - 1): true} {
		cfg, _, _ := fakeConfig("w1", t.TempDir())
		cfg.Runtime, cfg.DiskFloor, cfg.InodeFloor = nil, reservedspace.Bytes(1), above
		if got := condition(newFacts(&cfg).node(), v1.NodeDiskPressure); (got.Status == v1.ConditionTrue) != short {
			t.Errorf("%s are to be free, %d of %d are: %+v", cfg.inodeFloor(), left, total, got)
		}
	}
	var cfg Config
	if err := cfg.checkInodeFloor(1000); err != nil || cfg.inodeFloor().BytesOf(1000) != 50 {
		t.Errorf("%d of 1,000, %v", cfg.inodeFloor().BytesOf(1000), err)
	}
	cfg.InodeFloor = reservedspace.Bytes(1000)
	const want = "--inode-pressure-below is 1000, and the disk of  has 1000 inodes"
	if err := cfg.checkInodeFloor(1000); err == nil || !strings.HasPrefix(err.Error(), want) {
		t.Error(err)
	}
	if l := levels(&Config{StateDir: "/proc"})[eviction.Inodes]; l.Known {
		t.Errorf("of a disk that does not count them: %+v", l)
	}
}

// A disk of which no pod could ever leave enough is refused. F95
func TestFloorAboveTheDisk(t *testing.T) {
	cfg, _, _ := fakeConfig("w1", t.TempDir())
	cfg.DiskFloor = reservedspace.Bytes(20 << 30)
	const want = "--disk-pressure-below is 20Gi, and the disk of "
	if err := cfg.checkDiskFloor(16 << 30); err == nil || !strings.HasPrefix(err.Error(), want) {
		t.Error(err)
	}
	if err := cfg.checkDiskFloor(21 << 30); err != nil {
		t.Error(err)
	}
	if cfg.DiskFloor = (reservedspace.Amount{}); cfg.checkDiskFloor(1<<30) != nil {
		t.Error(cfg.checkDiskFloor(1 << 30))
	}
}
