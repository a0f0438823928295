package volume

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/volume/disk"
)

// local gives what is at a path of the node: a folder or a file, a block device as such, or the file system on one.
func (v *Volumes) local(ctx context.Context, pod *v1.Pod, name string, pv *v1.PersistentVolume, readonly bool) (agent.Mount, error) {
	m := agent.Mount{HostPath: pv.Spec.Local.Path, ReadOnly: readonly}
	st, err := os.Stat(m.HostPath)
	if err != nil {
		return agent.Mount{}, fmt.Errorf("local persistentvolume %q: %w", pv.Name, err)
	}
	switch device := st.Mode()&os.ModeDevice != 0 && st.Mode()&os.ModeCharDevice == 0; {
	case isBlock(pv) && !device:
		return agent.Mount{}, fmt.Errorf("local persistentvolume %q has volumeMode Block, but %s is no block device", pv.Name, m.HostPath)
	case isBlock(pv):
		m.Block = true
		return m, nil
	case device:
		m.HostPath = filepath.Join(v.podDir(pod.UID), "disk", name)
		if err := v.mountDisk(ctx, m.HostPath, pv, st); err != nil {
			return agent.Mount{}, fmt.Errorf("local persistentvolume %q: %w", pv.Name, err)
		}
	default:
		m.IsFile = !st.IsDir()
	}
	if !m.IsFile && !readonly && fsGroup(pod) != nil {
		if err := v.once(pod.UID, name, func() error { return applyGroup(m.HostPath, pod) }); err != nil {
			return agent.Mount{}, fmt.Errorf("local persistentvolume %q: %w", pv.Name, err)
		}
	}
	return m, nil
}

// mountDisk mounts the file system of a block device for one pod, unless it is: those of several pods show the same. Who
// only reads it is given it read-only; a device has one file system, which is mounted as the volume says.
func (v *Volumes) mountDisk(ctx context.Context, dir string, pv *v1.PersistentVolume, st os.FileInfo) error {
	defer v.locks.Lock("device\x00" + strconv.FormatUint(st.Sys().(*syscall.Stat_t).Rdev, 10))()
	if is, err := mounted(dir); is || err != nil {
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
