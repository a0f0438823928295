// Package memory says how much memory this process may take, keeps it to that,
// and puts it last among those that the kernel ends when there is none left.
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

// Available is the memory of the machine, or what the control groups of this
// process leave of it.
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
		// The limits of all groups above hold as well.
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

// cgroupLimit reads a memory.max; ok is false when there is none or it is "max".
func cgroupLimit(file string) (n int64, ok bool) {
	raw, err := os.ReadFile(file)
	if err != nil {
		return 0, false
	}
	n, err = strconv.ParseInt(strings.TrimSpace(string(raw)), 10, 64)
	return n, err == nil
}

// SetLimit makes the garbage collector work harder the closer this process comes to
// limit bytes. A tenth is left for what is not of the Go runtime: mapped files,
// the kernel's part. A GOMEMLIMIT in the environment is left alone.
func SetLimit(limit int64) {
	if os.Getenv("GOMEMLIMIT") == "" && limit > 0 {
		debug.SetMemoryLimit(limit - limit/10)
	}
}

// CurrentLimit is the limit that is set, ok is false without one.
func CurrentLimit() (limit int64, ok bool) {
	limit = debug.SetMemoryLimit(-1)
	return limit, limit != math.MaxInt64
}

// DaemonOOMScore is the OOM score of a daemon: below that of any pod (-997 and more), and of the parents of their processes
// (-998).
const DaemonOOMScore = -999

// SetOOMScore sets this process' OOM score. Without CAP_SYS_RESOURCE it cannot be lowered: that is an error, and no harm.
func SetOOMScore(score int) error {
	if err := os.WriteFile("/proc/self/oom_score_adj", []byte(strconv.Itoa(score)), 0); err != nil {
		return fmt.Errorf("setting oom_score_adj to %d: %w", score, err)
	}
	return nil
}
