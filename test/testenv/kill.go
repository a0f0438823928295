package testenv

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"keelson.dev/keelson/deploy/lab"
	"keelson.dev/keelson/internal/wait"
)

// KillEverything kills the lab's processes with SIGKILL, repeatedly and as fast as possible, until
// no process is left. It returns the number of processes killed, and an error after 20 seconds.
func KillEverything() (killed int, err error) {
	seen := map[int]bool{}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	err = wait.For(ctx, time.Millisecond, func() error {
		for _, pid := range KillGroup("") {
			seen[pid] = true
		}
		if lab.IsAnyProcessAlive() {
			return errors.New("processes of the lab are still running after SIGKILL")
		}
		return nil
	})
	return len(seen), err
}

// KillGroup sends SIGKILL to every process in a cgroup of the lab and returns the killed PIDs. name
// is a host, "forwarder" for the forwarder of API connections, or "" for all processes.
func KillGroup(name string) []int {
	var killed []int
	for _, pid := range labProcesses(name) {
		if syscall.Kill(pid, syscall.SIGKILL) == nil {
			killed = append(killed, pid)
		}
	}
	return killed
}

// labProcesses returns the PIDs of the processes in a cgroup of the lab: in the pids hierarchy of
// cgroup v1, or in cgroup v2.
func labProcesses(group string) []int {
	var out []int
	for _, root := range []string{"/sys/fs/cgroup/pids" + lab.CgroupRoot(), "/sys/fs/cgroup" + lab.CgroupRoot()} {
		_ = filepath.WalkDir(filepath.Join(root, group), func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.Name() != "cgroup.procs" {
				return nil // the cgroup was deleted meanwhile
			}
			raw, _ := os.ReadFile(path)
			for _, f := range strings.Fields(string(raw)) {
				if pid, err := strconv.Atoi(f); err == nil && pid > 0 {
					out = append(out, pid)
				}
			}
			return nil
		})
	}
	return out
}
