// Package procfs reads what processes and the machine spend: CPU time and
// memory, from /proc and the cgroup file systems.
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

// CPU is the CPU time that a process has spent, in seconds.
func CPU(pid int) (float64, error) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	fields, err := statFields(raw)
	if err != nil {
		return 0, fmt.Errorf("process %d: %w", pid, err)
	}
	user, err1 := strconv.ParseFloat(fields[11], 64)
	system, err2 := strconv.ParseFloat(fields[12], 64)
	return (user + system) / ticksPerSecond, errors.Join(err1, err2)
}

// statFields are the fields of a stat line from the state on; the name before
// them, in brackets, may hold spaces and brackets.
func statFields(raw []byte) ([]string, error) {
	fields := strings.Fields(string(raw[bytes.LastIndexByte(raw, ')')+1:]))
	if len(fields) < 13 {
		return nil, fmt.Errorf("stat has %d fields after the name", len(fields))
	}
	return fields, nil
}

// GroupCPU is the CPU time that everything ever below a cgroup has spent, in
// seconds; short-lived processes are in it.
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

// Host is the busy and the total time of all processors, in ticks.
func Host() (busy, total float64, err error) {
	raw, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, 0, err
	}
	line, _, _ := strings.Cut(string(raw), "\n")
	return hostTimes(line)
}

func hostTimes(line string) (busy, total float64, err error) {
	fields := strings.Fields(line)
	if len(fields) < 9 || fields[0] != "cpu" {
		return 0, 0, fmt.Errorf("first line of /proc/stat: %q", line)
	}
	for i, f := range fields[1:9] { // guest times after these are in user time already
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

// Memory is what a process holds, in bytes.
type Memory struct {
	Anonymous float64 // its own: heap, stacks
	File      float64 // mapped files: its text, shared with other processes of the same binary
}

// ReadMemory reads a process's resident memory.
func ReadMemory(pid int) (Memory, error) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return Memory{}, err
	}
	anonymous, err1 := kilobytes(raw, "RssAnon:")
	file, err2 := kilobytes(raw, "RssFile:")
	return Memory{anonymous, file}, errors.Join(err1, err2)
}

// PSS is a process's proportional share of memory, in bytes.
func PSS(pid int) (float64, error) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		return 0, err
	}
	return kilobytes(raw, "Pss:")
}

// kilobytes reads "Name:  123 kB" as bytes.
func kilobytes(raw []byte, name string) (float64, error) {
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
	Name        string // of the thread group: 15 characters at most
}

// Below lists the processes whose cgroup is at or below a path. Processes that
// end meanwhile are left out.
func Below(path string) ([]Process, error) {
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
		if err != nil || !inGroup(string(groups), path) {
			continue
		}
		raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			continue
		}
		fields, err := statFields(raw)
		if err != nil {
			continue
		}
		parent, _ := strconv.Atoi(fields[1])
		open, shut := bytes.IndexByte(raw, '('), bytes.LastIndexByte(raw, ')')
		out = append(out, Process{PID: pid, Parent: parent, Name: string(raw[open+1 : shut])})
	}
	return out, nil
}

// inGroup reads /proc/PID/cgroup: lines of "id:controllers:path".
func inGroup(groups, path string) bool {
	for line := range strings.Lines(groups) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(parts) == 3 && (parts[2] == path || strings.HasPrefix(parts[2], path+"/")) {
			return true
		}
	}
	return false
}
