// Package filewatch tells of files that change while a daemon runs, and bounds what is read of them.
package filewatch

import (
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"syscall"
	"time"
)

// PollInterval is how often files are looked at.
const PollInterval = 2 * time.Second

// Follow calls changed after each look at which one of the files is not as it was at the look before, until ctx ends.
// Whoever reads the files must begin with a Mark from before that reading. Without files nothing is looked at.
func Follow(ctx context.Context, every time.Duration, last Snapshot, changed func()) error {
	if last.hasNoPath() {
		<-ctx.Done()
		return ctx.Err()
	}
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ticker.C:
		}
		if now := TakeSnapshot(last.paths...); !now.Equal(last) {
			last = now
			changed()
		}
	}
}

// Snapshot is how files looked at a time.
type Snapshot struct {
	paths  []string
	stamps []stamp
}

type stamp struct {
	changed time.Time
	size    int64
	inode   uint64
}

// TakeSnapshot looks at files; "" is none.
func TakeSnapshot(paths ...string) Snapshot {
	m := Snapshot{paths: paths, stamps: make([]stamp, len(paths))}
	for i, p := range paths {
		if p != "" {
			m.stamps[i] = stampFile(p)
		}
	}
	return m
}

func (m Snapshot) hasNoPath() bool {
	return !slices.ContainsFunc(m.paths, func(p string) bool { return p != "" })
}

// Equal says whether the same files are as they were.
func (m Snapshot) Equal(o Snapshot) bool {
	for i := range m.stamps {
		if m.stamps[i] != o.stamps[i] {
			return false
		}
	}
	return true
}

// stampFile changes when a file does, also when another takes its name; it is zero for one that is not there.
func stampFile(path string) (s stamp) {
	info, err := os.Stat(path)
	if err != nil {
		return s
	}
	s.changed, s.size = info.ModTime(), info.Size()
	if sys, ok := info.Sys().(*syscall.Stat_t); ok {
		s.inode = sys.Ino
	}
	return s
}

// Read reads a regular file of at most max bytes.
func Read(path string, limit int64) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // a pipe must not hold the caller
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a regular file", path)
	}
	data, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", path, err)
	}
	if int64(len(data)) > limit {
		return nil, fmt.Errorf("%s is larger than %d bytes", path, limit)
	}
	return data, nil
}
