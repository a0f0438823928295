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

// EndPods ends all pods of a runtime, for a machine that goes down while no agent runs: each container's first process is
// asked to end, by SIGTERM, and what has not ended within grace is killed, frozen or not. Without it the machine would wait for
// each process that a signal does not end, as the first of a namespace does not where it has no handler.
// Shims stay until they have noted how the containers ended, killed ones too: nothing else tells the next agent that they ran.
// The network, mounts and records are that agent's to take away. Of cfg, folders and the cgroup root are used.
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

// populated lists the containers in whose cgroups something runs. A record that does not read is another agent's to judge.
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

// askToEnd sends SIGTERM to the first process of each container, and waits for all processes of containers, for grace at most.
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

// recordTime is how long shims have to note the ends of killed containers. One of an earlier release notes none that outlives a
// reboot, and a process that hangs in the kernel does not end.
const recordTime = 5 * time.Second

// killRecorded kills what is left of containers, all at once, and waits until their ends are noted on disk.
func (r *Runtime) killRecorded(ctx context.Context, running []containerRecord) {
	ctx, cancel := context.WithTimeout(ctx, recordTime)
	defer cancel()
	// Who is not done in time is killed with everything else.
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
