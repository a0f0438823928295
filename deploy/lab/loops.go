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

// fileID identifies a file of the machine by its inode.
type fileID struct{ device, number uint64 }

// loopDevices returns the machine's loop devices by their backing file. Their backing paths are not
// used, because they belong to the mount namespace of a driver.
func loopDevices() map[fileID]string {
	out := map[fileID]string{}
	busy, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, b := range busy {
		path := filepath.Join("/dev", filepath.Base(filepath.Dir(filepath.Dir(b))))
		f, err := os.OpenFile(path, os.O_RDONLY, 0)
		if err != nil {
			continue // it was removed meanwhile
		}
		if i, err := unix.IoctlLoopGetStatus64(int(f.Fd())); err == nil {
			out[fileID{i.Device, i.Inode}] = path
		}
		f.Close()
	}
	return out
}

// detachLoopDevices detaches the loop devices of files below dir. The device of a block volume
// stays attached until its driver detaches it, and would keep the space of a removed file.
func detachLoopDevices(dir string) error {
	devices := loopDevices()
	if len(devices) == 0 {
		return nil
	}
	var errs []error
	_ = filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return nil // the caller, which removes the folder, reports the error
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

// detachLoopDevice detaches a loop device from its file. An open device is detached when it is
// closed.
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
