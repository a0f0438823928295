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
	"pgregory.net/rapid"

	"keelson.dev/keelson/agent"
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

// The node grants available resources, waits for those of other pods, and never exceeds its
// capacity.
func TestGrant(t *testing.T) {
	node := &v1.Node{Status: v1.NodeStatus{Allocatable: amounts("cpu=4 memory=4Gi")}}
	shrinking := sized("o3", "cpu=500m memory=1Gi", "")
	shrinking.Status.ContainerStatuses = []v1.ContainerStatus{{Name: "app", Resources: &v1.ResourceRequirements{Requests: amounts("cpu=2 memory=1Gi")}}}
	for _, c := range []struct {
		name, has, want string
		others          []*v1.Pod
		node            *v1.Node
		reason, message string
	}{
		{"alone on its node", "cpu=1 memory=1Gi", "cpu=4 memory=4Gi", nil, node, "", ""},
		{"more than the node", "cpu=1 memory=1Gi", "cpu=5 memory=1Gi", nil, node, "Infeasible", "Node didn't have enough capacity: cpu, requested: 5000, capacity: 4000"},
		{"more memory than the node", "cpu=1 memory=1Gi", "cpu=5 memory=5Gi", nil, node, "Infeasible", "Node didn't have enough capacity: memory, requested: 5368709120, capacity: 4294967296"},
		{"another has it", "cpu=1 memory=1Gi", "cpu=3 memory=1Gi", []*v1.Pod{sized("o1", "cpu=2 memory=1Gi", "")}, node,
			"Deferred", "Node didn't have enough resource: cpu, requested: 3000, used: 2000, capacity: 4000"},
		{"beside another", "cpu=1 memory=1Gi", "cpu=2 memory=1Gi", []*v1.Pod{sized("o1", "cpu=2 memory=1Gi", "")}, node, "", ""},
		{"another shrinks and is not done", "cpu=1 memory=1Gi", "cpu=3 memory=1Gi", []*v1.Pod{shrinking}, node,
			"Deferred", "Node didn't have enough resource: cpu, requested: 3000, used: 2000, capacity: 4000"},
		{"less, on a node that has become too small", "cpu=3 memory=1Gi", "cpu=2 memory=1Gi", []*v1.Pod{sized("o1", "cpu=3 memory=1Gi", "")}, node, "", ""},
		{"less CPU and more memory there", "cpu=3 memory=1Gi", "cpu=2 memory=2Gi", []*v1.Pod{sized("o1", "cpu=3 memory=1Gi", "")}, node, "", ""},
	} {
		reason, message := Grant(sized("u1", c.want, ""), sized("u1", c.has, ""), c.others, c.node)
		if reason != c.reason || message != c.message {
			t.Errorf("%s: %q %q", c.name, reason, message)
		}
	}
}

// limited returns a running container with the limits of the pod's spec.
func limited(p *v1.Pod, name string) Container {
	return Container{ID: name + "-0", Name: name, Sandbox: "sb", State: Running, Hash: specHash(containerSpec(p, name)), Delay: noDelay,
		Limits: containerResources(p, containerSpec(p, name), 8<<30)}
}

// During a resize, the pod's cgroup always has room for the present and the new limits of its
// containers, whatever the interrupted state. At the end it has the granted limits.
func TestPodGrowsFirstAndShrinksLast(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		draw := func(label string) *v1.Pod {
			p := simplePod("u1", v1.Container{Name: "a", Image: "i"}, v1.Container{Name: "b", Image: "i"})
			for i := range p.Spec.Containers {
				r := &p.Spec.Containers[i].Resources
				cpu, memory := rapid.Int64Range(1, 40).Draw(rt, label), rapid.Int64Range(8, 512).Draw(rt, label)
				r.Requests = amounts(fmt.Sprintf("cpu=%dm memory=%dMi", cpu*50, memory))
				r.Limits = amounts(fmt.Sprintf("cpu=%dm memory=%dMi", cpu*100, memory))
			}
			p.Status.QOSClass = v1.PodQOSBurstable
			return p
		}
		before, after := draw("before"), draw("after")
		o := &Observed{Resize: Resize{Open: true, Memory: 8 << 30}}
		for _, name := range []string{"a", "b"} {
			has := before
			if rapid.Bool().Draw(rt, "done") {
				has = after
			}
			o.Containers = append(o.Containers, limited(has, name))
		}
		for round := 0; ; round++ {
			p := planResize(after, o)
			var memory, quota int64
			for _, c := range o.Containers {
				to := containerResources(after, containerSpec(after, c.Name), 8<<30)
				memory += max(c.Limits.MemoryLimitInBytes, to.MemoryLimitInBytes)
				quota += max(c.Limits.CpuQuota, to.CpuQuota)
			}
			if p.During.MemoryLimitInBytes < memory || p.During.CpuQuota < quota {
				rt.Fatalf("the pod allows %d bytes and %d µs, its containers %d and %d", p.During.MemoryLimitInBytes, p.During.CpuQuota, memory, quota)
			}
			if len(p.Update) == 0 {
				if !sameLimits(p.During, p.Target) || !sameLimits(p.Target, podResources(after)) {
					rt.Fatalf("in the end the pod has %v, want %v", p.During, podResources(after))
				}
				return
			}
			if round > 2 {
				rt.Fatalf("still to do: %v", p.Update)
			}
			for i := range o.Containers { // in any combination, as after a crash
				if u := p.Update[0]; o.Containers[i].ID == u.ID {
					o.Containers[i].Limits = u.To
				}
			}
		}
	})
}

