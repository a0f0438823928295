package node

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent/eviction"
	"keelson.dev/keelson/internal/reservedspace"
)

// newWriter returns a container that fills a folder and keeps running.
func newWriter(dir, mebibytes string) v1.Container {
	c := newShell("app", "/bin/busybox dd if=/dev/zero of="+dir+"/file bs=1048576 count="+mebibytes+
		" 2>/dev/null; exec /bin/busybox sleep 1000")
	c.VolumeMounts = []v1.VolumeMount{{Name: "data", MountPath: dir}}
	return c
}

func newFillingPod(uid string, medium v1.StorageMedium, mebibytes string) *v1.Pod {
	p := realPod(uid, newWriter("/data", mebibytes))
	p.Spec.Volumes = []v1.Volume{{Name: "data",
		VolumeSource: v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{Medium: medium}}}}
	return p
}

func (b *testNode) expectEvicted(uid string, short v1.ResourceName) {
	b.t.Helper()
	got := b.awaitPod("its eviction", types.UID(uid), func(p *v1.Pod) bool { return p.Status.Phase == v1.PodFailed })
	target := slices.ContainsFunc(got.Status.Conditions, func(c v1.PodCondition) bool {
		return c.Type == v1.DisruptionTarget && c.Status == v1.ConditionTrue
	})
	if want := "The node was low on resource: " + string(short) + ". Threshold quantity: "; got.Status.Reason !=
		"Evicted" || !strings.HasPrefix(got.Status.Message, want) || !target {
		b.t.Errorf("%s: %+v", uid, got.Status)
	}
	b.t.Logf("%s: %s", uid, got.Status.Message)
}

func (b *testNode) expectPressure(c v1.NodeConditionType) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.t.Context(), time.Minute)
	defer cancel()
	if err := b.cluster.Await(ctx, string(c), func() bool {
		n := b.cluster.NodeFacts()
		return n != nil && condition(n, c).Status == v1.ConditionTrue
	}); err != nil {
		b.t.Error(err)
	}
}

// expectStays waits until the node has completed another check, and expects that the pod still
// exists.
func (b *testNode) expectStays(uid string, s eviction.Signal) {
	b.t.Helper()
	select {
	case <-b.looks: // a previous one
	default:
	}
	for range 2 { // the first check has completed when the second one is seen
		select {
		case <-b.looks:
		case <-time.After(time.Minute):
			b.t.Fatal("nobody looks at the node")
		}
	}
	if l := readLevels(&b.cfg)[s]; l.IsShort() {
		b.t.Errorf("the node is still short: %+v", l)
	}
	if p, _ := b.cluster.Pod(types.UID(uid)); !isReady(p) {
		b.t.Errorf("%s: %+v", uid, p.Status)
	}
}

// Under memory pressure a node evicts the pod that exceeds its request most, and admits no more
// such pods. A pod within its request stays, also with the next agent. F95
func TestRealMemoryPressure(t *testing.T) {
	t.Parallel()
	b := newTestNode(t)
	b.stop()
	b.cfg.Node.Capacity = v1.ResourceList{v1.ResourceMemory: resource.MustParse("400Mi"),
		v1.ResourceCPU: resource.MustParse("2")}
	b.cfg.Node.MemoryFloor = reservedspace.Bytes(300 << 20)
	b.startAgent()
	asks := v1.ResourceList{v1.ResourceMemory: resource.MustParse("64Mi"), v1.ResourceCPU: resource.MustParse("100m")}
	keep := newFillingPod("keep", v1.StorageMediumMemory, "16")
	keep.Spec.Containers[0].Resources = v1.ResourceRequirements{Requests: asks, Limits: asks}
	b.cluster.Put(keep)
	b.awaitPod("Ready", "keep", isReady)
	b.cluster.Put(newFillingPod("greedy", v1.StorageMediumMemory, "150"))
	b.expectEvicted("greedy", v1.ResourceMemory)
	b.expectPressure(v1.NodeMemoryPressure)
	b.cluster.Put(realPod("late", newShell("app", "exec /bin/busybox sleep 1000")))
	if got := b.awaitPod("its refusal", "late", func(p *v1.Pod) bool {
		return p.Status.Phase == v1.PodFailed
	}); got.Status.Reason != "Evicted" ||
		got.Status.Message != "Pod was rejected: The node had condition: [MemoryPressure]. " ||
		len(got.Status.ContainerStatuses) != 0 {
		t.Errorf("%+v", got.Status)
	}
	b.expectStays("keep", eviction.Memory)
	b.stop()
	b.startAgent()
	b.awaitPod("Ready", "keep", isReady)
	b.expectEvicted("greedy", v1.ResourceMemory)
}

// On a full disk, data of exited containers is removed first. If that is not enough, the pod that
// exceeds its request most is evicted, even without a limit. F95
func TestRealDiskPressure(t *testing.T) {
	t.Parallel()
	b := newTestNode(t)
	b.stop()
	if err := unix.Mount("tmpfs", b.cfg.Dirs.State, "tmpfs", 0, "size=256m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(b.cfg.Dirs.State, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	b.cfg.Node.DiskFloor = reservedspace.Bytes(100 << 20)
	b.startAgent()
	ended := realPod("ended", newShell("app", "/bin/busybox dd if=/dev/zero of=/file bs=1048576 count=80 2>/dev/null"))
	ended.Spec.RestartPolicy = v1.RestartPolicyNever
	b.cluster.Put(ended, newFillingPod("keep", v1.StorageMediumDefault, "10"))
	b.awaitPod("Succeeded", "ended", func(p *v1.Pod) bool { return p.Status.Phase == v1.PodSucceeded })
	b.awaitPod("Ready", "keep", isReady)
	layers := func() (n int) {
		all, err := filepath.Glob(filepath.Join(b.cfg.Dirs.State, "images", "containers", "*"))
		if err != nil {
			t.Fatal(err)
		}
		return len(all)
	}
	before := layers()
	// together with the exited container's data it is too much
	b.cluster.Put(newFillingPod("some", v1.StorageMediumDefault, "70"))
	b.awaitPod("Ready", "some", isReady)
	b.expectPressure(v1.NodeDiskPressure)
	b.expectStays("some", eviction.Disk)
	if n := layers(); n != before {
		t.Errorf("%d layers of containers, want %d: that of the one that ended is there", n, before)
	}
	if p, _ := b.cluster.Pod("ended"); p.Status.Phase != v1.PodSucceeded || len(p.Status.ContainerStatuses) != 1 {
		t.Errorf("the status of the ended pod is %+v", p.Status)
	}
	if err := os.WriteFile(filepath.Join(b.cfg.Dirs.State, "somebody-else"), make([]byte, 90<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	b.expectEvicted("some", v1.ResourceEphemeralStorage)
	b.expectStays("keep", eviction.Disk)
}
