// Package procfs reads the CPU time and memory of processes, cgroups and the machine from /proc and
// the cgroup file systems.
package procfs

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

const ticksPerSecond = 100 // USER_HZ, fixed by the kernel's interface

// CPU returns the CPU time of a process in seconds.
func CPU(pid int) (float64, error) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	fields, err := parseStatFields(raw)
	if err != nil {
		return 0, fmt.Errorf("process %d: %w", pid, err)
	}
	user, err1 := strconv.ParseFloat(fields[11], 64)
	system, err2 := strconv.ParseFloat(fields[12], 64)
	return (user + system) / ticksPerSecond, errors.Join(err1, err2)
}

// parseStatFields returns the fields of a stat line from the state on. The process name before them
// is in parentheses, and may contain spaces and parentheses.
func parseStatFields(raw []byte) ([]string, error) {
	fields := strings.Fields(string(raw[bytes.LastIndexByte(raw, ')')+1:]))
	if len(fields) < 13 {
		return nil, fmt.Errorf("stat has %d fields after the name", len(fields))
	}
	return fields, nil
}

// GroupCPU returns the CPU time in seconds of all processes, including exited ones, that were in a
// cgroup or below it. It supports cgroup v1 and v2.
func GroupCPU(path string) (float64, error) {
	const root = "/sys/fs/cgroup"
	if raw, err := os.ReadFile(filepath.Join(root, path, "cpu.stat")); err == nil {
		for line := range strings.Lines(string(raw)) {
			if v, ok := strings.CutPrefix(line, "usage_usec "); ok {
				us, err := strconv.ParseFloat(strings.TrimSpace(v), 64)
				return us / 1e6, err
			}
		}
	}
	raw, err := os.ReadFile(filepath.Join(root, "cpuacct", path, "cpuacct.usage"))
	if err != nil {
		return 0, err
	}
	ns, err := strconv.ParseFloat(strings.TrimSpace(string(raw)), 64)
	return ns / 1e9, err
}

// Host returns the busy and the total time of all processors, in ticks of 10 ms.
func Host() (busy, total float64, err error) {
	raw, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, 0, err
	}
	line, _, _ := strings.Cut(string(raw), "\n")
	return parseHostTimes(line)
}

func parseHostTimes(line string) (busy, total float64, err error) {
	fields := strings.Fields(line)
	if len(fields) < 9 || fields[0] != "cpu" {
		return 0, 0, fmt.Errorf("first line of /proc/stat: %q", line)
	}
	for i, f := range fields[1:9] { // the guest times that follow are included in the user time
		v, err := strconv.ParseFloat(f, 64)
		if err != nil {
			return 0, 0, fmt.Errorf("first line of /proc/stat: %w", err)
		}
		total += v
		if i != 3 && i != 4 { // idle, iowait
			busy += v
		}
	}
	return busy, total, nil
}

// Memory is the resident memory of a process, in bytes.
type Memory struct {
	Anonymous float64 // private: heap and stacks
	File      float64 // mapped files: its code, shared with other processes of the same binary
}

// ReadMemory returns a process's resident memory.
func ReadMemory(pid int) (Memory, error) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return Memory{}, err
	}
	anonymous, err1 := parseKilobytes(raw, "RssAnon:")
	file, err2 := parseKilobytes(raw, "RssFile:")
	return Memory{anonymous, file}, errors.Join(err1, err2)
}

// PSS returns a process's proportional set size in bytes.
func PSS(pid int) (float64, error) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		return 0, err
	}
	return parseKilobytes(raw, "Pss:")
}

// parseKilobytes returns the value of a line "Name: 123 kB" in bytes.
func parseKilobytes(raw []byte, name string) (float64, error) {
	for line := range strings.Lines(string(raw)) {
		f := strings.Fields(line)
		if len(f) == 3 && f[0] == name && f[2] == "kB" {
			v, err := strconv.ParseFloat(f[1], 64)
			return v * 1024, err
		}
	}
	return 0, fmt.Errorf("no line %s", name)
}

// Process is one process of the machine.
type Process struct {
	PID, Parent int
	Name        string // of the thread group, at most 15 characters
}

// ProcessesBelow lists the processes with a cgroup at or below a path. Processes that exit
// meanwhile are omitted.
func ProcessesBelow(path string) ([]Process, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var out []Process
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		groups, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
		if err != nil || !isInCgroup(string(groups), path) {
			continue
		}
		raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			continue
		}
		fields, err := parseStatFields(raw)
		if err != nil {
			continue
		}
		parent, _ := strconv.Atoi(fields[1])
		open, shut := bytes.IndexByte(raw, '('), bytes.LastIndexByte(raw, ')')
		out = append(out, Process{PID: pid, Parent: parent, Name: string(raw[open+1 : shut])})
	}
	return out, nil
}

// isInCgroup parses /proc/PID/cgroup, with lines of "id:controllers:path", and reports whether a
// cgroup is at or below path.
func isInCgroup(groups, path string) bool {
	for line := range strings.Lines(groups) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(parts) == 3 && (parts[2] == path || strings.HasPrefix(parts[2], path+"/")) {
			return true
		}
	}
	return false
}
