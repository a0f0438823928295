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

// Wrong says what must not have been: a volume attached to two nodes, mounted where it is not attached, or taken from a
// node that had it mounted and power.
func Wrong(lines []Line) (wrong []string) {
	attached := map[string]string{}
	mounts := map[string][]Line{} // of a volume
	no := func(l Line, format string, args ...any) {
		wrong = append(wrong, l.String()+": "+fmt.Sprintf(format, args...))
	}
	for _, l := range lines {
		at := attached[l.Volume]
		switch l.What {
		case Attached:
			if at != "" && at != l.Node {
				no(l, "it is attached to %s", at)
			}
			attached[l.Volume] = l.Node
		case Detached:
			if at != l.Node {
				continue // once more
			}
			if m := mounts[l.Volume]; len(m) > 0 {
				no(l, "it is mounted on %s at %s", m[0].Node, m[0].Path)
			}
			delete(attached, l.Volume)
		case Mounted:
			if at != l.Node {
				no(l, "it is attached to %q", at)
			}
			mounts[l.Volume] = append(mounts[l.Volume], l)
		case Unmount:
			mounts[l.Volume] = slices.DeleteFunc(mounts[l.Volume], func(m Line) bool { return m.Node == l.Node && m.Path == l.Path })
		case PowerCut:
			for v := range mounts {
				mounts[v] = slices.DeleteFunc(mounts[v], func(m Line) bool { return m.Node == l.Node })
			}
		default:
			no(l, "nobody knows what that is")
		}
	}
	return wrong
}
