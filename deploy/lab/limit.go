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

// LimitMemory bounds the memory of all hosts together, in bytes: who takes more is ended by the kernel inside the lab,
// and the machine goes on. It holds until the lab is taken down or started again, or another limit is set; 0 takes the limit
// away.
func (l *Lab) LimitMemory(bytes int64) error {
	return limitMemory(root, bytes)
}

// Confine moves this process, and what it starts from now on, into a cgroup of its own below the machine's root with so
// many bytes of memory. The returned function moves it back and removes the cgroup.
func Confine(name string, bytes int64) (release func() error, err error) {
	root := cgroupMount
	if unified() {
		handDown("", "memory")
	} else {
		root = filepath.Join(cgroupMount, "memory")
	}
	before, err := memoryCgroup()
	if err != nil {
		return nil, err
	}
	dir := filepath.Join(root, name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("cgroup %s: %w", name, err)
	}
	enter := func(dir string) error {
		return os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(os.Getpid())), 0)
	}
	if err := errors.Join(limitMemory(name, bytes), enter(dir)); err != nil {
		return nil, fmt.Errorf("confining this process to cgroup %s: %w", name, err)
	}
	return func() error {
		if err := enter(filepath.Join(root, before)); err != nil {
			return fmt.Errorf("leaving cgroup %s: %w", name, err)
		}
		return os.Remove(dir)
	}, nil
}

// memoryCgroup is the cgroup of this process in the hierarchy that counts memory.
func memoryCgroup() (string, error) {
	raw, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(raw)) {
		// hierarchy:controllers:path; on v2 the one line has no controllers.
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) == 3 && (unified() && f[1] == "" || slices.Contains(strings.Split(f[1], ","), "memory")) {
			return f[2], nil
		}
	}
	return "", errors.New("this process is in no memory cgroup: mount one")
}

func limitMemory(group string, bytes int64) error {
	file, value := filepath.Join(cgroupMount, "memory", group, "memory.limit_in_bytes"), strconv.FormatInt(bytes, 10)
	if bytes == 0 {
		value = "-1"
	}
	if unified() {
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
