package lab

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// LimitMemory limits the memory that all hosts of the lab use together to the given number of
// bytes; 0 removes the limit. Above the limit, the kernel kills processes of the lab, and no other
// processes of the machine. The limit is lost when the lab is removed or started again.
func (l *Lab) LimitMemory(bytes int64) error {
	return setMemoryLimit(root, bytes)
}

// LimitOwnMemory moves this process into a new cgroup with a memory limit in bytes. Processes that
// it starts later are also in that cgroup. path is the path of the cgroup. The function release
// moves this process back and removes the cgroup.
func LimitOwnMemory(path string, bytes int64) (release func() error, err error) {
	root := cgroupMount
	if hasCgroupV2Only() {
		delegateControllers("", "memory")
	} else {
		root = filepath.Join(cgroupMount, "memory")
	}
	before, err := memoryCgroup()
	if err != nil {
		return nil, err
	}
	dir := filepath.Join(root, path)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("cgroup %s: %w", path, err)
	}
	enter := func(dir string) error {
		return os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(os.Getpid())), 0)
	}
	if err := errors.Join(setMemoryLimit(path, bytes), enter(dir)); err != nil {
		return nil, fmt.Errorf("confining this process to cgroup %s: %w", path, err)
	}
	return func() error {
		if err := enter(filepath.Join(root, before)); err != nil {
			return fmt.Errorf("leaving cgroup %s: %w", path, err)
		}
		return os.Remove(dir)
	}, nil
}

// memoryCgroup returns the path of the cgroup of this process, in the cgroup hierarchy with the
// memory controller.
func memoryCgroup() (string, error) {
	raw, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(raw)) {
		// A line is HIERARCHY:CONTROLLERS:PATH. On v2, there is one line without controllers.
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) == 3 && (hasCgroupV2Only() && f[1] == "" || slices.Contains(strings.Split(f[1], ","), "memory")) {
			return f[2], nil
		}
	}
	return "", errors.New("this process is in no memory cgroup: mount one")
}

func setMemoryLimit(group string, bytes int64) error {
	file, value := filepath.Join(cgroupMount, "memory", group, "memory.limit_in_bytes"), strconv.FormatInt(bytes, 10)
	if bytes == 0 {
		value = "-1"
	}
	if hasCgroupV2Only() {
		file = filepath.Join(cgroupMount, group, "memory.max")
		if bytes == 0 {
			value = "max"
		}
	}
	if err := os.WriteFile(file, []byte(value), 0); err != nil {
		return fmt.Errorf("memory limit of cgroup %s: %w", group, err)
	}
	return nil
}
