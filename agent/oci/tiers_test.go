package oci

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/wait"
)

// fakeTree returns a cgroup hierarchy of plain files, for v2 or the three relevant controllers of
// v1.
func fakeTree(t *testing.T, unified bool) *cgroupTree {
	dir := t.TempDir()
	tree := &cgroupTree{root: "/keelson", unified: unified, controllers: map[string]string{}}
	for _, c := range []string{"cpu", "memory", "pids"} {
		tree.controllers[c] = dir
		if !unified {
			tree.controllers[c] = filepath.Join(dir, c)
		}
	}
	if unified {
		for _, d := range []string{"", "keelson", "keelson/kubepods"} {
			if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, d, "cgroup.subtree_control"), nil, 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	return tree
}

// With both cgroup versions the QoS cgroups get the same limits, in different files and units. v2
// enables the controllers for children.
func TestTierFiles(t *testing.T) {
	want := agent.Tiers{CPU: 2000, Memory: 4 << 30, PIDs: 30000, Burstable: 1500}
	for unified, files := range map[bool]map[string]string{
		false: {"cpu/keelson/kubepods/cpu.shares": "2048", "memory/keelson/kubepods/memory.limit_in_bytes": "4294967296",
			"pids/keelson/kubepods/pids.max":            "30000",
			"cpu/keelson/kubepods/burstable/cpu.shares": "1536", "cpu/keelson/kubepods/besteffort/cpu.shares": "2"},
		true: {"keelson/kubepods/cpu.weight": "174", "keelson/kubepods/memory.max": "4294967296", "keelson/kubepods/pids.max": "30000",
			"keelson/kubepods/burstable/cpu.weight": "138", "keelson/kubepods/besteffort/cpu.weight": "1",
			"cgroup.subtree_control": "+pids", "keelson/kubepods/cgroup.subtree_control": "+pids"}, // the last value written
	} {
		tree := fakeTree(t, unified)
		for range 2 {
			if err := tree.setTiers(want); err != nil {
				t.Fatal(err)
			}
		}
		base := tree.controllers["cpu"]
		if !unified {
			base = filepath.Dir(base)
		}
		for file, value := range files {
			if got, err := os.ReadFile(filepath.Join(base, file)); err != nil || string(got) != value {
				t.Errorf("v2 %v: %s is %q, want %s (%v)", unified, file, got, value, err)
			}
		}
		delete(tree.controllers, "pids")
		if err := tree.setTiers(agent.Tiers{CPU: 1000}); err == nil || !strings.Contains(err.Error(), "no pids cgroup controller") {
			t.Errorf("without a controller: %v", err)
		}
	}
	none := tierLimits(agent.Tiers{}, true)
	if !slices.Contains(none, tierLimit{allPods, "memory", "memory.max", "max"}) || !slices.Contains(none, tierLimit{allPods, "pids", "pids.max", "max"}) {
		t.Errorf("no limits: %v", none)
	}
}

// cpuSpent returns the CPU time of a cgroup below the root.
func (r *rig) cpuSpent(name string) time.Duration {
	r.t.Helper()
	file, key, unit := filepath.Join("/sys/fs/cgroup/cpuacct", r.cfg.CgroupRoot, name, "cpuacct.usage"), "", time.Nanosecond
	if r.cgroups.unified {
		file, key, unit = filepath.Join("/sys/fs/cgroup", r.cfg.CgroupRoot, name, "cpu.stat"), "usage_usec ", time.Microsecond
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
	run := func(tier string, shares int64) string {
		parent := "/" + tier + "/poduid-" + filepath.Base(tier)
		sb, sc := r.sandbox(func(c *cri.PodSandboxConfig) {
			c.Linux.CgroupParent = parent
			c.Linux.Resources = &cri.LinuxContainerResources{CpuShares: shares}
		})
		r.run(sb, sc, r.containerConfig("app-"+filepath.Base(tier), loops+"wait", func(c *cri.ContainerConfig) {
			c.Linux.Resources = &cri.LinuxContainerResources{CpuShares: shares}
		}))
		return parent
	}
	greedy := run(bestEffort, minShares)
	modest := run(burstable, 1024)
	until := func(what time.Duration, of ...string) {
		t.Helper()
		if err := wait.For(testCtx(t, 60*time.Second), 10*time.Millisecond, func() error {
			sum := time.Duration(0)
			for _, name := range of {
				sum += r.cpuSpent(name)
			}
			if sum < what {
				return fmt.Errorf("%v have had %s of %s", of, sum, what)
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
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

// processes counts the processes in a cgroup and its direct children.
func processes(t *testing.T, dir string) (n int) {
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
		c.Linux.CgroupParent = "/" + bestEffort + "/pod" + c.Metadata.Uid
		c.Linux.Resources = &cri.LinuxContainerResources{CpuShares: minShares, Unified: map[string]string{"pids.max": fmt.Sprint(most)}}
	}
	bomb, bombConfig := r.sandbox(limited)
	other, otherConfig := r.sandbox(limited)
	quiet := r.run(other, otherConfig, r.containerConfig("quiet", "exec sleep 1000"))
	r.run(bomb, bombConfig, r.containerConfig("bomb", "b() { b | b & }; b; exec sleep 1000"))
	dir := filepath.Join(r.cgroups.controllers["pids"], r.cgroups.root, bombConfig.Linux.CgroupParent)
	err := wait.For(testCtx(t, 30*time.Second), time.Millisecond, func() error {
		// Not pids.current, which counts a process before the kernel rejects it.
		if n := processes(t, dir); n == 0 || n > most {
			t.Errorf("the bomb's pod has %d processes", n)
		}
		log, err := os.ReadFile(filepath.Join(r.logs, "bomb.log"))
		if err == nil && !strings.Contains(string(log), "can't fork") {
			err = errors.New("the bomb has not met its limit")
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	out, err := r.ExecSync(r.ctx(), &cri.ExecSyncRequest{ContainerId: quiet, Cmd: []string{"/bin/sh", "-c", "for i in 1 2 3; do /bin/busybox true || exit 1; done; echo well"}})
	if err != nil || string(out.Stdout) != "well\n" {
		t.Errorf("the neighbour: %v, %v", out, err)
	}
	if _, err := r.StopPodSandbox(r.ctx(), &cri.StopPodSandboxRequest{PodSandboxId: bomb}); err != nil {
		t.Error(err)
	}
	if left := r.cgroups.procs(bombConfig.Linux.CgroupParent); len(left) > 0 {
		t.Errorf("%d processes of the bomb are left", len(left))
	}
}
