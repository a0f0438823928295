package pod

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent/pod/podfiles"
	"keelson.dev/keelson/internal/virtual"
)

// amounts parses resources such as "cpu=1 memory=1Gi".
func amounts(text string) v1.ResourceList {
	l := v1.ResourceList{}
	for _, f := range strings.Fields(text) {
		name, q, _ := strings.Cut(f, "=")
		l[v1.ResourceName(name)] = resource.MustParse(q)
	}
	return l
}

// sized returns a pod with one container and the given requests and limits.
func sized(uid string, requests, limits string) *v1.Pod {
	p := simplePod(uid)
	p.Generation = 1
	p.Spec.Containers[0].Resources = v1.ResourceRequirements{Requests: amounts(requests), Limits: amounts(limits)}
	return p
}

// resizePod changes the requests and limits of the pod's spec.
func (n *node) resizePod(uid types.UID, requests, limits string) {
	n.t.Helper()
	p := n.reportedPod(uid).DeepCopy()
	p.Generation++
	p.Spec.Containers[0].Resources = v1.ResourceRequirements{Requests: amounts(requests), Limits: amounts(limits)}
	n.cluster.Put(p)
}

// resizeSummary formats the resize conditions and resources of a pod's status.
func resizeSummary(p *v1.Pod) string {
	cs := p.Status.ContainerStatuses[0]
	out := fmt.Sprintf("allocated %s has %s restarts %d seen %d", cs.AllocatedResources.Cpu(),
		cs.Resources.Limits.Memory(), cs.RestartCount, p.Status.ObservedGeneration)
	for _, c := range p.Status.Conditions {
		if c.Type == v1.PodResizePending || c.Type == v1.PodResizeInProgress {
			out += fmt.Sprintf(" %s %s@%d", c.Type, c.Reason, c.ObservedGeneration)
		}
	}
	return out
}

func (n *node) expectResize(uid types.UID, want string) {
	n.t.Helper()
	virtual.Wait()
	if err := n.cluster.Await(n.t.Context(), want, func() bool {
		return resizeSummary(n.reportedPod(uid)) == want
	}); err != nil {
		n.t.Errorf("%s: it says %q, want %q", uid, resizeSummary(n.reportedPod(uid)), want)
	}
}

// newNodeObject returns a node with 4 CPUs and 4Gi of memory.
func newNodeObject(t *testing.T) *node {
	n := newNode(t)
	n.cfg.Node = func() *v1.Node {
		return &v1.Node{Status: v1.NodeStatus{Capacity: amounts("cpu=4 memory=4Gi"),
			Allocatable: amounts("cpu=4 memory=4Gi pods=10")}}
	}
	return n
}

// withRunningPod calls do with a node on which pod u1 runs.
func withRunningPod(t *testing.T, p *v1.Pod, do func(*testing.T, *node)) {
	virtual.Test(t, func(t *testing.T) {
		n := newNodeObject(t)
		n.startAgent()
		defer func() { n.stop() }()
		n.cluster.Put(p)
		n.expectStatus("u1", running)
		do(t, n)
	})
}

// expectLimits fails unless the pod's cgroup has these limits.
func (n *node) expectLimits(uid types.UID, memory, quota int64) {
	n.t.Helper()
	if l := n.rt.PodLimits(uid); l.MemoryLimitInBytes != memory || l.CpuQuota != quota {
		n.t.Errorf("the pod's cgroup has %v", l)
	}
}

