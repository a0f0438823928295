// Package filewatch reports changes of files while a daemon runs, and reads files of bounded size.
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

// PollInterval is how often daemons check whether their configuration and certificate files have
// changed.
const PollInterval = 2 * time.Second

// Follow checks files at the given interval until ctx ends, and then returns the error of ctx. The
// files are those of the snapshot previous. It calls changed whenever a file differs from the last
// check, or from previous in the first check. The caller must take previous before it reads the
// files, so that no change is missed. If previous has no files, Follow only waits for the end of
// ctx.
func Follow(ctx context.Context, interval time.Duration, previous Snapshot, changed func()) error {
	if previous.hasNoPath() {
		<-ctx.Done()
		return ctx.Err()
	}
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ticker.C:
		}
		if now := TakeSnapshot(previous.paths...); !now.Equal(previous) {
			previous = now
			changed()
		}
	}
}

// Snapshot is the state of some files at one time: their modification times, sizes and inodes.
type Snapshot struct {
	paths  []string
	stamps []stamp
}

type stamp struct {
	changed time.Time
	size    int64
	inode   uint64
}

// TakeSnapshot returns the current state of the files. Empty paths are ignored.
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

// Equal reports whether all files are the same in both snapshots, which must be of the same paths.
func (m Snapshot) Equal(o Snapshot) bool {
	for i := range m.stamps {
		if m.stamps[i] != o.stamps[i] {
			return false
		}
	}
	return true
}

// stampFile returns the modification time, size and inode of a file. At least one of them differs
// after the file was changed or replaced. The result is zero if the file does not exist.
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

// Read returns the content of the regular file at path. A file of more than limit bytes, or of
// another type, is an error.
func Read(path string, limit int64) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // opening a pipe must not block the caller
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