// Containers are shrunk before others grow. While a container has no limit yet, the pod has none
// either. The resize policy decides about restarts.
func TestPlanOfAResize(t *testing.T) {
	before, after := sized("u1", "cpu=100m memory=64Mi", "cpu=200m memory=64Mi"), sized("u1", "cpu=200m memory=128Mi", "cpu=400m memory=128Mi")
	for _, p := range []*v1.Pod{before, after} {
		p.Spec.Containers = append(p.Spec.Containers, *p.Spec.Containers[0].DeepCopy())
		p.Spec.Containers[1].Name = "other"
		p.Status.QOSClass = v1.PodQOSBurstable
	}
	after.Spec.Containers[1].Resources = v1.ResourceRequirements{Requests: amounts("cpu=50m memory=32Mi"), Limits: amounts("cpu=100m memory=32Mi")}
	o := &Observed{Resize: Resize{Open: true, Memory: 8 << 30}, Containers: []Container{limited(before, "app"), limited(before, "other")}}
	var order []string
	for _, u := range planResize(after, o).Update {
		order = append(order, u.Name)
	}
	if !slices.Equal(order, []string{"other", "app"}) {
		t.Errorf("order %v", order)
	}
	o.Containers[0].Limits.MemoryLimitInBytes = 0
	if p := planResize(after, o); p.During.MemoryLimitInBytes != 0 || p.Target.MemoryLimitInBytes != 160<<20 {
		t.Errorf("beside a container without a limit: %v, then %v", p.During, p.Target)
	}
	for _, c := range []struct {
		policy  v1.ResourceName
		changes string // requested changes
		restart bool
	}{
		{v1.ResourceCPU, "cpu=150m memory=64Mi", true}, {v1.ResourceCPU, "cpu=100m memory=32Mi", false},
		{v1.ResourceMemory, "cpu=150m memory=64Mi", false}, {v1.ResourceMemory, "cpu=100m memory=32Mi", true},
	} {
		has, want := sized("u1", "cpu=100m memory=64Mi", "cpu=200m memory=128Mi"), sized("u1", c.changes, "cpu=200m memory=128Mi")
		want.Spec.Containers[0].ResizePolicy = []v1.ContainerResizePolicy{{ResourceName: c.policy, RestartPolicy: v1.RestartContainer}}
		has.Status.QOSClass, want.Status.QOSClass = v1.PodQOSBurstable, v1.PodQOSBurstable
		o := &Observed{Resize: Resize{Open: true, Memory: 100 << 20}, Containers: []Container{{ID: "a", Name: "app", State: Running,
			Limits: containerResources(has, &has.Spec.Containers[0], 100<<20)}}}
		if got := len(planResize(want, o).Restart) == 1; got != c.restart {
			t.Errorf("restart for %s, asked for %s: %v", c.policy, c.changes, got)
		}
	}
}

// resizes changes the requests and limits of the pod's spec.
func (n *node) resizes(uid types.UID, requests, limits string) {
	n.t.Helper()
	p := n.pod(uid).DeepCopy()
	p.Generation++
	p.Spec.Containers[0].Resources = v1.ResourceRequirements{Requests: amounts(requests), Limits: amounts(limits)}
	n.cluster.Put(p)
}

// tellsOf formats the resize conditions and resources of a pod's status.
func tellsOf(p *v1.Pod) string {
	cs := p.Status.ContainerStatuses[0]
	out := fmt.Sprintf("allocated %s has %s restarts %d seen %d", cs.AllocatedResources.Cpu(), cs.Resources.Limits.Memory(), cs.RestartCount, p.Status.ObservedGeneration)
	for _, c := range p.Status.Conditions {
		if c.Type == v1.PodResizePending || c.Type == v1.PodResizeInProgress {
			out += fmt.Sprintf(" %s %s@%d", c.Type, c.Reason, c.ObservedGeneration)
		}
	}
	return out
}

