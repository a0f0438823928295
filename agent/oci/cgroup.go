package oci

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"github.com/opencontainers/cgroups"
	"github.com/opencontainers/cgroups/fs"
	"github.com/opencontainers/cgroups/fs2"
	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/internal/wait"
)

// cgroupTree is the part of the cgroup hierarchies in which pods run.
type cgroupTree struct {
	root    string // path from the root of each hierarchy
	unified bool   // pure cgroup v2
	mounts  []string
	memory  string // mount point of the memory controller
	cpuacct string // mount point of the CPU accounting with cgroup v1; "" with v2
	hugetlb bool
	pids    bool
	// controllers maps the controllers that limit tiers ("cpu", "memory", "pids") to their mount
	// points.
	controllers map[string]string
}

// findCgroups detects the mounted cgroup hierarchies and their controllers.
func findCgroups(root string) (*cgroupTree, error) {
	t := &cgroupTree{root: filepath.Join("/", root), unified: cgroups.IsCgroup2UnifiedMode(),
		controllers: map[string]string{}}
	if t.root == "/" {
		return nil, errors.New("the cgroup root of pods cannot be the root of the hierarchy")
	}
	mounts, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
	if err != nil {
		return nil, fmt.Errorf("read mounts: %w", err)
	}
	seen := map[string]bool{}
	for _, m := range mounts {
		if !strings.HasPrefix(m.Mountpoint, "/sys/fs/cgroup") || seen[m.Mountpoint] {
			continue
		}
		seen[m.Mountpoint] = true
		t.mounts = append(t.mounts, m.Mountpoint)
		for _, o := range strings.Split(m.VFSOptions, ",") {
			switch o {
			case "cpu", "memory", "pids":
				t.controllers[o] = m.Mountpoint
			case "cpuacct":
				t.cpuacct = m.Mountpoint
			case "hugetlb":
				t.hugetlb = true
			}
		}
	}
	if len(t.mounts) == 0 {
		return nil, errors.New("no cgroup hierarchy is mounted below /sys/fs/cgroup")
	}
	if t.unified {
		t.memory = t.mounts[0]
		list, err := os.ReadFile(filepath.Join(t.mounts[0], "cgroup.controllers"))
		if err != nil {
			return nil, fmt.Errorf("read cgroup controllers: %w", err)
		}
		for _, c := range strings.Fields(string(list)) {
			switch c {
			case "cpu", "memory", "pids":
				t.controllers[c] = t.mounts[0]
			case "hugetlb":
				t.hugetlb = true
			}
		}
	} else {
		t.memory = t.controllers["memory"]
	}
	t.pids = t.controllers["pids"] != ""
	return t, nil
}

// paths returns the directories of a cgroup below the root, one for each hierarchy.
func (t *cgroupTree) paths(name string) []string {
	var p []string
	for _, m := range t.mounts {
		p = append(p, filepath.Join(m, t.root, name))
	}
	return p
}

// oomFile returns the file that counts OOM kills in a cgroup; "" without a memory controller.
func (t *cgroupTree) oomFile(name string) string {
	if t.memory == "" {
		return ""
	}
	file := "memory.oom_control"
	if t.unified {
		file = "memory.events"
	}
	return filepath.Join(t.memory, t.root, name, file)
}

// manager returns the libcontainer manager of a cgroup, v1 or v2.
func (t *cgroupTree) manager(cg *cgroups.Cgroup) (cgroups.Manager, error) {
	if t.unified {
		return fs2.NewManager(cg, "")
	}
	return fs.NewManager(cg, nil)
}

// makePlain creates a cgroup without limits.
func (t *cgroupTree) makePlain(name string) error { return t.make(name, &cgroups.Resources{}) }

// make creates a cgroup with limits, and its parents.
func (t *cgroupTree) make(name string, res *cgroups.Resources) error {
	res.SkipDevices = true
	cg := &cgroups.Cgroup{Path: filepath.Join(t.root, name), Resources: res}
	m, err := t.manager(cg)
	if err == nil {
		err = m.Apply(-1)
	}
	if err == nil {
		err = m.Set(res)
	}
	if err != nil {
		return fmt.Errorf("make cgroup %s: %w", cg.Path, err)
	}
	return nil
}

// procs returns the processes of a cgroup and its descendants.
func (t *cgroupTree) procs(name string) []int {
	seen := map[int]bool{}
	self := os.Getpid()
	var out []int
	for _, dir := range t.paths(name) {
		_ = filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
			if err != nil || !d.IsDir() {
				return nil
			}
			b, _ := os.ReadFile(filepath.Join(path, "cgroup.procs"))
			leaf := childless(path)
			for _, f := range strings.Fields(string(b)) {
				// This process has a thread in the cgroup of the shims.
				if pid, err := strconv.Atoi(f); err == nil && pid > 0 && pid != self && !seen[pid] {
					seen[pid] = true
					out = append(out, pid)
				}
			}
			if leaf {
				return filepath.SkipDir // avoids listing the directory of a cgroup without children
			}
			return nil
		})
		if len(out) > 0 || t.unified {
			break // a container's processes are in the same cgroup in every hierarchy
		}
	}
	return out
}

