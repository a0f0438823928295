package e2e

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/test/testenv"
)

// findCgroup returns a pod's cgroup in a hierarchy of this machine; controller "" is the single
// hierarchy of cgroup v2.
func findCgroup(t *testing.T, controller string, uid types.UID) string {
	t.Helper()
	found := findCgroups(t, controller, uid)
	if len(found) == 0 {
		t.Fatalf("no cgroup of pod %s in hierarchy %q", uid, controller)
	}
	return found[0]
}

// findCgroups returns the cgroups of a pod of all workers in a hierarchy, or in all hierarchies if
// controller is "".
func findCgroups(t *testing.T, controller string, uid types.UID) (found []string) {
	t.Helper()
	err := filepath.WalkDir(filepath.Join("/sys/fs/cgroup", controller),
		func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.IsDir() && d.Name() == "pod"+string(uid) {
				found = append(found, path)
			}
			return nil // others come and go meanwhile
		})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// kernelLimits returns the memory limits and CPU quotas in the cgroups of a pod and of its only
// container.
func kernelLimits(t *testing.T, p *v1.Pod) (memory, cpu [2]string) {
	t.Helper()
	_, id, _ := strings.Cut(p.Status.ContainerStatuses[0].ContainerID, "://")
	read := func(dir, file string) string {
		b, err := os.ReadFile(filepath.Join(dir, file))
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(string(b))
	}
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); err == nil {
		dir := findCgroup(t, "", p.UID)
		first := func(s string) string { s, _, _ = strings.Cut(s, " "); return s }
		return [2]string{read(dir, "memory.max"), read(filepath.Join(dir, id), "memory.max")},
			[2]string{first(read(dir, "cpu.max")), first(read(filepath.Join(dir, id), "cpu.max"))}
	}
	m, c := findCgroup(t, "memory", p.UID), findCgroup(t, "cpu", p.UID)
	return [2]string{read(m, "memory.limit_in_bytes"), read(filepath.Join(m, id), "memory.limit_in_bytes")},
		[2]string{read(c, "cpu.cfs_quota_us"), read(filepath.Join(c, id), "cpu.cfs_quota_us")}
}

func resizeCondition(p *v1.Pod) (pending *v1.PodCondition, open bool) {
	for i := range p.Status.Conditions {
		switch c := &p.Status.Conditions[i]; c.Type {
		case v1.PodResizePending:
			pending = c
		case v1.PodResizeInProgress:
			open = true
		}
	}
	return pending, open
}

