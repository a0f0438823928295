// Package diskheadroom prevents large writes that can wait, such as backups, from filling a disk
// that another directory needs.
package diskheadroom

import (
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Target is the destination of a large write.
type Target struct {
	Dir           string // directory to which the file is written; may not exist yet
	ProtectedPath string // the disk with this path must keep free space; "" or a missing path = no disk is protected

	Stat func(path string) (Usage, error) // returns the usage of the disk with a path; nil = statfs(2). Set in tests
}

// Usage is the size and the free space of a file system, in bytes, and its device number.
type Usage struct {
	Device      uint64
	Free, Total int64
}

const (
	minReserve = 1 << 30
	maxReserve = 10 << 30
	// CheckInterval is how many bytes Target.Writer writes between two checks of the free space.
	CheckInterval = 16 << 20
)

// reservedBytes returns how many bytes must stay free on a protected disk of total bytes: 5 %, but
// at least 1 GiB and at most 10 GiB. On a small disk it is at most 10 %.
func reservedBytes(total int64) int64 { return min(max(total/20, minReserve), maxReserve, total/10) }

// CheckFree returns an error if writing need bytes would exceed the free space, or leave less than
// reservedBytes free on the protected disk. It returns nil if the free space cannot be determined.
func (p Target) CheckFree(need int64) error {
	stat := p.Stat
	if stat == nil {
		stat = diskUsage
	}
	usage, err := stat(nearestExisting(p.Dir))
	if err != nil || usage.Total == 0 { // some file systems report a size of 0, and would seem full
		return nil // the write itself reports the error
	}
	if p.ProtectedPath != "" {
		if protected, err := stat(p.ProtectedPath); err == nil && protected.Device == usage.Device {
			if reserved := reservedBytes(usage.Total); usage.Free-need < reserved {
				return fmt.Errorf("%s: %s would be written, %s are free, and %s is on the same disk, of which %s must "+
					"stay free: remove files there, or choose a directory on another disk",
					p.Dir, inMiB(need), inMiB(usage.Free), p.ProtectedPath, inMiB(reserved))
			}
			return nil
		}
	}
	if need > usage.Free {
		return fmt.Errorf("%s: %s would be written, and %s are free: remove files there, or choose a directory on "+
			"another disk", p.Dir, inMiB(need), inMiB(usage.Free))
	}
	return nil
}

func inMiB(n int64) string { return fmt.Sprintf("%d MiB", (n+1<<20-1)>>20) }

// Writer returns a writer to w that calls CheckFree every CheckInterval bytes. If CheckFree returns
// an error, Write returns it.
func (p Target) Writer(w io.Writer) io.Writer { return &headroomWriter{w: w, target: p} }

type headroomWriter struct {
	w         io.Writer
	target    Target
	unchecked int64 // bytes written since the last check
}

// Write implements io.Writer. It returns the error of CheckFree, which it calls every CheckInterval
// bytes, and then writes nothing.
func (s *headroomWriter) Write(p []byte) (int, error) {
	if s.unchecked += int64(len(p)); s.unchecked >= CheckInterval {
		if err := s.target.CheckFree(s.unchecked); err != nil {
			return 0, err
		}
		s.unchecked = 0
	}
	return s.w.Write(p)
}

// nearestExisting returns the path itself if it exists, or else its nearest existing parent
// directory.
func nearestExisting(path string) string {
	for {
		if _, err := os.Stat(path); !os.IsNotExist(err) || path == filepath.Dir(path) {
			return path
		}
		path = filepath.Dir(path)
	}
}

// diskUsage returns the usage of the file system with the given path, as reported by the kernel.
func diskUsage(path string) (Usage, error) {
	var at unix.Stat_t
	if err := unix.Stat(path, &at); err != nil {
		return Usage{}, err
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(path, &fs); err != nil {
		return Usage{}, err
	}
	block := int64(fs.Bsize)
	return Usage{Device: uint64(at.Dev), Free: int64(fs.Bavail) * block, Total: int64(fs.Blocks) * block}, nil
}
