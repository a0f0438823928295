//go:build linux

package container

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"keelson.dev/keelson/agent/oci/bundle"
)

// mountRoot moves the calling thread into a new mount namespace and mounts the container's root
// file system at path there. The container's mount namespace is a copy of this one, so the mount
// disappears with the container's last process. Other mounts keep their propagation, as volumes
// with Bidirectional propagation require.
func mountRoot(path string, overlay *bundle.Overlay) error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("unshare mounts: %w", err)
	}
	parent, err := mountPointOf(path)
	if err != nil {
		return err
	}
	if err := unix.Mount("", parent, "", unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make %s private: %w", parent, err)
	}
	base, lower := commonDirectory(overlay.Lower)
	// Mount options are limited to one page, so layers are named relative to their common
	// directory. The thread has its own working directory since it unshared.
	if err := unix.Chdir(base); err != nil {
		return fmt.Errorf("enter %s: %w", base, err)
	}
	defer unix.Chdir("/")
	options := "lowerdir=" + strings.Join(lower, ":") + ",upperdir=" + overlay.Upper + ",workdir=" + overlay.Work
	if len(options) >= os.Getpagesize() {
		return fmt.Errorf("mount overlay at %s: %d layers do not fit into the mount options", path, len(lower))
	}
	// A container's own layer is not needed after a power failure, so it is not synced.
	err = unix.Mount("overlay", path, "overlay", 0, options+",volatile")
	if errors.Is(err, unix.EINVAL) {
		err = unix.Mount("overlay", path, "overlay", 0, options)
	}
	if err != nil {
		return fmt.Errorf("mount overlay at %s (%s): %w", path, options, err)
	}
	return nil
}

// mountPointOf returns the mount point that contains path.
func mountPointOf(path string) (string, error) {
	mounts, err := mountinfo.GetMounts(mountinfo.ParentsFilter(path))
	if err != nil {
		return "", fmt.Errorf("read mounts: %w", err)
	}
	best := ""
	for _, m := range mounts {
		if len(m.Mountpoint) >= len(best) {
			best = m.Mountpoint
		}
	}
	if best == "" {
		return "", fmt.Errorf("no mount contains %s", path)
	}
	return best, nil
}

// commonDirectory returns the deepest common directory of paths, and each path relative to it.
func commonDirectory(paths []string) (base string, relative []string) {
	if len(paths) == 0 {
		return "/", nil
	}
	base = filepath.Dir(paths[0])
	for _, p := range paths[1:] {
		for base != "/" && !strings.HasPrefix(p, base+"/") {
			base = filepath.Dir(base)
		}
	}
	for _, p := range paths {
		relative = append(relative, strings.TrimPrefix(strings.TrimPrefix(p, base), "/"))
	}
	return base, relative
}

// rlimits maps the names of the OCI specification to the kernel's numbers.
var rlimits = map[string]int{
	"RLIMIT_CPU": unix.RLIMIT_CPU, "RLIMIT_FSIZE": unix.RLIMIT_FSIZE, "RLIMIT_DATA": unix.RLIMIT_DATA,
	"RLIMIT_STACK": unix.RLIMIT_STACK, "RLIMIT_CORE": unix.RLIMIT_CORE, "RLIMIT_RSS": unix.RLIMIT_RSS,
	"RLIMIT_NPROC": unix.RLIMIT_NPROC, "RLIMIT_NOFILE": unix.RLIMIT_NOFILE, "RLIMIT_MEMLOCK": unix.RLIMIT_MEMLOCK,
	"RLIMIT_AS": unix.RLIMIT_AS, "RLIMIT_LOCKS": unix.RLIMIT_LOCKS, "RLIMIT_SIGPENDING": unix.RLIMIT_SIGPENDING,
	"RLIMIT_MSGQUEUE": unix.RLIMIT_MSGQUEUE, "RLIMIT_NICE": unix.RLIMIT_NICE, "RLIMIT_RTPRIO": unix.RLIMIT_RTPRIO,
	"RLIMIT_RTTIME": unix.RLIMIT_RTTIME,
}