// A running pod gets more and less CPU and memory without a restart, by the documented kubectl
// commands. A size that the node lacks now is deferred until another pod ends; a size that the node
// never has is reported as infeasible.
func TestResizeInPlace(t *testing.T) {
	w := newNamespace(t)
	onW1 := func(p *v1.Pod, cpu, memory, cpuLimit, memoryLimit string) *v1.Pod {
		p.Spec.NodeSelector = map[string]string{v1.LabelHostname: "w1"}
		p.Spec.Containers[0].Resources = v1.ResourceRequirements{
			Requests: v1.ResourceList{v1.ResourceCPU: resource.MustParse(cpu),
				v1.ResourceMemory: resource.MustParse(memory)},
			Limits: v1.ResourceList{v1.ResourceCPU: resource.MustParse(cpuLimit),
				v1.ResourceMemory: resource.MustParse(memoryLimit)},
		}
		return p
	}
	node, err := testenv.Client(t).CoreV1().Nodes().Get(context.Background(), "w1", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	most := node.Status.Allocatable.Cpu().MilliValue()
	part := func(tenths int64) string { return fmt.Sprintf("%dm", most*tenths/10) }

	w.createPod(onW1(sleeperPod("grows"), "100m", "32Mi", "200m", "64Mi"))
	name := w.awaitPod("grows", requireReady).Spec.Containers[0].Name
	resize := func(cpu, memory, cpuLimit, memoryLimit string) {
		t.Helper()
		testenv.Kctl(t, "-n", w.ns, "patch", "pod", "grows", "--subresource", "resize", "-p", fmt.Sprintf(
			`{"spec":{"containers":[{"name":%q,"resources":{"requests":{"cpu":%q,"memory":%q},"limits":{"cpu":%q,`+
				`"memory":%q}}}]}}`,
			name, cpu, memory, cpuLimit, memoryLimit))
	}
	settled := func(cpu, cpuLimit, memoryLimit string) *v1.Pod {
		t.Helper()
		p := w.awaitPod("grows", func(p *v1.Pod) error {
			cs := p.Status.ContainerStatuses[0]
			pending, open := resizeCondition(p)
			if pending != nil || open || p.Status.ObservedGeneration != p.Generation || cs.Resources == nil ||
				cs.Resources.Requests.Cpu().String() != cpu || cs.AllocatedResources.Cpu().String() != cpu ||
				cs.Resources.Limits.Cpu().String() != cpuLimit || cs.Resources.Limits.Memory().String() != memoryLimit {
				return fmt.Errorf("conditions %+v, generation %d of %d, resources %+v", p.Status.Conditions,
					p.Status.ObservedGeneration, p.Generation, cs.Resources)
			}
			return nil
		})
		bytes, quota := resource.MustParse(memoryLimit), resource.MustParse(cpuLimit)
		memory, cpus := kernelLimits(t, p)
		wantMemory, wantCPU := fmt.Sprint(bytes.Value()), fmt.Sprint(quota.MilliValue()*100)
		if memory != [2]string{wantMemory, wantMemory} || cpus != [2]string{wantCPU, wantCPU} {
			t.Errorf("the kernel limits pod and container to %v bytes and %v µs, want %s and %s", memory, cpus,
				wantMemory, wantCPU)
		}
		if n := p.Status.ContainerStatuses[0].RestartCount; n != 0 {
			t.Errorf("restarted %d times", n)
		}
		return p
	}
	before := settled("100m", "200m", "64Mi")
	resize("150m", "48Mi", "400m", "128Mi")
	settled("150m", "400m", "128Mi")
	resize("50m", "16Mi", "100m", "48Mi")
	small := settled("50m", "100m", "48Mi")
	if small.Status.ContainerStatuses[0].ContainerID != before.Status.ContainerStatuses[0].ContainerID {
		t.Errorf("another container: %s, then %s", before.Status.ContainerStatuses[0].ContainerID,
			small.Status.ContainerStatuses[0].ContainerID)
	}
	w.awaitEvent("grows", "ResizeStarted", "Pod resize started: {")
	w.awaitEvent("grows", "ResizeCompleted", `"generation":`)

	pendingFor := func(reason, why string) {
		t.Helper()
		p := w.awaitPod("grows", func(p *v1.Pod) error {
			if c, _ := resizeCondition(p); c == nil || c.Reason != reason || c.ObservedGeneration != p.Generation {
				return fmt.Errorf("conditions %+v", p.Status.Conditions)
			}
			return nil
		})
		c, _ := resizeCondition(p)
		if c.Status != v1.ConditionTrue || !strings.HasPrefix(c.Message, why) {
			t.Errorf("condition %+v, want %q", c, why)
		}
		if got := p.Status.ContainerStatuses[0].AllocatedResources.Cpu().String(); got != "50m" {
			t.Errorf("allocated %s while it is %s", got, reason)
		}
		w.awaitEvent("grows", "Resize"+reason)
	}
	w.createPod(onW1(sleeperPod("neighbour"), part(6), "16Mi", part(6), "16Mi"))
	w.awaitPod("neighbour", requireReady)
	resize(part(6), "16Mi", part(6), "48Mi")
	pendingFor(v1.PodReasonDeferred, "Node didn't have enough resource: cpu, requested: ")
	testenv.Kctl(t, "-n", w.ns, "delete", "pod", "neighbour", "--grace-period=1")
	cpu := resource.MustParse(part(6))
	settled(cpu.String(), cpu.String(), "48Mi")

	resize("50m", "16Mi", "100m", "48Mi")
	settled("50m", "100m", "48Mi")
	resize(part(20), "16Mi", part(20), "48Mi")
	pendingFor(v1.PodReasonInfeasible, "Node didn't have enough capacity: cpu, requested: ")
	resize("60m", "16Mi", "100m", "48Mi")
	settled("60m", "100m", "48Mi")
}
