package volume

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/volume/nfs"
	"keelson.dev/keelson/agent/volume/remote"
	"keelson.dev/keelson/internal/saturate"
)

// emptyDir returns the mount of an emptyDir volume: a folder, or a tmpfs for medium Memory, that
// exists as long as the pod. An existing emptyDir is not changed, because the pod may have changed
// its mode and owner.
func (v *Volumes) emptyDir(pod *v1.Pod, vol *v1.Volume) (agent.Mount, error) {
	src := vol.EmptyDir
	if src == nil {
		src = &v1.EmptyDirVolumeSource{}
	}
	dir := filepath.Join(v.podDir(pod.UID), "empty", vol.Name)
	switch src.Medium {
	case v1.StorageMediumDefault:
		if _, err := os.Lstat(dir); err == nil {
			return agent.Mount{HostPath: dir}, nil
		}
		return agent.Mount{HostPath: dir}, makeEmptyDir(dir, fsGroup(pod))
	case v1.StorageMediumMemory:
		if err := os.MkdirAll(dir, 0o750); err != nil {
			return agent.Mount{}, err
		}
		return agent.Mount{HostPath: dir}, mountTmpfs(dir, memorySize(pod, src), fsGroup(pod))
	}
	return agent.Mount{}, fmt.Errorf("emptyDir medium %q is not supported on this node", src.Medium)
}

// makeEmptyDir creates the folder dir, to which all users can write. If group is not nil, the
// folder belongs to that group and has the setgid bit. The folder gets its final name when owner
// and mode are set.
func makeEmptyDir(dir string, group *int64) error {
	tmp := filepath.Join(filepath.Dir(dir), "."+filepath.Base(dir)) // names of volumes do not start with a dot
	if err := os.MkdirAll(tmp, 0o750); err != nil {
		return err
	}
	mode := os.FileMode(0o777)
	if group != nil {
		if err := os.Chown(tmp, -1, int(*group)); err != nil {
			return err
		}
		mode |= os.ModeSetgid
	}
	// The umask of the process must not restrict the mode.
	if err := os.Chmod(tmp, mode); err != nil {
		return err
	}
	return os.Rename(tmp, dir)
}

// memorySize returns the size of the tmpfs of an emptyDir with medium Memory. It is the volume's
// sizeLimit, but at most the memory limit of the pod, as in Kubernetes. 0 means the kernel's
// default.
func memorySize(pod *v1.Pod, src *v1.EmptyDirVolumeSource) int64 {
	sum := podMemoryLimit(pod)
	if src.SizeLimit == nil || src.SizeLimit.Sign() <= 0 {
		return sum
	}
	if limit := saturate.Value(src.SizeLimit); sum == 0 || limit < sum {
		return limit
	}
	return sum
}

// podMemoryLimit returns the memory limit of a pod in bytes: its own limit, or else the sum of the
// limits of its containers. It is 0 if a container has no limit either.
func podMemoryLimit(pod *v1.Pod) int64 {
	if r := pod.Spec.Resources; r != nil && !r.Limits.Memory().IsZero() {
		return saturate.Value(r.Limits.Memory())
	}
	sum := int64(0)
	for i := range pod.Spec.Containers {
		q := pod.Spec.Containers[i].Resources.Limits.Memory()
		if q.IsZero() {
			return 0
		}
		sum = saturate.Add(sum, saturate.Value(q))
	}
	return sum
}

func mountTmpfs(dir string, size int64, group *int64) error {
	mounted, err := mountinfo.Mounted(dir)
	if err != nil || mounted {
		return err
	}
	options := "mode=0777"
	if group != nil {
		options = "mode=2777,gid=" + strconv.FormatInt(*group, 10)
	}
	if size > 0 {
		options += ",size=" + strconv.FormatInt(size, 10)
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
		return fmt.Errorf("mounting tmpfs at %s: %w", dir, err)
	}
	return nil
}