func (n *node) tells(uid types.UID, want string) {
	n.t.Helper()
	virtual.Wait()
	if err := n.cluster.Await(n.t.Context(), want, func() bool { return tellsOf(n.pod(uid)) == want }); err != nil {
		n.t.Errorf("%s: it says %q, want %q", uid, tellsOf(n.pod(uid)), want)
	}
}

// nodeOf returns a node with 4 CPUs and 4Gi of memory.
func nodeOf(t *testing.T) *node {
	n := newNode(t)
	n.cfg.Node = func() *v1.Node {
		return &v1.Node{Status: v1.NodeStatus{Capacity: amounts("cpu=4 memory=4Gi"), Allocatable: amounts("cpu=4 memory=4Gi pods=10")}}
	}
	return n
}

// onRunning calls do with a node on which pod u1 runs.
func onRunning(t *testing.T, p *v1.Pod, do func(*testing.T, *node)) {
	virtual.Test(t, func(t *testing.T) {
		n := nodeOf(t)
		n.start()
		defer func() { n.stop() }()
		n.cluster.Put(p)
		n.is("u1", running)
		do(t, n)
	})
}

// limitedTo fails unless the pod's cgroup has these limits.
func (n *node) limitedTo(uid types.UID, memory, quota int64) {
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
		n := nodeOf(t)
		n.start()
		defer func() { n.stop() }()
		n.cluster.Put(sized("u1", "cpu=1 memory=64Mi", "cpu=1 memory=64Mi"))
		n.cluster.Put(sized("u2", "cpu=2 memory=64Mi", "cpu=2 memory=64Mi"))
		n.tells("u2", "allocated 2 has 64Mi restarts 0 seen 1")
		n.tells("u1", "allocated 1 has 64Mi restarts 0 seen 1")
		n.resizes("u1", "cpu=2 memory=128Mi", "cpu=2 memory=128Mi")
		n.tells("u1", "allocated 2 has 128Mi restarts 0 seen 2")
		n.limitedTo("u1", 128<<20, 200_000)
		n.resizes("u1", "cpu=3 memory=128Mi", "cpu=3 memory=128Mi")
		n.tells("u1", "allocated 2 has 128Mi restarts 0 seen 3 PodResizePending Deferred@3")
		n.stop()
		n.start()
		n.tells("u1", "allocated 2 has 128Mi restarts 0 seen 3 PodResizePending Deferred@3")
		n.cluster.Delete(n.pod("u2"))
		n.tells("u1", "allocated 3 has 128Mi restarts 0 seen 3")
		n.resizes("u1", "cpu=9 memory=128Mi", "cpu=9 memory=128Mi")
		n.tells("u1", "allocated 3 has 128Mi restarts 0 seen 4 PodResizePending Infeasible@4")
		n.resizes("u1", "cpu=1 memory=64Mi", "cpu=1 memory=64Mi")
		n.tells("u1", "allocated 1 has 64Mi restarts 0 seen 5")
		var reasons []string
		for _, e := range n.cluster.Events("u1") {
			reason, _, _ := strings.Cut(e, " ")
			if strings.HasPrefix(reason, "Resize") {
				reasons = append(reasons, reason)
			}
		}
		if want := []string{"ResizeStarted", "ResizeCompleted", "ResizeDeferred", "ResizeDeferred", "ResizeStarted", "ResizeCompleted", "ResizeInfeasible",
			"ResizeStarted", "ResizeCompleted"}; !slices.Equal(reasons, want) {
			t.Errorf("events %v", reasons)
		}
	})
}

// Memory in use is not taken away: the resize stays in progress with the reason, and ends when it
// is reverted.
func TestMemoryInUseIsToldAndRetried(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := nodeOf(t)
		n.rt.InUse = map[string]int64{"app": 100 << 20}
		n.start()
		defer func() { n.stop() }()
		n.cluster.Put(sized("u1", "cpu=1 memory=200Mi", "cpu=1 memory=200Mi"))
		n.is("u1", running)
		n.resizes("u1", "cpu=1 memory=50Mi", "cpu=1 memory=50Mi")
		n.tells("u1", "allocated 1 has 200Mi restarts 0 seen 2 PodResizeInProgress Error@2")
		for _, c := range n.pod("u1").Status.Conditions {
			if c.Type == v1.PodResizeInProgress && !strings.Contains(c.Message, "below current usage") {
				t.Errorf("condition %+v", c)
			}
		}
		if l := n.rt.PodLimits("u1"); l.MemoryLimitInBytes != 200<<20 {
			t.Errorf("the pod has %d bytes while its container has 200Mi", l.MemoryLimitInBytes)
		}
		n.resizes("u1", "cpu=1 memory=150Mi", "cpu=1 memory=150Mi")
		n.tells("u1", "allocated 1 has 150Mi restarts 0 seen 3")
	})
}

