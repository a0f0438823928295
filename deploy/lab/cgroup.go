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

// unified says whether the machine has cgroup v2 alone.
func unified() bool {
	var st unix.Statfs_t
	return unix.Statfs(cgroupMount, &st) == nil && st.Type == unix.CGROUP2_SUPER_MAGIC
}

// hierarchies are the mount points in which the lab makes its subtree. On v1,
// cpuset is left out: a new cpuset group takes no process until it was given
// CPUs, and the lab does not pin.
func hierarchies() []string {
	if unified() {
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

// makeCgroups makes the host's subtree and its leaf for daemons.
func (h Host) makeCgroups() error {
	for _, dir := range hierarchies() {
		if err := os.MkdirAll(filepath.Join(dir, h.CgroupPath(), "system"), 0o755); err != nil {
			return fmt.Errorf("making cgroup of host %s: %w", h.Name, err)
		}
	}
	if unified() {
		for _, dir := range []string{"", root, root + "/" + h.Name} {
			handDown(dir, "cpu", "memory", "pids", "cpuset", "io")
		}
	}
	return h.setWeights() // cgroup v2 has the files once the controllers are there
}

// handDown gives the cgroups below one their controllers (v2). One that is absent or already on is fine.
func handDown(dir string, controllers ...string) {
	for _, c := range controllers {
		_ = os.WriteFile(filepath.Join(cgroupMount, dir, "cgroup.subtree_control"), []byte("+"+c), 0)
	}
}

// setWeights gives the lab the share of the CPUs that its machines would have of
// their own: without it seven hosts together weigh as much as one process outside.
func (h Host) setWeights() error {
	weights := map[string]int{CgroupRoot(): 16, h.CgroupPath() + "/system": 4} // in units of the default
	if h.Role == RoleControlPlane {
		weights[h.CgroupPath()] = 4
	}
	for path, w := range weights {
		file, value := filepath.Join(cgroupMount, "cpu", path, "cpu.shares"), 1024*w
		if unified() {
			file, value = filepath.Join(cgroupMount, path, "cpu.weight"), 100*w
		}
		if !exists(file) {
			continue // the kernel has no such controller
		}
		if err := os.WriteFile(file, []byte(strconv.Itoa(value)), 0); err != nil {
			return fmt.Errorf("weight of host %s: %w", h.Name, err)
		}
	}
	return nil
}

// joinScript is shell text that moves the calling shell into the host's daemon leaf.
func (h Host) joinScript() string {
	var b strings.Builder
	for _, dir := range hierarchies() {
		fmt.Fprintf(&b, "echo $$ > %s/cgroup.procs || exit 125\n", filepath.Join(dir, h.CgroupPath(), "system"))
	}
	return b.String()
}

// cgroupDirs lists a subtree in every hierarchy, deepest first.
func cgroupDirs(path string) []string {
	var out []string
	roots := hierarchies()
	if !unified() {
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

// processes lists the pids anywhere below a cgroup path.
func processes(path string) []int {
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

// killAll kills everything below a cgroup path and waits until it is empty.
func killAll(ctx context.Context, path string) error {
	_ = freeze(path, false) // a frozen process does not die on v1
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	return wait.For(ctx, 5*time.Millisecond, func() error {
		alive := 0
		for _, pid := range processes(path) {
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

// isZombie says that a process has ended, or is not there. One whose first thread has ended has what it had, its locks too,
// until the others have.
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

// freeze stops or continues everything below a cgroup path at once.
func freeze(path string, on bool) error {
	file, value := filepath.Join(cgroupMount, "freezer", path, "freezer.state"), "THAWED"
	if on {
		value = "FROZEN"
	}
	if unified() {
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
