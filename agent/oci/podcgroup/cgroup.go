// Package podcgroup creates, limits, measures and removes the cgroups of pods, with cgroup v1 and
// v2.
package podcgroup

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

// Tree is the part of the cgroup hierarchies in which pods run.
type Tree struct {
	Root    string // path from the root of each hierarchy
	Unified bool   // pure cgroup v2
	mounts  []string
	memory  string // mount point of the memory controller
	cpuacct string // mount point of the CPU accounting with cgroup v1; "" with v2
	blkio   string // mount point of the block I/O accounting with cgroup v1; "" with v2
	Hugetlb bool
	Pids    bool
	// Controllers maps the controllers that limit tiers ("cpu", "memory", "pids"; see ApplyTiers)
	// to their mount points.
	Controllers map[string]string
}

// Detect returns the Tree below the cgroup root, with the mounted cgroup hierarchies and their
// controllers.
func Detect(root string) (*Tree, error) {
	t := &Tree{Root: filepath.Join("/", root), Unified: cgroups.IsCgroup2UnifiedMode(),
		Controllers: map[string]string{}}
	if t.Root == "/" {
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
				t.Controllers[o] = m.Mountpoint
			case "cpuacct":
				t.cpuacct = m.Mountpoint
			case "blkio":
				t.blkio = m.Mountpoint
			case "hugetlb":
				t.Hugetlb = true
			}
		}
	}
	if len(t.mounts) == 0 {
		return nil, errors.New("no cgroup hierarchy is mounted below /sys/fs/cgroup")
	}
	if t.Unified {
		t.memory = t.mounts[0]
		list, err := os.ReadFile(filepath.Join(t.mounts[0], "cgroup.controllers"))
		if err != nil {
			return nil, fmt.Errorf("read cgroup controllers: %w", err)
		}
		for _, c := range strings.Fields(string(list)) {
			switch c {
			case "cpu", "memory", "pids":
				t.Controllers[c] = t.mounts[0]
			case "hugetlb":
				t.Hugetlb = true
			}
		}
	} else {
		t.memory = t.Controllers["memory"]
	}
	t.Pids = t.Controllers["pids"] != ""
	return t, nil
}

// CgroupPaths returns the directories of a cgroup below the root, one for each hierarchy.
func (t *Tree) CgroupPaths(name string) []string {
	var p []string
	for _, m := range t.mounts {
		p = append(p, filepath.Join(m, t.Root, name))
	}
	return p
}

// OomFile returns the file that counts OOM kills in a cgroup; "" without a memory controller.
func (t *Tree) OomFile(name string) string {
	if t.memory == "" {
		return ""
	}
	file := "memory.oom_control"
	if t.Unified {
		file = "memory.events"
	}
	return filepath.Join(t.memory, t.Root, name, file)
}

// newManager returns the libcontainer manager of a cgroup, v1 or v2.
func (t *Tree) newManager(cg *cgroups.Cgroup) (cgroups.Manager, error) {
	if t.Unified {
		return fs2.NewManager(cg, "")
	}
	return fs.NewManager(cg, nil)
}

// CreatePlainCgroup creates a cgroup without limits, and its parents.
func (t *Tree) CreatePlainCgroup(name string) error {
	return t.CreateCgroup(name, &cgroups.Resources{})
}

// CreateCgroup creates a cgroup with limits. It also creates missing parents.
func (t *Tree) CreateCgroup(name string, res *cgroups.Resources) error {
	res.SkipDevices = true
	cg := &cgroups.Cgroup{Path: filepath.Join(t.Root, name), Resources: res}
	m, err := t.newManager(cg)
	if err == nil {
		err = m.Apply(-1)
	}
	if err == nil {
		err = m.Set(res)
	}
	if err != nil {
		return fmt.Errorf("create cgroup %s: %w", cg.Path, err)
	}
	return nil
}

// ProcessIDs returns the PIDs of the processes in a cgroup and its descendants, except this
// process.
func (t *Tree) ProcessIDs(name string) []int {
	seen := map[int]bool{}
	self := os.Getpid()
	var out []int
	for _, dir := range t.CgroupPaths(name) {
		_ = filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
			if err != nil || !d.IsDir() {
				return nil
			}
			b, _ := os.ReadFile(filepath.Join(path, "cgroup.procs"))
			leaf := hasNoChildren(path)
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
		if len(out) > 0 || t.Unified {
			break // a container's processes are in the same cgroup in every hierarchy
		}
	}
	return out
}

// hasNoChildren reports whether a cgroup directory has no child cgroup, that is, its link count is
// 2: each child adds a link.
func hasNoChildren(dir string) bool {
	var st unix.Stat_t
	return unix.Lstat(dir, &st) == nil && st.Nlink == 2
}