// secretDir returns the folder for the files of a secret or projected volume of a pod. All such
// folders are on one tmpfs, which it mounts if necessary.
func (v *fileVolumes) secretDir(pod *v1.Pod, name string) (string, error) {
	root := v.secretRoot()
	v.mu.Lock()
	defer v.mu.Unlock()
	if !v.tmpfs {
		if err := os.MkdirAll(root, 0o711); err != nil {
			return "", err
		}
		mounted, err := mountinfo.Mounted(root)
		if err != nil {
			return "", err
		}
		if !mounted {
			// Old kernels lack noswap. Without it, a secret can be swapped out, as in Kubernetes.
			flags := uintptr(unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC)
			err := unix.Mount("tmpfs", root, "tmpfs", flags, "mode=0711,noswap")
			if errors.Is(err, unix.EINVAL) {
				err = unix.Mount("tmpfs", root, "tmpfs", flags, "mode=0711")
			}
			if err != nil {
				return "", fmt.Errorf("mounting the tmpfs for secrets at %s: %w", root, err)
			}
		}
		v.tmpfs = true
	}
	dir := filepath.Join(root, string(pod.UID))
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return "", err
	}
	return filepath.Join(dir, name), nil
}

// hostPath returns the mount of a hostPath volume. It verifies the type of the path on the node,
// and creates the path if the type requires that.
func hostPath(src *v1.HostPathVolumeSource) (agent.Mount, error) {
	kind := ptr.Deref(src.Type, v1.HostPathUnset)
	bad := func(what string) error {
		return fmt.Errorf("hostPath type check failed: %s is not a %s", src.Path, what)
	}
	switch kind {
	case v1.HostPathDirectoryOrCreate:
		if err := os.MkdirAll(src.Path, 0o755); err != nil {
			return agent.Mount{}, err
		}
	case v1.HostPathFileOrCreate:
		// An existing file is not opened, because it may be a FIFO or a device.
		if _, err := os.Stat(src.Path); errors.Is(err, fs.ErrNotExist) {
			f, err := os.OpenFile(src.Path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
			if err != nil && !errors.Is(err, fs.ErrExist) {
				return agent.Mount{}, err
			}
			f.Close() // closing nil is harmless
		}
	}
	st, err := os.Stat(src.Path)
	if errors.Is(err, fs.ErrNotExist) && kind == v1.HostPathUnset {
		// Container runtimes also create a missing source of a bind mount.
		if err := os.MkdirAll(src.Path, 0o755); err != nil {
			return agent.Mount{}, err
		}
		return agent.Mount{HostPath: src.Path}, nil
	}
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return agent.Mount{}, bad(typeNames[kind])
		}
		return agent.Mount{}, err
	}
	ok := true
	switch kind {
	case v1.HostPathDirectory, v1.HostPathDirectoryOrCreate:
		ok = st.IsDir()
	case v1.HostPathFile, v1.HostPathFileOrCreate:
		ok = st.Mode().IsRegular()
	case v1.HostPathSocket:
		ok = st.Mode()&os.ModeSocket != 0
	case v1.HostPathCharDev:
		ok = st.Mode()&os.ModeCharDevice != 0
	case v1.HostPathBlockDev:
		ok = st.Mode()&os.ModeDevice != 0 && st.Mode()&os.ModeCharDevice == 0
	}
	if !ok {
		return agent.Mount{}, bad(typeNames[kind])
	}
	return agent.Mount{HostPath: src.Path, IsFile: !st.IsDir()}, nil
}

var typeNames = map[v1.HostPathType]string{v1.HostPathDirectory: "directory", v1.HostPathDirectoryOrCreate: "directory",
	v1.HostPathFile: "file", v1.HostPathFileOrCreate: "file",
	v1.HostPathSocket: "socket file", v1.HostPathCharDev: "character device", v1.HostPathBlockDev: "block device"}

// unmountBelow unmounts all file systems at and below dir, deepest first, including mounts of
// servers that do not respond. It does nothing if nothing is mounted there.
func unmountBelow(ctx context.Context, dir string) error {
	resolved, err := filepath.EvalSymlinks(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for range 10 { // mounts can be stacked
		points, err := mountinfo.GetMounts(mountinfo.PrefixFilter(resolved))
		if err != nil {
			return err
		}
		if len(points) == 0 {
			return nil
		}
		for i := len(points) - 1; i >= 0; i-- {
			p := points[i].Mountpoint
			if nfs.IsNFS(points[i].FSType) {
				if err := remote.Unmount(ctx, p); err != nil {
					return err
				}
				continue
			}
			err := unix.Unmount(p, unix.UMOUNT_NOFOLLOW)
			if errors.Is(err, unix.EBUSY) {
				// A process of the node uses it. The pod is dead, so a lazy unmount loses nothing.
				err = unix.Unmount(p, unix.UMOUNT_NOFOLLOW|unix.MNT_DETACH)
			}
			if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
				return fmt.Errorf("unmounting %s: %w", p, err)
			}
		}
	}
	return fmt.Errorf("unmounting below %s: mounts keep coming", dir)
}