// A container with the resize policy RestartContainer is restarted at once, whatever its exit code.
func TestResizeRestartsWherePolicySays(t *testing.T) {
	p := sized("u1", "cpu=1 memory=64Mi", "cpu=1 memory=64Mi")
	p.Spec.RestartPolicy = v1.RestartPolicyOnFailure
	p.Spec.Containers[0].ResizePolicy = []v1.ContainerResizePolicy{{ResourceName: v1.ResourceMemory, RestartPolicy: v1.RestartContainer}}
	onRunning(t, p, func(t *testing.T, n *node) {
		n.resizes("u1", "cpu=2 memory=64Mi", "cpu=2 memory=64Mi")
		n.tells("u1", "allocated 2 has 64Mi restarts 0 seen 2")
		n.resizes("u1", "cpu=2 memory=128Mi", "cpu=2 memory=128Mi")
		n.tells("u1", "allocated 2 has 128Mi restarts 1 seen 3")
		n.limitedTo("u1", 128<<20, 200_000)
		if !slices.ContainsFunc(n.cluster.Events("u1"), func(e string) bool { return strings.Contains(e, "Container app resize requires restart") }) {
			t.Errorf("events %q", n.cluster.Events("u1"))
		}
	})
}

// An agent restarted during a resize continues it. A resize requested while no agent ran is granted
// by the next agent.
func TestResizeOutlivesTheAgent(t *testing.T) {
	onRunning(t, sized("u1", "cpu=1 memory=64Mi", "cpu=1 memory=64Mi"), func(t *testing.T, n *node) {
		n.rt.Delay("UpdateContainerResources", time.Hour)
		n.resizes("u1", "cpu=2 memory=128Mi", "cpu=2 memory=128Mi")
		n.tells("u1", "allocated 2 has 64Mi restarts 0 seen 2 PodResizeInProgress @2")
		n.stop()
		n.rt.Delay("UpdateContainerResources", 0)
		n.start()
		n.tells("u1", "allocated 2 has 128Mi restarts 0 seen 2")
		n.stop()
		n.resizes("u1", "cpu=3 memory=128Mi", "cpu=3 memory=128Mi")
		n.start()
		n.tells("u1", "allocated 3 has 128Mi restarts 0 seen 3")
	})
}

// While an earlier release without resize support runs, a pod's spec may be resized. The next agent
// finds no grant record and grants the requested resources.
func TestResizeMissedByAnOlderAgent(t *testing.T) {
	onRunning(t, sized("u1", "cpu=1 memory=64Mi", "cpu=1 memory=64Mi"), func(t *testing.T, n *node) {
		n.stop()
		if err := os.Remove(filepath.Join(n.cfg.Paths.State, "pods", "u1", grantFile)); err != nil {
			t.Fatal(err)
		}
		n.resizes("u1", "cpu=2 memory=128Mi", "cpu=2 memory=128Mi")
		n.start()
		n.tells("u1", "allocated 2 has 128Mi restarts 0 seen 2")
		n.limitedTo("u1", 128<<20, 200_000)
	})
}

// Fields of the grant record are matched by name: unknown ones are skipped. An invalid record is
// ignored, and without one the pod has the resources of its spec.
func TestGrantOnDisk(t *testing.T) {
	paths := agent.Paths{State: t.TempDir()}
	p := sized("u1", "cpu=1 memory=64Mi", "cpu=2 memory=64Mi")
	if g, found, err := loadGrant(paths, p); found || err != nil || !g.covers(p) || !g.Settled {
		t.Errorf("without a record: %v %v %v", g, found, err)
	}
	old := grantOf(sized("u1", "cpu=500m memory=64Mi", "cpu=1 memory=64Mi"))
	if err := saveGrant(paths, p, old); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(paths.State, "pods", "u1", grantFile)
	g, found, err := loadGrant(paths, p)
	if !found || err != nil || g.covers(p) || g.of(p).Spec.Containers[0].Resources.Requests.Cpu().String() != "500m" || p.Spec.Containers[0].Resources.Requests.Cpu().String() != "1" {
		t.Errorf("%v %v %v", g, found, err)
	}
	const other = `{"version":9,"generation":3,"later":{"a":[1]},"containers":{"app":{"requests":{"cpu":"250m"}},"gone":{}},"settled":true}`
	if err := os.WriteFile(file, []byte(other), 0o600); err != nil {
		t.Fatal(err)
	}
	if g, found, err = loadGrant(paths, p); !found || err != nil || g.Generation != 3 || g.of(p).Spec.Containers[0].Resources.Requests.Cpu().String() != "250m" {
		t.Errorf("of a later release: %v %v %v", g, found, err)
	}
	for name, text := range map[string]string{"torn": other[:40], "empty": "", "huge": strings.Repeat(" ", grantLimit+1)} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if g, found, err = loadGrant(paths, p); found || err == nil || !g.covers(p) {
			t.Errorf("%s: %v %v %v", name, g, found, err)
		}
	}
}
