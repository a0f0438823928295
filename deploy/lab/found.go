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

// State says how much of a lab there is on this machine.
type State int

const (
	None       State = iota // no lab
	Busy                    // a process builds it, starts it again or takes it away
	Unfinished              // who built it or took it away was cut off: it is of no use
	Down                    // it is on disk, and none of its processes lives: StartAgain
	Running
)

// ErrDown says that the lab of this machine has no process.
var ErrDown = errors.New("the lab on this machine is down: start it with 'kctl lab up' or take it away with 'kctl lab down'")

var errUnfinished = errors.New("the lab on this machine is unfinished, for what built it or took it away was cut off: " +
	"'kctl lab up' builds it anew, 'kctl lab down' takes away what there is of it")

// Process is a process of this machine, told from a later one with its number.
type Process struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // clock ticks after the machine's boot
	Boot  string `json:"boot"`  // which boot
}

// ProcessOf is the process that has a number now. What cannot be read of it is empty, and then it counts as gone.
func ProcessOf(pid int) *Process {
	p := &Process{PID: pid, Boot: boot()}
	p.Start, _ = started(pid)
	return p
}

func thisProcess() *Process { return ProcessOf(os.Getpid()) }

// Lives says whether the process has not ended.
func (p *Process) Lives() bool {
	if p == nil || p.Boot == "" || p.Boot != boot() {
		return false
	}
	start, ok := started(p.PID)
	return ok && start == p.Start
}

func boot() string {
	raw, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(raw))
}

// started is when a process that lives began.
func started(pid int) (uint64, bool) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, false
	}
	// The name, in parentheses, may hold anything. After it come the state, field 3, and all the others: field 22 is wanted.
	fields := bytes.Fields(raw[bytes.LastIndexByte(raw, ')')+1:])
	if len(fields) < 20 || fields[0][0] == 'Z' || fields[0][0] == 'X' {
		return 0, false
	}
	start, err := strconv.ParseUint(string(fields[19]), 10, 64)
	return start, err == nil
}

// Found is the lab of this machine as it was found.
type Found struct {
	Lab   *Lab // nil where there is none
	State State
	// Test says that a run of tests made it, which takes it away at its end. One made by a release that did not write its
	// makers down is known by the folder of its kubeconfig, and has no Maker.
	Test bool
}

// Err is why the lab cannot be worked with, nil where it can.
func (f Found) Err() error {
	switch f.State {
	case None:
		return ErrNotUp
	case Unfinished:
		return errUnfinished
	case Down:
		return ErrDown
	default:
		return nil
	}
}

// BusyError is nil unless a process is at work on the lab.
func (f Found) BusyError() error {
	if f.State != Busy {
		return nil
	}
	return fmt.Errorf("process %d builds the lab of this machine, starts it or takes it away: wait until it has ended", f.Lab.Config.AtWork.PID)
}

// Look finds the lab of this machine and what state it is in.
func Look(out io.Writer) (Found, error) {
	l, err := Open(out)
	if errors.Is(err, ErrNotUp) {
		return Found{}, nil
	}
	if err != nil {
		return Found{}, err
	}
	c := l.Config
	seen := facts{
		working: c.AtWork.Lives(), cutOff: c.AtWork != nil && !c.AtWork.Lives(),
		built: c.Built, older: c.Maker == nil, alive: Alive(),
	}
	if seen.older {
		seen.initialised = l.initialised()
	}
	return Found{Lab: l, State: seen.state(), Test: c.TestRun || seen.older && testFolder(c.Kubeconfig)}, nil
}

// facts are what the state of a lab follows from.
type facts struct {
	working     bool // a process is at work on it
	cutOff      bool // one was, and did not come to its end
	built       bool // it was finished
	older       bool // made by a release that noted none of the three above
	initialised bool // every host has what it gets when it becomes part of the cluster; known of older ones only
	alive       bool // a process of it lives
}

func (f facts) state() State {
	if f.older && (f.alive || f.initialised) {
		f.built = true
	}
	switch {
	case f.working:
		return Busy
	case !f.built:
		return Unfinished
	case f.cutOff || !f.alive:
		return Down
	}
	return Running
}

// Alive says whether any process of a lab lives.
func Alive() bool { return alive(CgroupRoot()) }

func alive(path string) bool {
	return slices.ContainsFunc(processes(path), func(pid int) bool { return !isZombie(pid) })
}

// initialised says whether all hosts are part of the cluster, by what lies on their disks.
func (l *Lab) initialised() bool {
	for _, h := range l.Config.Hosts {
		proof := map[Role]string{
			RoleControlPlane: "lib/controlplane/cluster.json", RoleWorker: "lib/session/node.pem", RoleRegistry: "lib",
		}[h.Role]
		if !exists(filepath.Join(h.stateDir(), proof)) {
			return false
		}
	}
	return true
}

// The folders that a test run makes for a lab below the folder of temporary files; what is in them goes with the lab.
const (
	TestFolder   = "keelson-test-"   // the kubeconfig's
	AccessFolder = "keelson-access-" // that of the files that the control plane reads
)

// testFolder says whether a file is in a folder that a test run made for its lab's kubeconfig.
func testFolder(file string) bool {
	dir := filepath.Dir(file)
	return strings.HasPrefix(filepath.Base(dir), TestFolder) && filepath.Dir(dir) == filepath.Clean(os.TempDir())
}

// removeTestFolders removes the temporary folders of a lab that a test run made.
func (c Config) removeTestFolders() error {
	if !c.TestRun && !testFolder(c.Kubeconfig) {
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
