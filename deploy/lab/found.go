package lab

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// State is the state of a lab on this machine, as FindLab returns it.
type State int

const (
	NoLab      State = iota // there is no lab on this machine
	Busy                    // a process is creating, starting, or removing the lab
	Unfinished              // the creation or removal was interrupted; the lab cannot be used
	Down                    // no process of the lab runs; StartAgain starts it from its disks
	Running
)

// ErrDown is returned for a lab without running processes, which StartAgain can start.
var ErrDown = errors.New("the lab on this machine is down: start it with 'kctl lab up' or take it away " +
	"with 'kctl lab down'")

var errUnfinished = errors.New("the lab on this machine is unfinished, because its creation or removal " +
	"was interrupted: 'kctl lab up' creates it again, 'kctl lab down' removes its remains")

// Process identifies a process of this machine by its PID and start time. A later process with the
// same PID is a different Process.
type Process struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // in clock ticks since boot
	Boot  string `json:"boot"`  // boot ID
}

// ProcessOf returns the Process that currently has the given PID. If there is no such process, the
// result has no start time, and IsAlive returns false.
func ProcessOf(pid int) *Process {
	p := &Process{PID: pid, Boot: bootID()}
	p.Start, _ = startTicks(pid)
	return p
}

func thisProcess() *Process { return ProcessOf(os.Getpid()) }

// IsAlive reports whether the process is still running. It returns false after a reboot of the
// machine, and for nil.
func (p *Process) IsAlive() bool {
	if p == nil || p.Boot == "" || p.Boot != bootID() {
		return false
	}
	start, ok := startTicks(p.PID)
	return ok && start == p.Start
}

func bootID() string {
	raw, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(raw))
}

// startTicks returns the start time of the process with a PID, in clock ticks since boot. The
// second result is false if there is no such process, or if it is a zombie.
func startTicks(pid int) (uint64, bool) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, false
	}
	// The program name in parentheses can contain any character. The field after it is field 3, the
	// state; field 22 is the start time.
	fields := bytes.Fields(raw[bytes.LastIndexByte(raw, ')')+1:])
	if len(fields) < 20 || fields[0][0] == 'Z' || fields[0][0] == 'X' {
		return 0, false
	}
	start, err := strconv.ParseUint(string(fields[19]), 10, 64)
	return start, err == nil
}

// Found is the lab that FindLab has found, with its state.
type Found struct {
	Lab   *Lab // nil if there is no lab
	State State
	// Test reports that a test run created the lab and removes it at its end. Older releases did
	// not record this. Their labs are recognized by the folder of the kubeconfig; see TestFolder.
	Test bool
}

// StateError returns an error if the lab cannot be used in its state: ErrNotUp, ErrDown, or another
// error. It returns nil for a running or busy lab.
func (f Found) StateError() error {
	switch f.State {
	case NoLab:
		return ErrNotUp
	case Unfinished:
		return errUnfinished
	case Down:
		return ErrDown
	default:
		return nil
	}
}

// BusyError returns an error if another process is creating, starting, or removing the lab, and nil
// otherwise.
func (f Found) BusyError() error {
	if f.State != Busy {
		return nil
	}
	return fmt.Errorf("process %d is creating, starting or removing the lab of this machine: wait until it has ended",
		f.Lab.Config.AtWork.PID)
}

// FindLab returns the lab that NameEnv selects on this machine, and its state. If there is no such
// lab, the state is NoLab and the error is nil. The returned Lab prints progress messages to out.
func FindLab(out io.Writer) (Found, error) {
	l, err := Open(out)
	if errors.Is(err, ErrNotUp) {
		return Found{}, nil
	}
	if err != nil {
		return Found{}, err
	}
	c := l.Config
	seen := labFacts{
		busy: c.AtWork.IsAlive(), interrupted: c.AtWork != nil && !c.AtWork.IsAlive(),
		built: c.Built, legacy: c.Maker == nil, alive: IsAnyProcessAlive(),
	}
	if seen.legacy {
		seen.initialized = l.hosts().isInitialized()
	}
	return Found{Lab: l, State: seen.labState(), Test: c.TestRun || seen.legacy && isInTestFolder(c.Kubeconfig)}, nil
}

// labFacts are the observed facts from which labState determines the state of a lab.
type labFacts struct {
	busy        bool // a process is creating, starting, or removing the lab
	interrupted bool // such a process has exited before it finished
	built       bool // Up has finished
	legacy      bool // created by a release that did not record busy, interrupted, and built
	initialized bool // the disk of every host shows that it has joined; only read for legacy labs
	alive       bool // a process of the lab is running
}

func (f labFacts) labState() State {
	if f.legacy && (f.alive || f.initialized) {
		f.built = true
	}
	switch {
	case f.busy:
		return Busy
	case !f.built:
		return Unfinished
	case f.interrupted || !f.alive:
		return Down
	}
	return Running
}

// IsAnyProcessAlive reports whether any process of the lab is running on this machine. The lab is
// the one that NameEnv selects.
func IsAnyProcessAlive() bool { return hasLiveProcess(CgroupRoot()) }

func hasLiveProcess(path string) bool {
	return slices.ContainsFunc(cgroupPIDs(path), func(pid int) bool { return !isZombie(pid) })
}

// isInitialized reports whether every host has joined the cluster at least once. It checks that the
// disk of each host has the file that the join creates.
func (hb hostBuilder) isInitialized() bool {
	for _, h := range hb.config.Hosts {
		proof := map[Role]string{
			RoleControlPlane: "lib/controlplane/cluster.json", RoleWorker: "lib/session/node.pem", RoleRegistry: "lib",
		}[h.Role]
		if !fileExists(filepath.Join(h.stateDir(), proof)) {
			return false
		}
	}
	return true
}

// Prefixes of the names of temporary folders that a test run creates for its lab. Down removes
// these folders.
const (
	TestFolder   = "keelson-test-"   // for the kubeconfig
	AccessFolder = "keelson-access-" // for the files that the control plane reads
)

// isInTestFolder reports whether a file is directly in a temporary folder with the prefix
// TestFolder. Test runs put the kubeconfig of their lab into such a folder.
func isInTestFolder(file string) bool {
	dir := filepath.Dir(file)
	return strings.HasPrefix(filepath.Base(dir), TestFolder) && filepath.Dir(dir) == filepath.Clean(os.TempDir())
}

// removeTestFolders removes the temporary folders of the lab if a test run has created the lab.
// Otherwise it removes nothing.
func (c Config) removeTestFolders() error {
	if !c.TestRun && !isInTestFolder(c.Kubeconfig) {
		return nil
	}
	var errs []error
	if dir := filepath.Dir(c.Kubeconfig); strings.HasPrefix(filepath.Base(dir), TestFolder) {
		errs = append(errs, os.RemoveAll(dir))
	}
	if strings.HasPrefix(filepath.Base(c.ControlPlaneFiles), AccessFolder) {
		errs = append(errs, os.RemoveAll(c.ControlPlaneFiles))
	}
	return errors.Join(errs...)
}