// A resize is granted, done without a restart, reported, and known to the next agent process. A
// resize that does not fit waits for another pod's end. An infeasible one is reported and forgotten
// when it is reverted.
func TestResizeLifeCycle(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNodeObject(t)
		n.startAgent()
		defer func() { n.stop() }()
		n.cluster.Put(sized("u1", "cpu=1 memory=64Mi", "cpu=1 memory=64Mi"))
		n.cluster.Put(sized("u2", "cpu=2 memory=64Mi", "cpu=2 memory=64Mi"))
		n.expectResize("u2", "allocated 2 has 64Mi restarts 0 seen 1")
		n.expectResize("u1", "allocated 1 has 64Mi restarts 0 seen 1")
		n.resizePod("u1", "cpu=2 memory=128Mi", "cpu=2 memory=128Mi")
		n.expectResize("u1", "allocated 2 has 128Mi restarts 0 seen 2")
		n.expectLimits("u1", 128<<20, 200_000)
		n.resizePod("u1", "cpu=3 memory=128Mi", "cpu=3 memory=128Mi")
		n.expectResize("u1", "allocated 2 has 128Mi restarts 0 seen 3 PodResizePending Deferred@3")
		n.stop()
		n.startAgent()
		n.expectResize("u1", "allocated 2 has 128Mi restarts 0 seen 3 PodResizePending Deferred@3")
		n.cluster.Delete(n.reportedPod("u2"))
		n.expectResize("u1", "allocated 3 has 128Mi restarts 0 seen 3")
		n.resizePod("u1", "cpu=9 memory=128Mi", "cpu=9 memory=128Mi")
		n.expectResize("u1", "allocated 3 has 128Mi restarts 0 seen 4 PodResizePending Infeasible@4")
		n.resizePod("u1", "cpu=1 memory=64Mi", "cpu=1 memory=64Mi")
		n.expectResize("u1", "allocated 1 has 64Mi restarts 0 seen 5")
		var reasons []string
		for _, e := range n.cluster.Events("u1") {
			reason, _, _ := strings.Cut(e, " ")
			if strings.HasPrefix(reason, "Resize") {
				reasons = append(reasons, reason)
			}
		}
		if want := []string{"ResizeStarted", "ResizeCompleted", "ResizeDeferred", "ResizeDeferred", "ResizeStarted",
			"ResizeCompleted", "ResizeInfeasible",
			"ResizeStarted", "ResizeCompleted"}; !slices.Equal(reasons, want) {
			t.Errorf("events %v", reasons)
		}
	})
}

// Memory in use is not taken away: the resize stays in progress with the reason, and ends when it
// is reverted.
func TestMemoryInUseIsToldAndRetried(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNodeObject(t)
		n.rt.InUse = map[string]int64{"app": 100 << 20}
		n.startAgent()
		defer func() { n.stop() }()
		n.cluster.Put(sized("u1", "cpu=1 memory=200Mi", "cpu=1 memory=200Mi"))
		n.expectStatus("u1", running)
		n.resizePod("u1", "cpu=1 memory=50Mi", "cpu=1 memory=50Mi")
		n.expectResize("u1", "allocated 1 has 200Mi restarts 0 seen 2 PodResizeInProgress Error@2")
		for _, c := range n.reportedPod("u1").Status.Conditions {
			if c.Type == v1.PodResizeInProgress && !strings.Contains(c.Message, "below current usage") {
				t.Errorf("condition %+v", c)
			}
		}
		if l := n.rt.PodLimits("u1"); l.MemoryLimitInBytes != 200<<20 {
			t.Errorf("the pod has %d bytes while its container has 200Mi", l.MemoryLimitInBytes)
		}
		n.resizePod("u1", "cpu=1 memory=150Mi", "cpu=1 memory=150Mi")
		n.expectResize("u1", "allocated 1 has 150Mi restarts 0 seen 3")
	})
}

// A container with the resize policy RestartContainer is restarted at once, whatever its exit code.
func TestResizeRestartsWherePolicySays(t *testing.T) {
	p := sized("u1", "cpu=1 memory=64Mi", "cpu=1 memory=64Mi")
	p.Spec.RestartPolicy = v1.RestartPolicyOnFailure
	p.Spec.Containers[0].ResizePolicy = []v1.ContainerResizePolicy{{ResourceName: v1.ResourceMemory,
		RestartPolicy: v1.RestartContainer}}
	withRunningPod(t, p, func(t *testing.T, n *node) {
		n.resizePod("u1", "cpu=2 memory=64Mi", "cpu=2 memory=64Mi")
		n.expectResize("u1", "allocated 2 has 64Mi restarts 0 seen 2")
		n.resizePod("u1", "cpu=2 memory=128Mi", "cpu=2 memory=128Mi")
		n.expectResize("u1", "allocated 2 has 128Mi restarts 1 seen 3")
		n.expectLimits("u1", 128<<20, 200_000)
		if !slices.ContainsFunc(n.cluster.Events("u1"), func(e string) bool {
			return strings.Contains(e, "Container app resize requires restart")
		}) {
			t.Errorf("events %q", n.cluster.Events("u1"))
		}
	})
}

