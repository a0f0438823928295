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

// fileID identifies a file of this machine by its device and inode number.
type fileID struct{ device, number uint64 }

// loopDevices returns the paths of the attached loop devices, keyed by their backing file. It
// identifies the file by its inode, because /sys shows the path in the mount namespace of the
// storage driver that attached the device.
func loopDevices() map[fileID]string {
	out := map[fileID]string{}
	busy, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, b := range busy {
		path := filepath.Join("/dev", filepath.Base(filepath.Dir(filepath.Dir(b))))
		f, err := os.OpenFile(path, os.O_RDONLY, 0)
		if err != nil {
			continue // the device was removed meanwhile
		}
		if i, err := unix.IoctlLoopGetStatus64(int(f.Fd())); err == nil {
			out[fileID{i.Device, i.Inode}] = path
		}
		f.Close()
	}
	return out
}

// detachLoopDevices detaches the loop devices of backing files below dir. Otherwise a removed
// backing file would keep its disk space: the device of a block volume stays attached until its
// storage driver detaches it.
func detachLoopDevices(dir string) error {
	devices := loopDevices()
	if len(devices) == 0 {
		return nil
	}
	var errs []error
	_ = filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return nil // the caller removes the folder and reports the error
		}
		info, err := d.Info()
		if err != nil {
			return nil
		}
		st, ok := info.Sys().(*syscall.Stat_t)
		if !ok {
			return nil
		}
		if path := devices[fileID{st.Dev, st.Ino}]; path != "" {
			errs = append(errs, detachLoopDevice(path))
		}
		return nil
	})
	return errors.Join(errs...)
}

// detachLoopDevice detaches the loop device at a path from its backing file. If the loop device is
// open, the kernel detaches it when it is closed.
func detachLoopDevice(path string) error {
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
