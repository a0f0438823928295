// Package diskheadroom keeps what is large and can wait from filling a disk that something else cannot do without.
package diskheadroom

import (
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Target is where something large is to be written.
type Target struct {
	Dir           string // in which it will be; it may be missing yet
	ProtectedPath string // path whose disk is not to be filled; "" = there is none, and so it is where nothing has the path

	Stat func(path string) (Usage, error) // replaces the kernel's word in tests
}

// Usage is what is left of the file system on which a path is, in bytes.
type Usage struct {
	Device      uint64
	Free, Total int64
}

const (
	minReserve = 1 << 30
	maxReserve = 10 << 30
	// CheckInterval is how much is written at most before the file system is asked again.
	CheckInterval = 16 << 20
)

// reservedBytes is what stays free of a disk that is not to be filled: a twentieth, from 1 to 10 GiB, and of a small disk no more than a tenth.
func reservedBytes(total int64) int64 { return min(max(total/20, minReserve), maxReserve, total/10) }

// CheckFree says why there is no room for so many bytes. Where nobody can tell, there is.
func (p Target) CheckFree(need int64) error {
	stat := p.Stat
	if stat == nil {
		stat = diskUsage
	}
	usage, err := stat(nearestExisting(p.Dir))
	if err != nil || usage.Total == 0 { // some file systems do not say how large they are, and look full
		return nil // whoever writes there is told
	}
	if p.ProtectedPath != "" {
		if protected, err := stat(p.ProtectedPath); err == nil && protected.Device == usage.Device {
			if reserved := reservedBytes(usage.Total); usage.Free-need < reserved {
				return fmt.Errorf("%s: %s more are to be written, %s are free, and %s lies on that disk, of which %s stay free: remove what is not needed there, or choose a folder on another disk",
					p.Dir, inMiB(need), inMiB(usage.Free), p.ProtectedPath, inMiB(reserved))
			}
			return nil
		}
	}
	if need > usage.Free {
		return fmt.Errorf("%s: %s more are to be written, and %s are free: remove what is not needed there, or choose a folder on another disk", p.Dir, inMiB(need), inMiB(usage.Free))
	}
	return nil
}

func inMiB(n int64) string { return fmt.Sprintf("%d MiB", (n+1<<20-1)>>20) }

// Writer writes to w for as long as there is room.
func (p Target) Writer(w io.Writer) io.Writer { return &headroomWriter{w: w, target: p} }

type headroomWriter struct {
	w         io.Writer
	target    Target
	unchecked int64 // bytes that were written since the file system was asked
}

// Write implements io.Writer.
func (s *headroomWriter) Write(p []byte) (int, error) {
	if s.unchecked += int64(len(p)); s.unchecked >= CheckInterval {
		if err := s.target.CheckFree(s.unchecked); err != nil {
			return 0, err
		}
		s.unchecked = 0
	}
	return s.w.Write(p)
}

// nearestExisting is a path, or the folder in which it is to be made.
func nearestExisting(path string) string {
	for {
		if _, err := os.Stat(path); !os.IsNotExist(err) || path == filepath.Dir(path) {
			return path
		}
		path = filepath.Dir(path)
	}
}

// diskUsage asks the kernel about a path.
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
