package lab

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
)

// inode is a file of the machine, whatever its paths.
type inode struct{ device, number uint64 }

// loopDevices are the machine's loop devices by the file that each shows. A driver's mount namespace had a path of its own
// for that, which says nothing here.
func loopDevices() map[inode]string {
	out := map[inode]string{}
	busy, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, b := range busy {
		path := filepath.Join("/dev", filepath.Base(filepath.Dir(filepath.Dir(b))))
		f, err := os.OpenFile(path, os.O_RDONLY, 0)
		if err != nil {
			continue // it went meanwhile
		}
		if i, err := unix.IoctlLoopGetStatus64(int(f.Fd())); err == nil {
			out[inode{i.Device, i.Inode}] = path
		}
		f.Close()
	}
	return out
}

// detachLoops takes away the loop devices that show files below dir. That of a block volume is held until its driver is
// told to let go, and keeps the room of a file that has been removed.
func detachLoops(dir string) error {
	devices := loopDevices()
	if len(devices) == 0 {
		return nil
	}
	var errs []error
	_ = filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return nil // what cannot be read is removed, or said to be left, by who removes the folder
		}
		info, err := d.Info()
		if err != nil {
			return nil
		}
		st, ok := info.Sys().(*syscall.Stat_t)
		if !ok {
			return nil
		}
		if path := devices[inode{st.Dev, st.Ino}]; path != "" {
			errs = append(errs, detach(path))
		}
		return nil
	})
	return errors.Join(errs...)
}

// detach takes a loop device from its file. One that is open somewhere goes when it is closed.
func detach(path string) error {
	f, err := os.OpenFile(path, os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.IoctlSetInt(int(f.Fd()), unix.LOOP_CLR_FD, 0); err != nil && !errors.Is(err, unix.ENXIO) {
		return fmt.Errorf("taking %s away: %w", path, err)
	}
	return nil
}
