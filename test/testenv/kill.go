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

// KillEverything kills every process of the lab with SIGKILL, as fast as it finds them, and returns how many there were when
// none is left.
func KillEverything() (killed int, err error) {
	seen := map[int]bool{}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	err = wait.For(ctx, time.Millisecond, func() error {
		for _, pid := range KillGroup("") {
			seen[pid] = true
		}
		if lab.IsAnyProcessAlive() {
			return errors.New("processes of the lab outlive SIGKILL")
		}
		return nil
	})
	return len(seen), err
}

// KillGroup kills every process that it finds in a group of the lab, by SIGKILL, and returns their pids: a host's by its name,
// "forwarder" is what leads to the API, "" are all.
func KillGroup(name string) []int {
	var killed []int
	for _, pid := range labProcesses(name) {
		if syscall.Kill(pid, syscall.SIGKILL) == nil {
			killed = append(killed, pid)
		}
	}
	return killed
}

// labProcesses are the pids of a group, by its cgroups: in the hierarchy that counts processes, or the only one.
func labProcesses(group string) []int {
	var out []int
	for _, root := range []string{"/sys/fs/cgroup/pids" + lab.CgroupRoot(), "/sys/fs/cgroup" + lab.CgroupRoot()} {
		_ = filepath.WalkDir(filepath.Join(root, group), func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.Name() != "cgroup.procs" {
				return nil // a group that went meanwhile
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
