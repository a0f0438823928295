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

	"keelson.dev/keelson/agent/oci/podcgroup"
	"keelson.dev/keelson/internal/durable"
	"keelson.dev/keelson/internal/wait"
)

// EndPods stops all pods of a runtime on a machine that shuts down while no agent runs. It sends
// SIGTERM to each container's first process, and kills the remaining processes after grace, even
// frozen ones. Otherwise the shutdown would wait for each process that ignores SIGTERM, such as an
// init process without a handler.
//
// Shims keep running until they have recorded how the containers exited, even after SIGKILL. The
// next agent process has no other evidence that the containers ran. That agent also removes the
// network, mounts and records. EndPods uses only the directories and the cgroup root of cfg.
func EndPods(ctx context.Context, cfg Config, grace time.Duration) error {
	tree, err := podcgroup.Detect(cfg.CgroupRoot)
	if err != nil {
		return err
	}
	s := shutdown{paths: layout{stateDir: cfg.StateDir, runDir: cfg.RunDir}, cgroups: tree}
	running := s.populatedContainers()
	if err := s.terminateContainers(ctx, grace); err != nil {
		return err
	}
	s.killUntilRecorded(ctx, running)
	return s.cgroups.KillProcesses(ctx, "")
}

// shutdown stops the pods of a runtime while no agent runs.
type shutdown struct {
	paths   layout
	cgroups *podcgroup.Tree
}

// populatedContainers returns the records of containers with running processes. Unreadable records
// are skipped; the next agent handles them.
func (s shutdown) populatedContainers() []containerRecord {
	var records []containerRecord
	entries, _ := os.ReadDir(s.paths.containerDir(""))
	for _, e := range entries {
		var rec containerRecord
		err := durable.ReadJSON(filepath.Join(s.paths.containerDir(e.Name()), "container.json"), &rec)
		if err == nil && rec.ID == e.Name() && rec.Cgroup != "" && len(s.cgroups.ProcessIDs(rec.Cgroup)) > 0 {
			records = append(records, rec)
		}
	}
	return records
}

// terminateContainers sends SIGTERM to the first process of each container. It waits at most grace
// until all container processes have ended.
func (s shutdown) terminateContainers(ctx context.Context, grace time.Duration) error {
	signaled := map[int]bool{}
	graceCtx, cancel := context.WithTimeout(ctx, grace)
	defer cancel()
	err := wait.For(graceCtx, 50*time.Millisecond, func() error {
		left := 0
		for _, pid := range s.cgroups.ProcessIDs("") {
			name, parent := readProcess(pid)
			if name == shimName || name == pauseName || name == "" {
				continue
			}
			left++
			if parentName, _ := readProcess(parent); parentName == shimName && !signaled[pid] {
				signaled[pid] = true
				_ = unix.Kill(pid, unix.SIGTERM)
			}
		}
		if left > 0 {
			return fmt.Errorf("%d processes remain", left)
		}
		return nil
	})
	if err != nil && !errors.Is(graceCtx.Err(), context.DeadlineExceeded) {
		return err
	}
	return nil
}

// recordTimeout is how long shims may take to record the exits of killed containers. A shim of an
// earlier release makes no such record, and a process that hangs in the kernel does not exit.
const recordTimeout = 5 * time.Second

// killUntilRecorded kills the running containers all together and waits until their exits are
// recorded on disk, at most recordTimeout.
func (s shutdown) killUntilRecorded(ctx context.Context, running []containerRecord) {
	ctx, cancel := context.WithTimeout(ctx, recordTimeout)
	defer cancel()
	// After the timeout, EndPods kills all remaining processes.
	_ = wait.For(ctx, 10*time.Millisecond, func() error {
		missing := 0
		for _, rec := range running {
			if _, err := os.Stat(s.paths.endFile(rec.ID)); err != nil {
				missing++
				s.cgroups.KillOnce(rec.Cgroup)
			}
		}
		if missing > 0 {
			return fmt.Errorf("the exits of %d containers are not recorded", missing)
		}
		return nil
	})
}

// The kernel's names of processes that belong to no container.
const (
	shimName  = "keelson-shim"
	pauseName = "keelson-pause"
)

// readProcess returns the name of a process and the PID of its parent. The name is "" if the
// process has ended or is a zombie.
func readProcess(pid int) (name string, parent int) {
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
