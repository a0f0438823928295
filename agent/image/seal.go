package image

import (
	"errors"
	"fmt"
	"os"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// seal keeps the host's users away from what images hold: nobody but root comes through the folder, and below it no
// program gains rights and no device opens. Containers see layers through an overlay of their own, to which neither
// applies. Where mounts are not allowed, the folder's mode alone has to do. open undoes the mount.
func seal(root string) (open func() error, err error) {
	open = func() error { return nil }
	if err := os.MkdirAll(root, 0o700); err != nil {
		return open, err
	}
	if err := os.Chmod(root, 0o700); err != nil {
		return open, err
	}
	mounted, err := mountinfo.Mounted(root) // by an agent that was killed
	if err != nil {
		return open, err
	}
	if !mounted {
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
