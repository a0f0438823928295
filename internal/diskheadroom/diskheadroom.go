// Package diskheadroom keeps what is large and can wait from filling a disk that something else cannot do without.
package diskheadroom

import (
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Place is where something large is to be written.
type Place struct {
	Folder string // in which it will be; it may be missing yet
	Beside string // path whose disk is not to be filled; "" = there is none, and so it is where nothing has the path

	Look func(path string) (Usage, error) // replaces the kernel's word in tests
}

// Usage is what is left of the file system on which a path is, in bytes.
type Usage struct {
	Device      uint64
	Free, Total int64
}

const (
	leastReserve = 1 << 30
	mostReserve  = 10 << 30
	// Step is how much is written at most before the file system is asked again.
	Step = 16 << 20
)

// reserve is what stays free of a disk that is not to be filled: a twentieth, from 1 to 10 GiB, and of a small disk no more than a tenth.
func reserve(total int64) int64 { return min(max(total/20, leastReserve), mostReserve, total/10) }

// Has says why there is no room for so many bytes. Where nobody can tell, there is.
func (p Place) Has(need int64) error {
	look := p.Look
	if look == nil {
		look = usageOf
	}
	have, err := look(existing(p.Folder))
	if err != nil || have.Total == 0 { // some file systems do not say how large they are, and look full
		return nil // whoever writes there is told
	}
	if p.Beside != "" {
		if beside, err := look(p.Beside); err == nil && beside.Device == have.Device {
			if keep := reserve(have.Total); have.Free-need < keep {
				return fmt.Errorf("%s: %s more are to be written, %s are free, and %s lies on that disk, of which %s stay free: remove what is not needed there, or choose a folder on another disk",
					p.Folder, inMiB(need), inMiB(have.Free), p.Beside, inMiB(keep))
			}
			return nil
		}
	}
	if need > have.Free {
		return fmt.Errorf("%s: %s more are to be written, and %s are free: remove what is not needed there, or choose a folder on another disk", p.Folder, inMiB(need), inMiB(have.Free))
	}
	return nil
}

func inMiB(n int64) string { return fmt.Sprintf("%d MiB", (n+1<<20-1)>>20) }

// Writer writes to w for as long as there is room.
func (p Place) Writer(w io.Writer) io.Writer { return &sparing{w: w, at: p} }

type sparing struct {
	w     io.Writer
	at    Place
	since int64 // bytes that were written since the file system was asked
}

// Write implements io.Writer.
func (s *sparing) Write(p []byte) (int, error) {
	if s.since += int64(len(p)); s.since >= Step {
		if err := s.at.Has(s.since); err != nil {
			return 0, err
		}
		s.since = 0
	}
	return s.w.Write(p)
}

// existing is a path, or the folder in which it is to be made.
func existing(path string) string {
	for {
		if _, err := os.Stat(path); !os.IsNotExist(err) || path == filepath.Dir(path) {
			return path
		}
		path = filepath.Dir(path)
	}
}

// usageOf asks the kernel about a path.
func usageOf(path string) (Usage, error) {
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
