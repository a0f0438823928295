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

// mountStore protects the host from the content of images: only root can access the folder root,
// and below it set-user-id programs and devices have no effect. Containers see the layers through
// their own overlays, to which neither applies. Where mounts are not permitted, only the mode of
// the folder protects; the error is errNoStoreMount then. open unmounts this mount, and no other: a
// disk that is mounted at the folder stays.
func mountStore(root string) (open func() error, err error) {
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
	sealed, err := isBindMountOfItself(root) // left by an agent that was killed
	if err != nil {
		return open, err
	}
	if !sealed {
		if err := unix.Mount(root, root, "", unix.MS_BIND, ""); err != nil {
			return open, fmt.Errorf("%w: bind %s: %w", errNoStoreMount, root, err)
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
		return open, fmt.Errorf("%w: remount %s: %w", errNoStoreMount, root, err)
	}
	return open, nil
}

// errNoStoreMount means that the store works, but without its own mount.
var errNoStoreMount = errors.New("only the mode of the folder protects the host from set-user-id programs and devices of images")

// isBindMountOfItself reports whether the topmost mount at root, a path without links, is a bind
// mount of the same folder of the mount below. A disk or another folder mounted there is not.
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

// mountID returns the ID of the mount that contains a folder.
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