// An agent restarted during a resize continues it. A resize requested while no agent ran is granted
// by the next agent.
func TestResizeOutlivesTheAgent(t *testing.T) {
	withRunningPod(t, sized("u1", "cpu=1 memory=64Mi", "cpu=1 memory=64Mi"), func(t *testing.T, n *node) {
		n.rt.Delay("UpdateContainerResources", time.Hour)
		n.resizePod("u1", "cpu=2 memory=128Mi", "cpu=2 memory=128Mi")
		n.expectResize("u1", "allocated 2 has 64Mi restarts 0 seen 2 PodResizeInProgress @2")
		n.stop()
		n.rt.Delay("UpdateContainerResources", 0)
		n.startAgent()
		n.expectResize("u1", "allocated 2 has 128Mi restarts 0 seen 2")
		n.stop()
		n.resizePod("u1", "cpu=3 memory=128Mi", "cpu=3 memory=128Mi")
		n.startAgent()
		n.expectResize("u1", "allocated 3 has 128Mi restarts 0 seen 3")
	})
}

// While an earlier release without resize support runs, a pod's spec may be resized. The next agent
// finds no grant record and grants the requested resources.
func TestResizeMissedByAnOlderAgent(t *testing.T) {
	withRunningPod(t, sized("u1", "cpu=1 memory=64Mi", "cpu=1 memory=64Mi"), func(t *testing.T, n *node) {
		n.stop()
		if err := os.Remove(filepath.Join(n.cfg.Paths.State, "pods", "u1", podfiles.GrantFile)); err != nil {
			t.Fatal(err)
		}
		n.resizePod("u1", "cpu=2 memory=128Mi", "cpu=2 memory=128Mi")
		n.startAgent()
		n.expectResize("u1", "allocated 2 has 128Mi restarts 0 seen 2")
		n.expectLimits("u1", 128<<20, 200_000)
	})
}

// F129: the resources of a whole pod are reported, resized in place, and known to the next agent
// process. A container without limits of its own gets those of the pod.
func TestPodLevelResize(t *testing.T) {
	podLevel := func(text string) *v1.ResourceRequirements {
		return &v1.ResourceRequirements{Requests: amounts(text), Limits: amounts(text)}
	}
	p := simplePod("u1")
	p.Generation, p.Spec.Resources = 1, podLevel("cpu=1 memory=64Mi")
	withRunningPod(t, p, func(t *testing.T, n *node) {
		expect := func(allocated, actual string, generation int64) {
			t.Helper()
			virtual.Wait()
			want := fmt.Sprintf("allocated %s has %s at %d", allocated, actual, generation)
			got := func() string {
				s := n.reportedPod("u1").Status
				if s.Resources == nil {
					return "no resources"
				}
				return fmt.Sprintf("allocated %s has %s at %d", s.AllocatedResources.Cpu(), s.Resources.Limits.Memory(),
					s.ObservedGeneration)
			}
			if err := n.cluster.Await(n.t.Context(), want, func() bool { return got() == want }); err != nil {
				t.Errorf("it says %q, want %q", got(), want)
			}
		}
		resize := func(text string) {
			p := n.reportedPod("u1").DeepCopy()
			p.Generation++
			p.Spec.Resources = podLevel(text)
			n.cluster.Put(p)
		}
		expect("1", "64Mi", 1)
		n.expectLimits("u1", 64<<20, 100_000)
		n.rt.Delay("UpdateContainerResources", time.Hour)
		resize("cpu=2 memory=128Mi")
		expect("2", "64Mi", 2)
		n.stop()
		n.rt.Delay("UpdateContainerResources", 0)
		n.startAgent()
		expect("2", "128Mi", 2)
		n.expectLimits("u1", 128<<20, 200_000)
		resize("cpu=9 memory=128Mi")
		expect("2", "128Mi", 3)
		if !slices.ContainsFunc(n.reportedPod("u1").Status.Conditions, func(c v1.PodCondition) bool {
			return c.Type == v1.PodResizePending && c.Reason == v1.PodReasonInfeasible
		}) {
			t.Errorf("conditions %+v", n.reportedPod("u1").Status.Conditions)
		}
		if cs := n.reportedPod("u1").Status.ContainerStatuses[0]; cs.RestartCount != 0 {
			t.Errorf("the container was restarted %d times", cs.RestartCount)
		}
	})
}
