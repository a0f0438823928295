package oci

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/oci/podcgroup"
	"keelson.dev/keelson/internal/await"
)

// cpuSpent returns the CPU time of a cgroup below the root.
func (r *rig) cpuSpent(name string) time.Duration {
	r.t.Helper()
	file, key, unit := filepath.Join("/sys/fs/cgroup/cpuacct", r.cfg.CgroupRoot, name, "cpuacct.usage"), "",
		time.Nanosecond
	if r.cgroups.Unified {
		file, key, unit = filepath.Join("/sys/fs/cgroup", r.cfg.CgroupRoot, name, "cpu.stat"), "usage_usec ",
			time.Microsecond
	}
	raw, err := os.ReadFile(file)
	if err != nil {
		r.t.Fatal(err)
	}
	first, _, _ := strings.Cut(strings.TrimPrefix(string(raw), key), "\n")
	n, err := strconv.ParseInt(first, 10, 64)
	if err != nil {
		r.t.Fatal(err)
	}
	return time.Duration(n) * unit
}

// A busy best-effort pod takes less than a tenth of the CPU time from a pod with a CPU request. The
// ratio of their CPU times is compared, so other load does not matter.
func TestBestEffortComesLast(t *testing.T) {
	r := newRig(t)
	if err := r.SetTiers(r.ctx(), agent.Tiers{CPU: int64(runtime.NumCPU()) * 1000, Burstable: 1000}); err != nil {
		t.Fatal(err)
	}
	// All loops run on one CPU, so that the kernel's load balancing has no influence.
	loops := strings.Repeat("taskset 1 sh -c 'while :; do :; done' & ", 2)
	run := func(tier string, shares int64) (parent, sandbox string) {
		parent = "/" + tier + "/poduid-" + filepath.Base(tier)
		sb, sc := r.runSandbox(func(c *cri.PodSandboxConfig) {
			c.Linux.CgroupParent = parent
			c.Linux.Resources = &cri.LinuxContainerResources{CpuShares: shares}
		})
		r.runContainer(sb, sc, r.containerConfig("app-"+filepath.Base(tier), loops+"wait",
			func(c *cri.ContainerConfig) {
				c.Linux.Resources = &cri.LinuxContainerResources{CpuShares: shares}
			}))
		return parent, sb
	}
	greedy, _ := run(podcgroup.BestEffort, podcgroup.MinShares)
	modest, modestSandbox := run(podcgroup.Burstable, 1024)
	// The Burstable pod is removed first. Beside its loops, killed processes of the other pod have too little CPU time to exit
	// within the deadline of the rig.
	t.Cleanup(func() {
		if _, err := r.RemovePodSandbox(r.ctx(), &cri.RemovePodSandboxRequest{PodSandboxId: modestSandbox}); err !=
			nil {
			t.Error(err)
		}
	})
	until := func(what time.Duration, of ...string) {
		t.Helper()
		await.Until(t.Context(), t, 60*time.Second, 10*time.Millisecond, "CPU time", func() error {
			sum := time.Duration(0)
			for _, name := range of {
				sum += r.cpuSpent(name)
			}
			if sum < what {
				return fmt.Errorf("%v have had %s of %s", of, sum, what)
			}
			return nil
		})
	}
	until(500*time.Millisecond, modest) // all loops of the pod run
	g0, m0 := r.cpuSpent(greedy), r.cpuSpent(modest)
	until(g0+m0+2*time.Second, greedy, modest)
	g, m := r.cpuSpent(greedy)-g0, r.cpuSpent(modest)-m0
	t.Logf("BestEffort had %s, Burstable %s: %.1f%%", g, m, 100*float64(g)/float64(g+m))
	if g*10 > g+m {
		t.Errorf("a busy BestEffort pod had %s beside the %s of a Burstable one", g, m)
	}
}

// countProcesses counts the processes in a cgroup and its direct children.
func countProcesses(t *testing.T, dir string) (n int) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*", "cgroup.procs"))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range append(files, filepath.Join(dir, "cgroup.procs")) {
		raw, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		n += len(strings.Fields(string(raw)))
	}
	return n
}

// A fork bomb is limited to its own pod: it gets no more processes than a pod may have. Other pods
// can start processes, and the pod can be removed.
func TestForkBomb(t *testing.T) {
	r := newRig(t)
	const most = 64
	limited := func(c *cri.PodSandboxConfig) {
		c.Linux.CgroupParent = "/" + podcgroup.BestEffort + "/pod" + c.Metadata.Uid
		c.Linux.Resources = &cri.LinuxContainerResources{CpuShares: podcgroup.MinShares,
			Unified: map[string]string{"pids.max": fmt.Sprint(most)}}
	}
	bomb, bombConfig := r.runSandbox(limited)
	other, otherConfig := r.runSandbox(limited)
	quiet := r.runContainer(other, otherConfig, r.containerConfig("quiet", "exec sleep 1000"))
	r.runContainer(bomb, bombConfig, r.containerConfig("bomb", "b() { b | b & }; b; exec sleep 1000"))
	dir := filepath.Join(r.cgroups.Controllers["pids"], r.cgroups.Root, bombConfig.Linux.CgroupParent)
	await.Until(t.Context(), t, 30*time.Second, time.Millisecond, "the limit of the bomb", func() error {
		// Not pids.current, which counts a process before the kernel rejects it.
		if n := countProcesses(t, dir); n == 0 || n > most {
			t.Errorf("the bomb's pod has %d processes", n)
		}
		log, err := os.ReadFile(filepath.Join(r.logs, "bomb.log"))
		if err == nil && !strings.Contains(string(log), "can't fork") {
			err = errors.New("the bomb has not met its limit")
		}
		return err
	})
	out, err := r.ExecSync(r.ctx(), &cri.ExecSyncRequest{ContainerId: quiet,
		Cmd: []string{"/bin/sh", "-c", "for i in 1 2 3; do /bin/busybox true || exit 1; done; echo well"}})
	if err != nil || string(out.Stdout) != "well\n" {
		t.Errorf("the neighbour: %v, %v", out, err)
	}
	if _, err := r.StopPodSandbox(r.ctx(), &cri.StopPodSandboxRequest{PodSandboxId: bomb}); err != nil {
		t.Error(err)
	}
	if left := r.cgroups.ProcessIDs(bombConfig.Linux.CgroupParent); len(left) > 0 {
		t.Errorf("%d processes of the bomb are left", len(left))
	}
}
