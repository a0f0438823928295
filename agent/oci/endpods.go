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

	"keelson.dev/keelson/internal/durable"
	"keelson.dev/keelson/internal/wait"
)

// EndPods stops all pods of a runtime for a machine that shuts down while no agent runs. It sends
// SIGTERM to each container's first process and kills the rest after grace, even frozen processes.
// Otherwise the shutdown would wait for each process that ignores the signal, such as an init
// without a handler.
//
// Shims stay until they have recorded how the containers ended, also killed ones. The next agent
// process has no other evidence that they ran. It also removes the network, mounts and records.
// Only the directories and the cgroup root of cfg are used.
func EndPods(ctx context.Context, cfg Config, grace time.Duration) error {
	r := New(cfg)
	var err error
	if r.cgroups, err = findCgroups(cfg.CgroupRoot); err != nil {
		return err
	}
	running := r.populated()
	if err := r.askToEnd(ctx, grace); err != nil {
		return err
	}
	r.killRecorded(ctx, running)
	return r.cgroups.kill(ctx, "")
}

// populated returns the records of containers with running processes. Unreadable records are
// skipped; the next agent handles them.
func (r *Runtime) populated() []containerRecord {
	var all []containerRecord
	entries, _ := os.ReadDir(r.containerDir(""))
	for _, e := range entries {
		var rec containerRecord
		err := durable.ReadJSON(filepath.Join(r.containerDir(e.Name()), "container.json"), &rec)
		if err == nil && rec.ID == e.Name() && rec.Cgroup != "" && len(r.cgroups.procs(rec.Cgroup)) > 0 {
			all = append(all, rec)
		}
	}
	return all
}

// askToEnd sends SIGTERM to the first process of each container. It waits at most grace until all
// container processes have ended.
func (r *Runtime) askToEnd(ctx context.Context, grace time.Duration) error {
	asked := map[int]bool{}
	gently, cancel := context.WithTimeout(ctx, grace)
	defer cancel()
	err := wait.For(gently, 50*time.Millisecond, func() error {
		left := 0
		for _, pid := range r.cgroups.procs("") {
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
	return nil
}

// recordTime is how long shims have to record the ends of killed containers. A shim of an earlier
// release makes no such record, and a process that hangs in the kernel does not end.
const recordTime = 5 * time.Second

// killRecorded kills all remaining containers at once and waits until their ends are recorded on
// disk.
func (r *Runtime) killRecorded(ctx context.Context, running []containerRecord) {
	ctx, cancel := context.WithTimeout(ctx, recordTime)
	defer cancel()
	// After the timeout, EndPods kills all remaining processes.
	_ = wait.For(ctx, 10*time.Millisecond, func() error {
		missing := 0
		for _, rec := range running {
			if _, err := os.Stat(r.endFile(rec.ID)); err != nil {
				missing++
				r.cgroups.killNow(rec.Cgroup)
			}
		}
		if missing > 0 {
			return fmt.Errorf("the ends of %d containers are not noted", missing)
		}
		return nil
	})
}

// The kernel's names of processes that belong to no container.
const (
	shimName  = "keelson-shim"
	pauseName = "keelson-pause"
)

// process returns the name of a process and its parent's PID; "" if the process has ended or is a
// zombie.
func process(pid int) (name string, parent int) {
	raw, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return "", 0
	}
	// A name may contain any characters, including brackets.
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
