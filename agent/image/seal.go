package image

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// seal keeps the host's users away from what images hold: nobody but root comes through the folder, and below it no
// program gains rights and no device opens. Containers see layers through an overlay of their own, to which neither
// applies. Where mounts are not allowed, the folder's mode alone has to do. open undoes the mount, and no other: a disk
// that somebody mounted at the folder stays.
func seal(root string) (open func() error, err error) {
	open = func() error { return nil }
	if err := os.MkdirAll(root, 0o700); err != nil {
		return open, err
	}
	if err := os.Chmod(root, 0o700); err != nil {
		return open, err
	}
	root, err = filepath.EvalSymlinks(root)
	if err != nil {
		return open, err
	}
	sealed, err := boundOnItself(root) // by an agent that was killed
	if err != nil {
		return open, err
	}
	if !sealed {
		if err := unix.Mount(root, root, "", unix.MS_BIND, ""); err != nil {
			return open, fmt.Errorf("%w: bind %s: %w", errUnsealed, root, err)
		}
	}
	open = func() error {
		if err := unix.Unmount(root, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && err != unix.EINVAL {
			return fmt.Errorf("unmount %s: %w", root, err)
		}
		return nil
	}
	err = unix.Mount("", root, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_NOSUID|unix.MS_NODEV, "")
	if err == nil {
		err = unix.Mount("", root, "", unix.MS_PRIVATE, "")
	}
	if err != nil {
		return open, fmt.Errorf("%w: remount %s: %w", errUnsealed, root, err)
	}
	return open, nil
}

// errUnsealed says that the store works, but not on a mount of its own.
var errUnsealed = errors.New("set-user-id programs and devices of images are guarded by the mode of their folder alone")

// boundOnItself says that what is seen at the folder root, a path without links, is a mount of the very folder that the
// mount below shows there. A disk, or another folder, that is mounted there is not.
func boundOnItself(root string) (bool, error) {
	id, err := mountID(root)
	if err != nil {
		return false, err
	}
	mounts, err := mountinfo.GetMounts(nil)
	if err != nil {
		return false, fmt.Errorf("list mounts: %w", err)
	}
	find := func(id int) *mountinfo.Info {
		if i := slices.IndexFunc(mounts, func(m *mountinfo.Info) bool { return m.ID == id }); i >= 0 {
			return mounts[i]
		}
		return nil
	}
	top := find(id)
	if top == nil || top.Mountpoint != root {
		return false, nil
	}
	below := find(top.Parent)
	if below == nil || below.Major != top.Major || below.Minor != top.Minor {
		return false, nil
	}
	path, err := filepath.Rel(below.Mountpoint, root)
	return err == nil && filepath.Join(below.Root, path) == top.Root, nil
}

// mountID is the number of the mount that a folder is seen on.
func mountID(dir string) (int, error) {
	f, err := os.Open(dir)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	info, err := os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", f.Fd()))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(info)) {
		if number, ok := strings.CutPrefix(line, "mnt_id:"); ok {
			return strconv.Atoi(strings.TrimSpace(number))
		}
	}
	return 0, fmt.Errorf("the kernel does not tell which mount %s is on", dir)
}
