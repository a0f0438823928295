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

// State is the state of the lab of this machine.
type State int

const (
	NoLab      State = iota // no lab exists
	Busy                    // a process is creating, starting, or removing it
	Unfinished              // its creation or removal was interrupted; it cannot be used
	Down                    // it exists on disk without processes: see StartAgain
	Running
)

// ErrDown is returned for a lab without processes.
var ErrDown = errors.New("the lab on this machine is down: start it with 'kctl lab up' or take it away with 'kctl lab down'")

var errUnfinished = errors.New("the lab on this machine is unfinished, because its creation or removal was interrupted: " +
	"'kctl lab up' creates it again, 'kctl lab down' removes its remains")

// Process identifies a process of this machine, even after its PID was reused.
type Process struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // in clock ticks since boot
	Boot  string `json:"boot"`  // boot ID
}

// ProcessOf returns the process that has a PID now. If it cannot be read, its fields are empty, and
// it counts as exited.
func ProcessOf(pid int) *Process {
	p := &Process{PID: pid, Boot: bootID()}
	p.Start, _ = startTicks(pid)
	return p
}

func thisProcess() *Process { return ProcessOf(os.Getpid()) }

// IsAlive reports whether the process is still running.
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

// startTicks returns the start time of a running process.
func startTicks(pid int) (uint64, bool) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, false
	}
	// The name in parentheses can contain any character. The fields after it start with the state
	// (field 3); field 22 is the start time.
	fields := bytes.Fields(raw[bytes.LastIndexByte(raw, ')')+1:])
	if len(fields) < 20 || fields[0][0] == 'Z' || fields[0][0] == 'X' {
		return 0, false
	}
	start, err := strconv.ParseUint(string(fields[19]), 10, 64)
	return start, err == nil
}

// Found is the result of FindLab.
type Found struct {
	Lab   *Lab // nil if none exists
	State State
	// Test reports that a test run created the lab, and removes it at its end. A lab of a release
	// that did not record its maker is recognized by the folder of its kubeconfig, and has no
	// Maker.
	Test bool
}

// StateError returns why the lab cannot be used, or nil.
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

// BusyError returns an error if a process is creating, starting, or removing the lab.
func (f Found) BusyError() error {
	if f.State != Busy {
		return nil
	}
	return fmt.Errorf("process %d is creating, starting or removing the lab of this machine: wait until it has ended", f.Lab.Config.AtWork.PID)
}

// FindLab returns the lab of this machine and its state.
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
		seen.initialized = l.isInitialized()
	}
	return Found{Lab: l, State: seen.labState(), Test: c.TestRun || seen.legacy && isInTestFolder(c.Kubeconfig)}, nil
}

// labFacts are the facts that determine the state of a lab.
type labFacts struct {
	busy        bool // a process is creating, starting, or removing it
	interrupted bool // such a process has exited before it finished
	built       bool // its creation has finished
	legacy      bool // a release that did not record the three facts above created it
	initialized bool // every host has the files of a host that has joined; only known for legacy labs
	alive       bool // one of its processes is running
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

// IsAnyProcessAlive reports whether any process of a lab is running.
func IsAnyProcessAlive() bool { return hasLiveProcess(CgroupRoot()) }

func hasLiveProcess(path string) bool {
	return slices.ContainsFunc(cgroupPIDs(path), func(pid int) bool { return !isZombie(pid) })
}

// isInitialized reports whether all hosts have joined the cluster, according to the files on their
// disks.
func (l *Lab) isInitialized() bool {
	for _, h := range l.Config.Hosts {
		proof := map[Role]string{
			RoleControlPlane: "lib/controlplane/cluster.json", RoleWorker: "lib/session/node.pem", RoleRegistry: "lib",
		}[h.Role]
		if !fileExists(filepath.Join(h.stateDir(), proof)) {
			return false
		}
	}
	return true
}

// Prefixes of the temporary folders that a test run creates for a lab. They are removed with the
// lab.
const (
	TestFolder   = "keelson-test-"   // for the kubeconfig
	AccessFolder = "keelson-access-" // for the files that the control plane reads
)

// isInTestFolder reports whether a file is in a folder that a test run created for the kubeconfig
// of its lab.
func isInTestFolder(file string) bool {
	dir := filepath.Dir(file)
	return strings.HasPrefix(filepath.Base(dir), TestFolder) && filepath.Dir(dir) == filepath.Clean(os.TempDir())
}

// removeTestFolders removes the temporary folders of a test run's lab.
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