// childless reports whether a cgroup has no child cgroup. Each child adds a link to the directory's
// own two.
func childless(dir string) bool {
	var st unix.Stat_t
	return unix.Lstat(dir, &st) == nil && st.Nlink == 2
}

// kill sends SIGKILL to all processes of a cgroup until none exist.
func (t *cgroupTree) kill(ctx context.Context, name string) error {
	t.killNow(name)
	return wait.For(ctx, time.Millisecond, func() error {
		pids := t.procs(name)
		for _, pid := range pids {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
		if len(pids) > 0 {
			return fmt.Errorf("%d processes are left in cgroup %s", len(pids), name)
		}
		return nil
	})
}

// killNow sends SIGKILL to all processes of a cgroup and does not wait.
func (t *cgroupTree) killNow(name string) {
	if t.unified {
		_ = os.WriteFile(filepath.Join(t.paths(name)[0], "cgroup.kill"), []byte("1"), 0)
	}
	for _, pid := range t.procs(name) {
		_ = unix.Kill(pid, unix.SIGKILL)
	}
}

// remove removes a cgroup and its descendants in all hierarchies. It retries, because the last
// process may still be exiting.
func (t *cgroupTree) remove(ctx context.Context, name string) error {
	var errs []error
	for _, dir := range t.paths(name) {
		errs = append(errs, wait.For(ctx, time.Millisecond, func() error { return removeCgroup(dir) }))
	}
	return errors.Join(errs...)
}

func removeCgroup(dir string) error {
	err := unix.Rmdir(dir)
	if err == nil || err == unix.ENOENT {
		return nil
	}
	entries, readErr := os.ReadDir(dir)
	if readErr != nil {
		return ignoreMissing(readErr)
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := removeCgroup(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	if err := unix.Rmdir(dir); err != nil && err != unix.ENOENT {
		return fmt.Errorf("remove cgroup %s: %w", dir, err)
	}
	return nil
}

// warm makes the next move into a cgroup fast. After a quiet time, the kernel delays the first move
// by an RCU grace period of several milliseconds. warm spends that time, while a container is
// prepared, by moving this process to its own cgroup.
func (t *cgroupTree) warm() {
	own, err := cgroups.ParseCgroupFile("/proc/self/cgroup")
	if err != nil {
		return
	}
	for _, try := range []struct{ key, mount string }{{"name=systemd", "/sys/fs/cgroup/systemd"}, {"", "/sys/fs/cgroup"}, {"freezer", "/sys/fs/cgroup/freezer"}} {
		if path, ok := own[try.key]; ok {
			file := filepath.Join(try.mount, path, "cgroup.procs")
			if os.WriteFile(file, []byte(strconv.Itoa(os.Getpid())), 0) == nil {
				return
			}
		}
	}
}

// podResources returns the limits of the pod's cgroup, including its overhead.
func (t *cgroupTree) podResources(c *cri.PodSandboxConfig) *cgroups.Resources {
	res := &cgroups.Resources{}
	for _, r := range []*cri.LinuxContainerResources{c.GetLinux().GetResources(), c.GetLinux().GetOverhead()} {
		if r == nil {
			continue
		}
		res.CpuShares += uint64(max(r.CpuShares, 0))
		if r.CpuQuota > 0 {
			res.CpuQuota += r.CpuQuota
			res.CpuPeriod = uint64(r.CpuPeriod)
		}
		res.Memory += max(r.MemoryLimitInBytes, 0)
		if t.hugetlb {
			for _, h := range r.HugepageLimits {
				res.HugetlbLimit = append(res.HugetlbLimit, &cgroups.HugepageLimit{Pagesize: h.PageSize, Limit: h.Limit})
			}
		}
		for k, v := range r.Unified {
			if k == "pids.max" {
				t.limitPIDs(res, v)
			} else if t.unified {
				if res.Unified == nil {
					res.Unified = map[string]string{}
				}
				res.Unified[k] = v
			}
		}
	}
	if t.unified && res.CpuShares > 0 {
		res.CpuWeight = cgroups.ConvertCPUSharesToCgroupV2Value(res.CpuShares)
		res.CpuShares = 0
	}
	return res
}

// limitPIDs sets the process limit of a pod, which exists in cgroup v1 and v2. A value that is not
// a number means no limit.
func (t *cgroupTree) limitPIDs(res *cgroups.Resources, v string) {
	if n, err := strconv.ParseInt(v, 10, 64); err == nil && n > 0 && t.pids {
		res.PidsLimit = &n
	}
}
