// Package journal is the shared event log of the test CSI driver's processes on all nodes. It also
// detects volumes that were attached or mounted on the wrong node.
package journal

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// The events of a volume or node. The driver writes a line after the event has happened. The test
// that cuts a node's power writes PowerCut.
const (
	Attached = "attached"
	Detached = "detached"
	Mounted  = "mounted"
	Unmount  = "unmounted"
	PowerCut = "power cut"
)

// Line is one event of the journal. PowerCut has neither Volume nor Path.
type Line struct {
	At     time.Time `json:"at"`
	What   string    `json:"what"`
	Node   string    `json:"node"`
	Volume string    `json:"volume,omitempty"`
	Path   string    `json:"path,omitempty"`
}

func (l Line) String() string {
	return fmt.Sprintf("%s %s: %s %s %s", l.At.Format("15:04:05.000"), l.Node, l.Volume, l.What, l.Path)
}

// WithLock runs f under an exclusive lock on a file in the folder dir, which also excludes other
// processes. It returns the error of f, or that of closing the lock file.
func WithLock(dir string, f func() error) (err error) {
	lock, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if wrong := lock.Close(); err == nil { // not joined, to keep the gRPC status of f
			err = wrong
		}
	}()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return err
	}
	return f()
}

func journalFile(dir string) string { return filepath.Join(dir, "journal") }

// Write appends the line l to the journal in the folder dir, with the current time.
func Write(dir string, l Line) (err error) {
	l.At = time.Now()
	b, err := json.Marshal(l)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(journalFile(dir), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	_, err = f.Write(append(b, '\n'))
	return err
}

// Read returns all lines in the order in which they were written.
func Read(dir string) ([]Line, error) {
	f, err := os.Open(journalFile(dir))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var out []Line
	for s := bufio.NewScanner(f); s.Scan(); {
		var l Line
		if err := json.Unmarshal(s.Bytes(), &l); err != nil {
			return nil, fmt.Errorf("line %q of the journal: %w", s.Text(), err)
		}
		out = append(out, l)
	}
	return out, nil
}

// Record writes a line unless the journal already has its effect. A driver records every completed
// call, even if the call found nothing to do: the process of an earlier call may have been killed
// between the change and its line. The caller holds WithLock's lock and has checked that the volume
// is in the state that the line describes.
func Record(dir string, l Line) error {
	lines, err := Read(dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	volumes := newState()
	for _, earlier := range lines {
		volumes.applyLine(earlier)
	}
	if volumes.includes(l) {
		return nil
	}
	return Write(dir, l)
}

// state contains the node to which each volume is attached, and its mounts, after the lines of a
// journal.
type state struct {
	attached map[string]string // node by volume
	mounts   map[string][]Line // mount events by volume
}

func newState() state { return state{map[string]string{}, map[string][]Line{}} }

// applyLine changes the state by a line, even if the line is a violation.
func (s state) applyLine(l Line) {
	switch l.What {
	case Attached:
		s.attached[l.Volume] = l.Node
	case Detached:
		if s.attached[l.Volume] == l.Node {
			delete(s.attached, l.Volume)
		}
	case Mounted:
		s.mounts[l.Volume] = append(s.mounts[l.Volume], l)
	case Unmount:
		s.mounts[l.Volume] = slices.DeleteFunc(s.mounts[l.Volume], func(m Line) bool {
			return m.Node == l.Node && m.Path == l.Path
		})
	case PowerCut:
		for v := range s.mounts {
			s.mounts[v] = slices.DeleteFunc(s.mounts[v], func(m Line) bool { return m.Node == l.Node })
		}
	}
}

// includes reports whether applying the line would change nothing. It is always false for PowerCut.
func (s state) includes(l Line) bool {
	mounted := slices.ContainsFunc(s.mounts[l.Volume], func(m Line) bool {
		return m.Node == l.Node && m.Path == l.Path
	})
	switch l.What {
	case Attached:
		return s.attached[l.Volume] == l.Node
	case Detached:
		return s.attached[l.Volume] != l.Node
	case Mounted:
		return mounted
	case Unmount:
		return !mounted
	}
	return false
}

// FindViolations returns the violations in a journal. A volume must not be attached to two nodes,
// or mounted on a node to which it is not attached. It must not be detached from a node that has it
// mounted and has power.
func FindViolations(lines []Line) (wrong []string) {
	volumes := newState()
	no := func(l Line, format string, args ...any) {
		wrong = append(wrong, l.String()+": "+fmt.Sprintf(format, args...))
	}
	for _, l := range lines {
		at := volumes.attached[l.Volume]
		switch l.What {
		case Attached:
			if at != "" && at != l.Node {
				no(l, "it is attached to %s", at)
			}
		case Detached:
			if m := volumes.mounts[l.Volume]; at == l.Node && len(m) > 0 {
				no(l, "it is mounted on %s at %s", m[0].Node, m[0].Path)
			}
		case Mounted:
			if at != l.Node {
				no(l, "it is attached to %q", at)
			}
		case Unmount, PowerCut:
		default:
			no(l, "unknown event")
		}
		volumes.applyLine(l)
	}
	return wrong
}
