// Package journal is what a test driver's processes on all nodes write down about their volumes, in one file, and judges
// whether a volume was ever where it must not be.
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

// What happens to volumes. A line is written when it has happened, PowerCut by whoever cuts it.
const (
	Attached = "attached"
	Detached = "detached"
	Mounted  = "mounted"
	Unmount  = "unmounted"
	PowerCut = "power cut"
)

// Line is one event.
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

// Locked runs f while nobody else, in any process, is in Locked of the same folder.
func Locked(dir string, f func() error) (err error) {
	lock, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if wrong := lock.Close(); err == nil { // joined, it would not be what f says
			err = wrong
		}
	}()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return err
	}
	return f()
}

func file(dir string) string { return filepath.Join(dir, "journal") }

// Write adds a line.
func Write(dir string, l Line) (err error) {
	l.At = time.Now()
	b, err := json.Marshal(l)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(file(dir), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	_, err = f.Write(append(b, '\n'))
	return err
}

// Read returns all lines in their order.
func Read(dir string) ([]Line, error) {
	f, err := os.Open(file(dir))
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

// Record writes a line unless the journal has its effect already. A driver records every completed call, also one that found
// nothing to do: the process of an earlier call may have been killed between the change and its line. The caller holds
// Locked and has checked that the volume is in the state of the line.
func Record(dir string, l Line) error {
	lines, err := Read(dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	volumes := newState()
	for _, earlier := range lines {
		volumes.apply(earlier)
	}
	if volumes.has(l) {
		return nil
	}
	return Write(dir, l)
}

// state is where volumes are attached and mounted after the lines of a journal.
type state struct {
	attached map[string]string // node by volume
	mounts   map[string][]Line // by volume
}

func newState() state { return state{map[string]string{}, map[string][]Line{}} }

// apply changes the state by a line, whether or not the line is allowed in it.
func (s state) apply(l Line) {
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
		s.mounts[l.Volume] = slices.DeleteFunc(s.mounts[l.Volume], func(m Line) bool { return m.Node == l.Node && m.Path == l.Path })
	case PowerCut:
		for v := range s.mounts {
			s.mounts[v] = slices.DeleteFunc(s.mounts[v], func(m Line) bool { return m.Node == l.Node })
		}
	}
}

// has reports whether a line would change nothing.
func (s state) has(l Line) bool {
	mounted := slices.ContainsFunc(s.mounts[l.Volume], func(m Line) bool { return m.Node == l.Node && m.Path == l.Path })
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

// Wrong returns the violations in a journal: a volume attached to two nodes, mounted on a node to which it is not attached,
// or detached from a node that had it mounted and had power.
func Wrong(lines []Line) (wrong []string) {
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
			no(l, "nobody knows what that is")
		}
		volumes.apply(l)
	}
	return wrong
}
