package backups

import (
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// A store that finds its disk full ends its replica, and backups that go by one schedule would fill those of all replicas in
// the same minute. So what is written here leaves room on the disk on which a store lies.

// Disk is where something large is to be written.
type Disk struct {
	Folder string // in which it will be; it may be missing yet
	Store  string // data folder of the replica whose disk is not to be filled; "" = there is none

	look func(path string) (usage, error) // replaces the kernel's word in tests
}

// usage is what is left of the file system on which a path is.
type usage struct {
	device      uint64
	free, total int64
}

const (
	leastReserve = 1 << 30
	// roomStep is how much is written at most before the file system is asked again.
	roomStep = 16 << 20
)

// reserve is what stays free of a disk on which a store lies: a twentieth, 1 GiB at least, and of a small disk no more than a tenth.
func reserve(total int64) int64 { return min(max(total/20, leastReserve), total/10) }

// Has says why there is no room for so many bytes. Where nobody can tell, there is.
func (d Disk) Has(need int64) error {
	look := d.look
	if look == nil {
		look = usageOf
	}
	have, err := look(d.Folder)
	if err != nil {
		return nil // whoever writes there is told
	}
	if d.Store != "" {
		if store, err := look(d.Store); err == nil && store.device == have.device {
			if keep := reserve(have.total); have.free-need < keep {
				return fmt.Errorf("%s: %s more are to be written, %s are free, and the store of %s lies on that disk, of which %s stay free: remove what is not needed there, or choose a folder on another disk",
					d.Folder, inMiB(need), inMiB(have.free), d.Store, inMiB(keep))
			}
			return nil
		}
	}
	if need > have.free {
		return fmt.Errorf("%s: %s more are to be written, and %s are free: remove what is not needed there, or choose a folder on another disk", d.Folder, inMiB(need), inMiB(have.free))
	}
	return nil
}

func inMiB(n int64) string { return fmt.Sprintf("%d MiB", (n+1<<20-1)>>20) }

// Writer writes to w for as long as there is room.
func (d Disk) Writer(w io.Writer) io.Writer { return &sparing{w: w, disk: d} }

type sparing struct {
	w     io.Writer
	disk  Disk
	since int64 // bytes that were written since the file system was asked
}

// Write implements io.Writer.
func (s *sparing) Write(p []byte) (int, error) {
	if s.since += int64(len(p)); s.since >= roomStep {
		if err := s.disk.Has(s.since); err != nil {
			return 0, err
		}
		s.since = 0
	}
	return s.w.Write(p)
}

// usageOf asks the kernel about a path, or the folder in which it is to be made.
func usageOf(path string) (usage, error) {
	for {
		_, err := os.Stat(path)
		if err == nil {
			break
		}
		if !os.IsNotExist(err) || path == filepath.Dir(path) {
			return usage{}, err
		}
		path = filepath.Dir(path)
	}
	var fs unix.Statfs_t
	var at unix.Stat_t
	if err := unix.Stat(path, &at); err != nil {
		return usage{}, err
	}
	if err := unix.Statfs(path, &fs); err != nil {
		return usage{}, err
	}
	block := int64(fs.Bsize)
	return usage{device: uint64(at.Dev), free: int64(fs.Bavail) * block, total: int64(fs.Blocks) * block}, nil
}
