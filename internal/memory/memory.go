// Package memory determines how much memory this process may use, and sets the Go memory limit and
// the OOM score of the process.
package memory

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"strings"
)

// Available returns how many bytes of memory this process may use: the smaller of the machine's
// memory and the smallest memory limit of the cgroups that contain the process.
func Available() (int64, error) { return availableUnder("/") }

func availableUnder(root string) (int64, error) {
	total, err := machineMemory(filepath.Join(root, "proc/meminfo"))
	if err != nil {
		return 0, err
	}
	raw, err := os.ReadFile(filepath.Join(root, "proc/self/cgroup"))
	if errors.Is(err, fs.ErrNotExist) {
		return total, nil
	}
	if err != nil {
		return 0, fmt.Errorf("reading this process' control group: %w", err)
	}
	for line := range strings.Lines(string(raw)) {
		path, ok := strings.CutPrefix(strings.TrimSpace(line), "0::")
		if !ok {
			continue
		}
		// The limits of all parent cgroups apply too.
		for path = filepath.Clean("/" + path); ; path = filepath.Dir(path) {
			if n, ok := cgroupLimit(filepath.Join(root, "sys/fs/cgroup", path, "memory.max")); ok {
				total = min(total, n)
			}
			if path == "/" {
				break
			}
		}
	}
	return total, nil
}

func machineMemory(file string) (int64, error) {
	f, err := os.Open(file)
	if err != nil {
		return 0, fmt.Errorf("reading the machine's memory: %w", err)
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		if rest, ok := strings.CutPrefix(s.Text(), "MemTotal:"); ok {
			kib, err := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
			if err != nil {
				return 0, fmt.Errorf("reading the machine's memory from %s: %w", file, err)
			}
			return kib << 10, nil
		}
	}
	return 0, fmt.Errorf("reading the machine's memory: %s has no MemTotal", file)
}

// cgroupLimit returns the limit in a memory.max file of a cgroup. ok is false if there is no such
// file or no limit.
func cgroupLimit(file string) (n int64, ok bool) {
	raw, err := os.ReadFile(file)
	if err != nil {
		return 0, false
	}
	n, err = strconv.ParseInt(strings.TrimSpace(string(raw)), 10, 64)
	return n, err == nil
}

// SetLimit sets the Go memory limit of this process to 90 % of limit bytes. The rest is for memory
// outside the Go runtime: mapped files and kernel memory. If GOMEMLIMIT is set in the environment,
// nothing is changed.
func SetLimit(limit int64) {
	if os.Getenv("GOMEMLIMIT") == "" && limit > 0 {
		debug.SetMemoryLimit(limit - limit/10)
	}
}

// CurrentLimit returns the Go memory limit of this process in bytes. ok is false if there is no
// limit.
func CurrentLimit() (limit int64, ok bool) {
	limit = debug.SetMemoryLimit(-1)
	return limit, limit != math.MaxInt64
}

// DaemonOOMScore is the oom_score_adj of a daemon. It is lower than that of any pod (-997 and
// above) and of the container shims (-998), so the kernel kills those first.
const DaemonOOMScore = -999

// SetOOMScore sets the oom_score_adj of this process. Lowering it requires CAP_SYS_RESOURCE. The
// process can run with its previous score, so callers may ignore the error.
func SetOOMScore(score int) error {
	if err := os.WriteFile("/proc/self/oom_score_adj", []byte(strconv.Itoa(score)), 0); err != nil {
		return fmt.Errorf("setting oom_score_adj to %d: %w", score, err)
	}
	return nil
}
