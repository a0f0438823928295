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

// hasCgroupV2Only reports whether the machine has only cgroup v2.
func hasCgroupV2Only() bool {
	var st unix.Statfs_t
	return unix.Statfs(cgroupMount, &st) == nil && st.Type == unix.CGROUP2_SUPER_MAGIC
}

// cgroupHierarchies returns the mount points in which the lab creates its subtree. On v1, cpuset is
// omitted: a new cpuset group accepts no process until it has CPUs, and the lab does not pin CPUs.
func cgroupHierarchies() []string {
	if hasCgroupV2Only() {
		return []string{cgroupMount}
	}
	var out []string
	seen := map[string]bool{}
	for _, c := range []string{"cpu", "cpuacct", "memory", "devices", "freezer", "blkio", "pids", "systemd"} {
		dir := filepath.Join(cgroupMount, c)
		real, err := filepath.EvalSymlinks(dir)
		if err != nil || seen[real] {
			continue
		}
		if _, err := os.Stat(filepath.Join(real, "cgroup.procs")); err == nil {
			seen[real] = true
			out = append(out, real)
		}
	}
	return out
}

// makeCgroups creates the host's subtree and its leaf for daemons.
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
	return h.setWeights() // on cgroup v2, the files exist once the controllers are enabled
}

// delegateControllers enables controllers for the children of a cgroup (v2). It ignores controllers
// that are absent or already enabled.
func delegateControllers(dir string, controllers ...string) {
	for _, c := range controllers {
		_ = os.WriteFile(filepath.Join(cgroupMount, dir, "cgroup.subtree_control"), []byte("+"+c), 0)
	}
}

// setWeights gives the lab a CPU share as if its hosts were separate machines. Otherwise, all hosts
// together have the weight of one process outside the lab.
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
			continue // the kernel does not have the controller
		}
		if err := os.WriteFile(file, []byte(strconv.Itoa(value)), 0); err != nil {
			return fmt.Errorf("weight of host %s: %w", h.Name, err)
		}
	}
	return nil
}

// joinScript returns shell text that moves the calling shell into the host's daemon leaf.
func (h Host) joinScript() string {
	var b strings.Builder
	for _, dir := range cgroupHierarchies() {
		fmt.Fprintf(&b, "echo $$ > %s/cgroup.procs || exit 125\n", filepath.Join(dir, h.CgroupPath(), "system"))
	}
	return b.String()
}

// cgroupDirs lists a subtree in every hierarchy, deepest first.
func cgroupDirs(path string) []string {
	var out []string
	roots := cgroupHierarchies()
	if !hasCgroupV2Only() {
		for _, extra := range []string{"cpuset", "hugetlb", "net_cls", "net_prio", "perf_event", "rdma", "misc", "unified"} {
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

// cgroupPIDs returns the PIDs in a cgroup and its descendants.
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

// isZombie reports whether a process has exited or does not exist. A process with an exited main
// thread keeps its resources, including locks, until its other threads exit; it is not a zombie.
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

// removeCgroups removes a subtree in every hierarchy.
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

// setFrozen freezes or thaws all processes in a cgroup and its descendants.
func setFrozen(path string, on bool) error {
	file, value := filepath.Join(cgroupMount, "freezer", path, "freezer.state"), "THAWED"
	if on {
		value = "FROZEN"
	}
	if hasCgroupV2Only() {
		file, value = filepath.Join(cgroupMount, path, "cgroup.freeze"), "0"
		if on {
			value = "1"
		}
	}
	if err := os.WriteFile(file, []byte(value), 0); err != nil {
		return fmt.Errorf("freezer of %s: %w", path, err)
	}
	return nil
}
