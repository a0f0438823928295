package oci

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/opencontainers/cgroups"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
	"keelson.dev/keelson/agent/oci/podcgroup"
)

// weightOf returns the cgroup v2 weight for CPU shares.
func weightOf(shares uint64) string {
	return strconv.FormatUint(cgroups.ConvertCPUSharesToCgroupV2Value(shares), 10)
}

// begotten is a script with a first process that survives the kill of the second, if permitted.
const begotten = "tail /dev/zero & wait $!; echo survived; exec sleep 1000"

// With cgroup v2, the kernel kills all of a container with memory.oom.group, and one process of
// another. With v1 it always kills one.
func TestOutOfMemory(t *testing.T) {
	r := newRig(t)
	sb, sc := r.runSandbox()
	limited := func(group string) func(*cri.ContainerConfig) {
		return func(c *cri.ContainerConfig) {
			c.Linux.Resources = &cri.LinuxContainerResources{MemoryLimitInBytes: 32 << 20,
				Unified: map[string]string{"memory.oom.group": group}}
		}
	}
	single := r.runContainer(sb, sc, r.containerConfig("single", begotten, limited("0")))
	r.waitLog("single", "survived")
	if st := r.inspectContainer(single); st.State != cri.ContainerState_CONTAINER_RUNNING {
		t.Errorf("a container that lost one process: %v", st)
	}
	whole := r.runContainer(sb, sc, r.containerConfig("whole", begotten, limited("1")))
	if !r.cgroups.Unified {
		r.waitLog("whole", "survived")
		return
	}
	if st := r.waitExit(whole); st.Reason != "OOMKilled" || st.ExitCode != 137 {
		t.Errorf("a container that is ended as one: %d %s (%s)", st.ExitCode, st.Reason, r.readLog("whole"))
	}
}

// oomScoreOf reads oom_score_adj of a process.
func oomScoreOf(t *testing.T, pid int) int {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/oom_score_adj", pid))
	if err != nil {
		t.Fatal(err)
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// The kernel kills containers in the order of their scores, exec processes like the first process.
// Shim and pause have a lower score, or the agent's if it cannot be lowered.
func TestOOMScores(t *testing.T) {
	r := newRig(t)
	sb, sc := r.runSandbox()
	lowest := func(n int) int {
		if r.host.LowerOOM {
			return n
		}
		return max(n, r.host.OOMScoreAdj)
	}
	for name, want := range map[string]int{"guaranteed": -997, "burstable": 900, "besteffort": 1000} {
		id := r.runContainer(sb, sc, r.containerConfig(name, "exec sleep 1000", func(c *cri.ContainerConfig) {
			c.Linux.Resources = &cri.LinuxContainerResources{OomScoreAdj: int64(want)}
		}))
		if got := oomScoreOf(t, r.pidOf(id)); got != lowest(want) {
			t.Errorf("%s: oom_score_adj %d, want %d", name, got, lowest(want))
		}
		out, err := r.ExecSync(r.ctx(),
			&cri.ExecSyncRequest{ContainerId: id, Cmd: []string{"cat", "/proc/self/oom_score_adj"}})
		if err != nil || strings.TrimSpace(string(out.Stdout)) != strconv.Itoa(lowest(want)) {
			t.Errorf("%s: what is executed in it has %q, want %d (%v)", name, out.GetStdout(), lowest(want), err)
		}
	}
	s, err := r.Runtime.findSandbox(sb)
	if err != nil {
		t.Fatal(err)
	}
	if got := oomScoreOf(t, s.rec.PausePID); got != lowest(-998) {
		t.Errorf("pause: oom_score_adj %d, want %d", got, lowest(-998))
	}
	for _, pid := range r.cgroups.ProcessIDs(shimCgroup) {
		if got := oomScoreOf(t, pid); got != lowest(-998) {
			t.Errorf("the shim: oom_score_adj %d, want %d", got, lowest(-998))
		}
	}
}

// A device that a container did not get cannot be opened, although its device file can be created,
// with v1 and v2.
func TestOtherDevices(t *testing.T) {
	r := newRig(t)
	sb, sc := r.runSandbox()
	out, st := r.runToEnd(sb, sc, "a", "mknod /tmp/kmsg c 1 11 && head -c 1 /tmp/kmsg || echo refused; mknod "+
		"/tmp/zero c 1 5 && head -c 3 /tmp/zero | wc -c")
	if !strings.Contains(out, "Operation not permitted") || !strings.Contains(out, "refused") ||
		!strings.Contains(out, "stdout F 3\n") {
		t.Errorf("%d: %s", st.ExitCode, out)
	}
}

// Programs in a container see their own cgroup v2 limits at the root of the hierarchy, read-only.
// Every cgroup above a container enables the controllers and has no process of its own.
func TestUnifiedHierarchy(t *testing.T) {
	r := newRig(t)
	if !r.cgroups.Unified {
		t.Skip("needs: cgroup v2 alone, which the machine of test/qemuguest has")
	}
	sb, sc := r.runSandbox(func(c *cri.PodSandboxConfig) {
		c.Linux.CgroupParent = "/" + podcgroup.Burstable + "/poduid1"
	})
	id := r.runContainer(sb, sc, r.containerConfig("free",
		"cat /proc/self/cgroup; cat /sys/fs/cgroup/memory.max; echo 1 > /sys/fs/cgroup/memory.max; exec sleep 1000",
		func(c *cri.ContainerConfig) {
			c.Linux.Resources = &cri.LinuxContainerResources{CpuShares: 2, OomScoreAdj: 1000,
				Unified: map[string]string{"memory.oom.group": "1"}}
		}))
	r.waitLog("free", "Read-only file system")
	r.expectLines("free", "stdout F 0::/", "stdout F max")
	r.expectLimits(id, nil, map[string]string{"cpu.max": "max 100000", "cpu.weight": "1", "memory.max": "max",
		"memory.swap.max": "0", "memory.oom.group": "1", "pids.max": "max"})
	r.runToEnd(sb, sc, "limited", "cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/cpu.max", func(c *cri.ContainerConfig) {
		c.Linux.Resources = &cri.LinuxContainerResources{CpuQuota: 20000, CpuPeriod: 100000,
			MemoryLimitInBytes: 64 << 20}
	})
	r.expectLines("limited", "stdout F 67108864", "stdout F 20000 100000")
	c, err := r.Runtime.findContainer(id)
	if err != nil {
		t.Fatal(err)
	}
	for dir := filepath.Dir(filepath.Join(r.cgroups.Root, c.rec.Cgroup)); dir != "/"; dir = filepath.Dir(dir) {
		at := filepath.Join("/sys/fs/cgroup", dir)
		down, err := os.ReadFile(filepath.Join(at, "cgroup.subtree_control"))
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{"cpu", "memory", "pids"} {
			if !slices.Contains(strings.Fields(string(down)), want) {
				t.Errorf("%s hands down %q, not %s", dir, strings.TrimSpace(string(down)), want)
			}
		}
		if own, err := os.ReadFile(filepath.Join(at, "cgroup.procs")); err != nil || len(own) > 0 {
			t.Errorf("%s has processes of its own: %q (%v)", dir, own, err)
		}
	}
}