// KillProcesses sends SIGKILL to all processes of a cgroup and its descendants until no process is
// left or ctx ends.
func (t *Tree) KillProcesses(ctx context.Context, name string) error {
	t.KillOnce(name)
	return wait.For(ctx, time.Millisecond, func() error {
		pids := t.ProcessIDs(name)
		for _, pid := range pids {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
		if len(pids) > 0 {
			return fmt.Errorf("%d processes remain in cgroup %s", len(pids), name)
		}
		return nil
	})
}

// KillOnce sends SIGKILL to all processes of a cgroup once, without waiting for their exit.
func (t *Tree) KillOnce(name string) {
	if t.Unified {
		_ = os.WriteFile(filepath.Join(t.CgroupPaths(name)[0], "cgroup.kill"), []byte("1"), 0)
	}
	for _, pid := range t.ProcessIDs(name) {
		_ = unix.Kill(pid, unix.SIGKILL)
	}
}

// RemoveCgroup removes a cgroup and its descendants in all hierarchies. It retries, because the
// last process may still be exiting.
func (t *Tree) RemoveCgroup(ctx context.Context, name string) error {
	var errs []error
	for _, dir := range t.CgroupPaths(name) {
		errs = append(errs, wait.For(ctx, time.Millisecond, func() error { return removeCgroupDir(dir) }))
	}
	return errors.Join(errs...)
}

func removeCgroupDir(dir string) error {
	err := unix.Rmdir(dir)
	if err == nil || err == unix.ENOENT {
		return nil
	}
	entries, readErr := os.ReadDir(dir)
	if readErr != nil {
		if errors.Is(readErr, os.ErrNotExist) {
			return nil
		}
		return readErr
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := removeCgroupDir(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	if err := unix.Rmdir(dir); err != nil && err != unix.ENOENT {
		return fmt.Errorf("remove cgroup %s: %w", dir, err)
	}
	return nil
}

// WarmUpMove makes the next move of a process into a cgroup fast. After a quiet time, the kernel
// delays the first move by an RCU grace period of several milliseconds. WarmUpMove causes this
// delay early by moving this process to its own cgroup. It is called while a container is prepared.
func (t *Tree) WarmUpMove() {
	paths, err := cgroups.ParseCgroupFile("/proc/self/cgroup")
	if err != nil {
		return
	}
	for _, candidate := range []struct{ key, mount string }{{"name=systemd", "/sys/fs/cgroup/systemd"},
		{"", "/sys/fs/cgroup"}, {"freezer", "/sys/fs/cgroup/freezer"}} {
		if path, ok := paths[candidate.key]; ok {
			file := filepath.Join(candidate.mount, path, "cgroup.procs")
			if os.WriteFile(file, []byte(strconv.Itoa(os.Getpid())), 0) == nil {
				return
			}
		}
	}
}

// PodCgroupResources returns the limits of the pod's cgroup, including its overhead.
func (t *Tree) PodCgroupResources(config *cri.PodSandboxConfig) *cgroups.Resources {
	res := &cgroups.Resources{}
	for _, r := range []*cri.LinuxContainerResources{config.GetLinux().GetResources(),
		config.GetLinux().GetOverhead()} {
		if r == nil {
			continue
		}
		res.CpuShares += uint64(max(r.CpuShares, 0))
		if r.CpuQuota > 0 {
			res.CpuQuota += r.CpuQuota
			res.CpuPeriod = uint64(r.CpuPeriod)
		}
		res.Memory += max(r.MemoryLimitInBytes, 0)
		if t.Hugetlb {
			for _, h := range r.HugepageLimits {
				res.HugetlbLimit = append(res.HugetlbLimit,
					&cgroups.HugepageLimit{Pagesize: h.PageSize, Limit: h.Limit})
			}
		}
		for k, v := range r.Unified {
			if k == "pids.max" {
				t.limitPIDs(res, v)
			} else if t.Unified {
				if res.Unified == nil {
					res.Unified = map[string]string{}
				}
				res.Unified[k] = v
			}
		}
	}
	if t.Unified && res.CpuShares > 0 {
		res.CpuWeight = cgroups.ConvertCPUSharesToCgroupV2Value(res.CpuShares)
		res.CpuShares = 0
	}
	return res
}

// limitPIDs sets the process limit of a pod, which exists in cgroup v1 and v2. A value that is not
// a number means no limit.
func (t *Tree) limitPIDs(res *cgroups.Resources, value string) {
	if n, err := strconv.ParseInt(value, 10, 64); err == nil && n > 0 && t.Pids {
		res.PidsLimit = &n
	}
}
