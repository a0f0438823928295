package oci

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// readKernelFile reads a file of a cgroup below the root; controller is "" with cgroup v2.
func (r *rig) readKernelFile(controller, cgroup, file string) string {
	r.t.Helper()
	b, err := os.ReadFile(filepath.Join("/sys/fs/cgroup", controller, r.cfg.CgroupRoot, cgroup, file))
	if err != nil {
		r.t.Fatal(err)
	}
	return strings.TrimSpace(string(b))
}

// podLimits reads the pod's own cgroup.
func (r *rig) podLimits(sandbox string) (quota, memory string) {
	r.t.Helper()
	s, err := r.Runtime.findSandbox(sandbox)
	if err != nil {
		r.t.Fatal(err)
	}
	if r.cgroups.Unified {
		return r.readKernelFile("", s.cgroupPath(), "cpu.max"), r.readKernelFile("", s.cgroupPath(), "memory.max")
	}
	return r.readKernelFile("cpu", s.cgroupPath(), "cpu.cfs_quota_us"),
		r.readKernelFile("memory", s.cgroupPath(), "memory.limit_in_bytes")
}

func (r *rig) updateContainer(id string, l *cri.LinuxContainerResources) error {
	_, err := r.UpdateContainerResources(r.ctx(), &cri.UpdateContainerResourcesRequest{ContainerId: id, Linux: l})
	return err
}

func (r *rig) updatePod(id string, l *cri.LinuxContainerResources) {
	r.t.Helper()
	if _, err := r.UpdatePodSandboxResources(r.ctx(),
		&cri.UpdatePodSandboxResourcesRequest{PodSandboxId: id, Resources: l}); err != nil {
		r.t.Error(err)
	}
}

// Limits of a running container are raised and lowered in the kernel without a restart. Memory in
// use is not taken away. The next agent has the last limits.
func TestLimitsChangeInPlace(t *testing.T) {
	r := newRig(t)
	small := &cri.LinuxContainerResources{CpuShares: 102, CpuQuota: 10_000, CpuPeriod: 100_000,
		MemoryLimitInBytes: 64 << 20}
	large := &cri.LinuxContainerResources{CpuShares: 512, CpuQuota: 50_000, CpuPeriod: 100_000,
		MemoryLimitInBytes: 128 << 20}
	sb, sc := r.runSandbox(func(c *cri.PodSandboxConfig) {
		c.Linux.CgroupParent, c.Linux.Resources = "/kubepods/burstable/poduid1", small
	})
	id := r.runContainer(sb, sc, r.containerConfig("a",
		"head -c 40000000 /dev/zero | tail > /tmp/held & exec sleep 1000", func(c *cri.ContainerConfig) {
			c.Linux.Resources = &cri.LinuxContainerResources{CpuShares: 102, CpuQuota: 10_000, CpuPeriod: 100_000,
				MemoryLimitInBytes: 64 << 20, Unified: map[string]string{"pids.max": "77"}}
		}))
	pid := r.pidOf(id)
	expect := func(quota, shares, memory string, weight uint64) {
		t.Helper()
		r.expectLimits(id, map[string]string{"cpu/cpu.cfs_quota_us": quota, "cpu/cpu.shares": shares,
			"memory/memory.limit_in_bytes": memory, "pids/pids.max": "77"},
			map[string]string{"cpu.max": quota + " 100000", "cpu.weight": weightOf(weight), "memory.max": memory,
				"memory.swap.max": "0", "pids.max": "77"})
	}
	expect("10000", "102", "67108864", 102)

	r.updatePod(sb, large)
	if err := r.updateContainer(id, large); err != nil {
		t.Fatal(err)
	}
	expect("50000", "512", "134217728", 512)
	if quota, memory := r.podLimits(sb); !strings.HasPrefix(quota, "50000") || memory != "134217728" {
		t.Errorf("the pod has %s and %s", quota, memory)
	}
	st := r.inspectContainer(id)
	if l := st.GetResources().GetLinux(); l.GetCpuQuota() != 50_000 || l.GetMemoryLimitInBytes() != 128<<20 ||
		l.GetUnified()["pids.max"] != "77" {
		t.Errorf("the runtime tells %v", l)
	}

	r.restartRuntime()
	if l := r.inspectContainer(id).GetResources().GetLinux(); l.GetCpuShares() != 512 ||
		l.GetMemoryLimitInBytes() != 128<<20 {
		t.Errorf("the next agent tells %v", l)
	}
	if err := r.updateContainer(id, small); err != nil {
		t.Fatal(err)
	}
	r.updatePod(sb, small)
	expect("10000", "102", "67108864", 102)
	if quota, memory := r.podLimits(sb); !strings.HasPrefix(quota, "10000") || memory != "67108864" {
		t.Errorf("the pod has %s and %s", quota, memory)
	}
	if now := r.pidOf(id); now != pid || r.inspectContainer(id).State != cri.ContainerState_CONTAINER_RUNNING {
		t.Errorf("the container was restarted: process %d, then %d", pid, now)
	}
}

