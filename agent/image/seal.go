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

// mountStore protects the host from the content of images in the folder root. It makes the folder
// accessible to root only. It also mounts the folder with nosuid and nodev, so that set-user-id
// programs and devices in images have no effect on the host. Containers access the layers through
// their own overlays, to which neither restriction applies.
//
// Where mounts are not permitted, it returns errNoStoreMount, and only the mode of the folder
// protects. unmount removes only this mount; a disk that is mounted at the folder stays.
func mountStore(root string) (unmount func() error, err error) {
	unmount = func() error { return nil }
	if err := os.MkdirAll(root, 0o700); err != nil {
		return unmount, err
	}
	if err := os.Chmod(root, 0o700); err != nil {
		return unmount, err
	}
	root, err = filepath.EvalSymlinks(root)
	if err != nil {
		return unmount, err
	}
	sealed, err := isBindMountOfItself(root) // left by an agent that was killed
	if err != nil {
		return unmount, err
	}
	if !sealed {
		if err := unix.Mount(root, root, "", unix.MS_BIND, ""); err != nil {
			return unmount, fmt.Errorf("%w: bind %s: %w", errNoStoreMount, root, err)
		}
	}
	unmount = func() error {
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
		return unmount, fmt.Errorf("%w: remount %s: %w", errNoStoreMount, root, err)
	}
	return unmount, nil
}

// errNoStoreMount is returned if the store is usable, but the mount that protects the host could
// not be created.
var errNoStoreMount = errors.New("only the mode of the folder protects the host from set-user-id programs and " +
	"devices of images")

// isBindMountOfItself reports whether the topmost mount at root is a bind mount of the same folder,
// as mountStore makes it. root is a path without links. It returns false for a disk or another
// folder that is mounted there.
func isBindMountOfItself(root string) (bool, error) {
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

// mountID returns the kernel's ID of the mount that contains a folder.
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
	return 0, fmt.Errorf("the kernel does not report the mount of %s", dir)
}
