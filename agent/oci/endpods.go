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

	"golang.org/x/sys/unix"

	"keelson.dev/keelson/internal/wait"
)

// EndPods ends all pods below a cgroup root, for a machine that goes down while no agent runs: each container's first process is
// asked to end, by SIGTERM, and what has not ended within grace is killed, frozen or not. Without it the machine would wait for
// each process that a signal does not end, as the first of a namespace does not where it has no handler.
// Shims and what they noted of how containers ended stay until then. The network, mounts and records are the next agent's to take away.
func EndPods(ctx context.Context, root string, grace time.Duration) error {
	tree, err := findCgroups(root)
	if err != nil {
		return err
	}
	asked := map[int]bool{}
	gently, cancel := context.WithTimeout(ctx, grace)
	defer cancel()
	err = wait.For(gently, 50*time.Millisecond, func() error {
		left := 0
		for _, pid := range tree.procs("") {
			name, parent := process(pid)
			if name == shimName || name == pauseName || name == "" {
				continue
			}
			left++
			if above, _ := process(parent); above == shimName && !asked[pid] {
				asked[pid] = true
				_ = unix.Kill(pid, unix.SIGTERM)
			}
		}
		if left > 0 {
			return fmt.Errorf("%d processes are left", left)
		}
		return nil
	})
	if err != nil && !errors.Is(gently.Err(), context.DeadlineExceeded) {
		return err
	}
	return tree.kill(ctx, "")
}

// The kernel's names of programs that belong to no container.
const (
	shimName  = "keelson-shim"
	pauseName = "keelson-pause"
)

// process is the name of a process and its parent; "" when it has ended, a zombie too.
func process(pid int) (name string, parent int) {
	raw, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return "", 0
	}
	// A name may hold anything, brackets too.
	open, end := strings.IndexByte(string(raw), '('), strings.LastIndexByte(string(raw), ')')
	if open < 0 || end < open {
		return "", 0
	}
	rest := strings.Fields(string(raw[end+1:]))
	if len(rest) < 2 || rest[0] == "Z" || rest[0] == "X" {
		return "", 0
	}
	parent, _ = strconv.Atoi(rest[1])
	return string(raw[open+1 : end]), parent
}
