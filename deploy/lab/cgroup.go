package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"keelson.dev/keelson/internal/wait"
)

const cgroupMount = "/sys/fs/cgroup"

// hasCgroupV2Only reports whether /sys/fs/cgroup is cgroup v2, and not a set of v1 hierarchies.
func hasCgroupV2Only() bool {
	var st unix.Statfs_t
	return unix.Statfs(cgroupMount, &st) == nil && st.Type == unix.CGROUP2_SUPER_MAGIC
}

// cgroupHierarchies returns the mount points of the cgroup hierarchies in which the lab creates
// cgroups: one on cgroup v2, several on v1. On v1, it omits cpuset: a new cpuset cgroup accepts no
// process until it has CPUs, and the lab does not pin CPUs.
func cgroupHierarchies() []string {
	if hasCgroupV2Only() {
		return []string{cgroupMount}
	}
	var out []string
	seen := map[string]bool{}
	for _, c := range []string{"cpu", "cpuacct", "memory", "devices", "freezer", "blkio", "pids", "systemd"} {
		dir := filepath.Join(cgroupMount, c)
		resolved, err := filepath.EvalSymlinks(dir)
		if err != nil || seen[resolved] {
			continue
		}
		if _, err := os.Stat(filepath.Join(resolved, "cgroup.procs")); err == nil {
			seen[resolved] = true
			out = append(out, resolved)
		}
	}
	return out
}

// makeCgroups creates the host's cgroup in every hierarchy, and in it the cgroup "system", which
// contains the host's daemon. It also sets the CPU weights.
func (h Host) makeCgroups() error {
	for _, dir := range cgroupHierarchies() {
		if err := os.MkdirAll(filepath.Join(dir, h.CgroupPath(), "system"), 0o755); err != nil {
			return fmt.Errorf("making cgroup of host %s: %w", h.Name, err)
		}
	}
	if hasCgroupV2Only() {
		for _, dir := range []string{"", root, root + "/" + h.Name} {
			delegateControllers(dir, "cpu", "memory", "pids", "cpuset", "io")
		}
	}
	return h.setWeights() // on cgroup v2, these files exist after the controllers were enabled
}

// delegateControllers enables cgroup v2 controllers for the children of the cgroup dir. It ignores
// controllers that are absent or already enabled.
func delegateControllers(dir string, controllers ...string) {
	for _, c := range controllers {
		_ = os.WriteFile(filepath.Join(cgroupMount, dir, "cgroup.subtree_control"), []byte("+"+c), 0)
	}
}

// setWeights sets the CPU weights of the lab and of the host's cgroups. With the default weights,
// all hosts together would have the CPU share of one process outside the lab.
func (h Host) setWeights() error {
	weights := map[string]int{CgroupRoot(): 16, h.CgroupPath() + "/system": 4} // multiples of the default
	if h.Role == RoleControlPlane {
		weights[h.CgroupPath()] = 4
	}
	for path, w := range weights {
		file, value := filepath.Join(cgroupMount, "cpu", path, "cpu.shares"), 1024*w
		if hasCgroupV2Only() {
			file, value = filepath.Join(cgroupMount, path, "cpu.weight"), 100*w
		}
		if !fileExists(file) {
			continue // the kernel does not have the CPU controller
		}
		if err := os.WriteFile(file, []byte(strconv.Itoa(value)), 0); err != nil {
			return fmt.Errorf("weight of host %s: %w", h.Name, err)
		}
	}
	return nil
}

// joinScript returns shell commands that move the shell that runs them into the host's cgroup
// "system".
func (h Host) joinScript() string {
	var b strings.Builder
	for _, dir := range cgroupHierarchies() {
		fmt.Fprintf(&b, "echo $$ > %s/cgroup.procs || exit 125\n", filepath.Join(dir, h.CgroupPath(), "system"))
	}
	return b.String()
}

// cgroupDirs returns the folders of a cgroup and its descendants in every hierarchy, deepest first.
func cgroupDirs(path string) []string {
	var out []string
	roots := cgroupHierarchies()
	if !hasCgroupV2Only() {
		for _, extra := range []string{"cpuset", "hugetlb", "net_cls", "net_prio", "perf_event", "rdma",
			"misc", "unified"} {
			roots = append(roots, filepath.Join(cgroupMount, extra))
		}
	}
	for _, root := range roots {
		_ = filepath.WalkDir(filepath.Join(root, path), func(p string, d fs.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				out = append(out, p)
			}
			return nil
		})
	}
	slices.SortFunc(out, func(a, b string) int { return strings.Count(b, "/") - strings.Count(a, "/") })
	return out
}

// cgroupPIDs returns the PIDs of the processes in a cgroup and its descendants.
func cgroupPIDs(path string) []int {
	seen := map[int]bool{}
	for _, dir := range cgroupDirs(path) {
		raw, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
		if err != nil {
			continue
		}
		for _, f := range bytes.Fields(raw) {
			if pid, err := strconv.Atoi(string(f)); err == nil && pid > 0 {
				seen[pid] = true
			}
		}
	}
	var out []int
	for pid := range seen {
		out = append(out, pid)
	}
	return out
}

// killCgroup kills all processes in a cgroup and its descendants, and waits until they have exited.
// It fails after 20 seconds.
func killCgroup(ctx context.Context, path string) error {
	_ = setFrozen(path, false) // on v1, a frozen process cannot be killed
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	return wait.For(ctx, 5*time.Millisecond, func() error {
		alive := 0
		for _, pid := range cgroupPIDs(path) {
			if isZombie(pid) {
				continue
			}
			alive++
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		if alive > 0 {
			return fmt.Errorf("%d processes left in %s", alive, path)
		}
		return nil
	})
}

// isZombie reports whether a process has exited completely: it is a zombie without other threads,
// or no longer exists. While other threads run after the main thread has exited, it returns false,
// because the process still holds its resources, including locks.
func isZombie(pid int) bool {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return true
	}
	if i := bytes.LastIndexByte(raw, ')'); i <= 0 || i+2 >= len(raw) || raw[i+2] != 'Z' && raw[i+2] != 'X' {
		return false
	}
	threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	return err != nil || len(threads) <= 1
}

// removeCgroups removes a cgroup and its descendants in every hierarchy. It retries for 10 seconds.
func removeCgroups(ctx context.Context, path string) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	return wait.For(ctx, 10*time.Millisecond, func() error {
		var errs []error
		for _, dir := range cgroupDirs(path) {
			if err := os.Remove(dir); err != nil && !errors.Is(err, os.ErrNotExist) {
				errs = append(errs, err)
			}
		}
		return errors.Join(errs...)
	})
}

// setFrozen freezes all processes in a cgroup and its descendants if frozen is true. Otherwise it
// thaws them.
func setFrozen(path string, frozen bool) error {
	file, value := filepath.Join(cgroupMount, "freezer", path, "freezer.state"), "THAWED"
	if frozen {
		value = "FROZEN"
	}
	if hasCgroupV2Only() {
		file, value = filepath.Join(cgroupMount, path, "cgroup.freeze"), "0"
		if frozen {
			value = "1"
		}
	}
	if err := os.WriteFile(file, []byte(value), 0); err != nil {
		return fmt.Errorf("freezer of %s: %w", path, err)
	}
	return nil
}
