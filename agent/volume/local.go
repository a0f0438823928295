package volume

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/volume/disk"
	"keelson.dev/keelson/internal/mountoption"
)

// mountLocal mounts a local volume: a folder or a file of the node, a raw block device, or the file
// system on a block device.
func (v *Volumes) mountLocal(ctx context.Context, pod *v1.Pod, name string, pv *v1.PersistentVolume, readonly bool) (
	agent.Mount, error,
) {
	m := agent.Mount{HostPath: pv.Spec.Local.Path, ReadOnly: readonly}
	fail := func(err error) (agent.Mount, error) {
		return agent.Mount{}, fmt.Errorf("local persistentvolume %q: %w", pv.Name, err)
	}
	st, err := os.Stat(m.HostPath)
	if err != nil {
		return fail(err)
	}
	m.IsFile = !st.IsDir()
	place := filepath.Join(v.podDir(pod.UID), "disk", name)
	switch device := st.Mode()&os.ModeDevice != 0 && st.Mode()&os.ModeCharDevice == 0; {
	case isBlock(pv) && !device:
		return agent.Mount{}, fmt.Errorf("local persistentvolume %q has volumeMode Block, but %s is not a block device",
			pv.Name, m.HostPath)
	case isBlock(pv):
		m.Block, m.IsFile = true, false
		return m, nil
	case device:
		m.HostPath, m.IsFile = place, false
		bits, _ := mountoption.SplitFlags(pv.Spec.MountOptions)
		m.ReadOnly = readonly || bits&unix.MS_RDONLY != 0
		err = v.mountDisk(ctx, place, pv, st)
	case len(pv.Spec.MountOptions) > 0:
		m.HostPath = place
		m.ReadOnly, err = v.bindFolder(place, pv, st)
		m.ReadOnly = m.ReadOnly || readonly
	}
	if err != nil {
		return fail(err)
	}
	if !m.IsFile && !m.ReadOnly && fsGroup(pod) != nil {
		if err := v.runOnce(pod.UID, name, func() error { return applyGroup(m.HostPath, pod) }); err != nil {
			return fail(err)
		}
	}
	return m, nil
}

// bindFolder bind-mounts the folder or file of the local volume pv at place, recursively and with
// the volume's mount options. It returns whether these options make the mount read-only. The
// options are in effect from the moment the mount appears.
func (v *Volumes) bindFolder(place string, pv *v1.PersistentVolume, st os.FileInfo) (readonly bool, err error) {
	path := pv.Spec.Local.Path
	attr, rest := mountoption.SplitBindAttributes(pv.Spec.MountOptions)
	if len(rest) > 0 {
		return false,
			fmt.Errorf("%s is not a block device but part of a mounted file system, which does not support the "+
				"mount options %q: "+
				"remove them from mountOptions (a folder supports ro, nosuid, nodev, noexec, noatime, nodiratime, "+
				"relatime, strictatime and their opposites)",
				path, strings.Join(rest, ","))
	}
	readonly = attr.Attr_set&unix.MOUNT_ATTR_RDONLY != 0
	defer v.locks.Lock("bind\x00" + place)()
	if is, err := isMountPoint(place); is || err != nil {
		return readonly, err
	}
	if err := makeMountPoint(place, st.IsDir()); err != nil {
		return false, err
	}
	tree, err := unix.OpenTree(unix.AT_FDCWD, path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE)
	if err != nil {
		return false, fmt.Errorf("showing %s with mount options: %w", path, explainMountSupport(err))
	}
	defer unix.Close(tree)
	attr.Propagation = unix.MS_PRIVATE // unmounting below place must not propagate to path
	if err := unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH|unix.AT_RECURSIVE, &attr); err != nil {
		return false, fmt.Errorf("setting the mount options %q of %s: %w", pv.Spec.MountOptions, path,
			explainMountSupport(err))
	}
	if err := unix.MoveMount(tree, "", unix.AT_FDCWD, place, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return false, fmt.Errorf("mounting %s at %s: %w", path, place, err)
	}
	return readonly, nil
}

// explainMountSupport adds the required kernel version to an error of the kernel's mount API
// (fsopen, mount_setattr).
func explainMountSupport(err error) error {
	if errors.Is(err, unix.ENOSYS) {
		return fmt.Errorf("mount options of a folder need Linux 5.12 or newer: %w", err)
	}
	return err
}

// makeMountPoint creates an empty folder at path if dir is true, and otherwise an empty file, for
// use as a mount point.
func makeMountPoint(path string, dir bool) error {
	if dir {
		return os.MkdirAll(path, 0o750)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	return f.Close()
}

// mountDisk mounts the file system of the local volume's block device at dir, unless it is mounted
// there. Mounts for several pods share one file system instance, which has the mount options of the
// volume. Read-only use by a pod is enforced by its own mount.
func (v *Volumes) mountDisk(ctx context.Context, dir string, pv *v1.PersistentVolume, st os.FileInfo) error {
	defer v.locks.Lock("device\x00" + strconv.FormatUint(st.Sys().(*syscall.Stat_t).Rdev, 10))()
	if is, err := isMountPoint(dir); is || err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return err
	}
	want := disk.Mount{Device: pv.Spec.Local.Path, Dir: dir, Flags: pv.Spec.MountOptions}
	if t := pv.Spec.Local.FSType; t != nil {
		want.Type = *t
	}
	return want.Do(ctx)
}