// A memory limit below the usage is rejected before any change, also of CPUs.
func TestMemoryInUseIsNotTaken(t *testing.T) {
	r := newRig(t)
	sb, sc := r.runSandbox()
	// A shell variable holds it: memory that no reclaim frees.
	id := r.runContainer(sb, sc, r.containerConfig("a",
		"x=$(head -c 30000000 /dev/zero | tr '\\0' x); echo held; read y < /dev/zero; sleep 1000; echo $x",
		func(c *cri.ContainerConfig) {
			c.Linux.Resources = &cri.LinuxContainerResources{CpuShares: 102, CpuQuota: 50_000, CpuPeriod: 100_000,
				MemoryLimitInBytes: 256 << 20}
		}))
	r.waitLog("a", "held")
	err := r.updateContainer(id, &cri.LinuxContainerResources{CpuShares: 512, CpuQuota: 90_000, CpuPeriod: 100_000,
		MemoryLimitInBytes: 8 << 20})
	if err == nil || !strings.Contains(err.Error(), "below current usage") {
		t.Errorf("a limit below what is in use: %v", err)
	}
	r.expectLimits(id, map[string]string{"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.shares": "102",
		"memory/memory.limit_in_bytes": "268435456"},
		map[string]string{"cpu.max": "50000 100000", "cpu.weight": weightOf(102), "memory.max": "268435456"})
	if l := r.inspectContainer(id).GetResources().GetLinux(); l.GetCpuQuota() != 50_000 ||
		l.GetMemoryLimitInBytes() != 256<<20 {
		t.Errorf("the runtime tells %v", l)
	}
	if _, err := r.StopContainer(r.ctx(), &cri.StopContainerRequest{ContainerId: id}); err != nil {
		t.Fatal(err)
	}
	if err := r.updateContainer(id, &cri.LinuxContainerResources{}); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("an update of what has ended: %v", err)
	}
	if err := r.updateContainer("none", &cri.LinuxContainerResources{}); status.Code(err) != codes.NotFound {
		t.Errorf("an update of nothing: %v", err)
	}
}

// A container without a limit gets one, and loses it again.
func TestLimitsComeAndGo(t *testing.T) {
	r := newRig(t)
	sb, sc := r.runSandbox()
	id := r.runContainer(sb, sc, r.containerConfig("a", "exec sleep 1000", func(c *cri.ContainerConfig) {
		c.Linux.Resources = &cri.LinuxContainerResources{CpuShares: 102, CpuPeriod: 100_000}
	}))
	for _, l := range []struct {
		given              *cri.LinuxContainerResources
		quota, max, memory string
	}{
		{&cri.LinuxContainerResources{CpuShares: 102, CpuQuota: 20_000, CpuPeriod: 100_000,
			MemoryLimitInBytes: 64 << 20}, "20000", "20000 100000", "67108864"},
		{&cri.LinuxContainerResources{CpuShares: 102, CpuPeriod: 100_000}, "-1", "max 100000", ""},
	} {
		if err := r.updateContainer(id, l.given); err != nil {
			t.Fatal(err)
		}
		v1, v2 := map[string]string{"cpu/cpu.cfs_quota_us": l.quota},
			map[string]string{"cpu.max": l.max, "memory.max": "max"}
		if l.memory != "" {
			v1["memory/memory.limit_in_bytes"], v2["memory.max"] = l.memory, l.memory
		}
		r.expectLimits(id, v1, v2)
	}
}
