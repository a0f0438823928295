package volume

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/moby/sys/mountinfo"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/volume/nfs"
	"keelson.dev/keelson/agent/volume/remote"
)

// mountNFS mounts an exported folder of an NFS server for one pod. As in Kubernetes, fsGroup is not
// applied: the server controls file ownership. An existing mount is kept and not accessed, because
// its server may be unreachable.
func (v *Volumes) mountNFS(ctx context.Context, pod *v1.Pod, name string, vol nfs.Volume) (agent.Mount, error) {
	dir := filepath.Join(v.podDir(pod.UID), "nfs", name)
	m := agent.Mount{HostPath: dir, ReadOnly: vol.ReadOnly}
	defer v.locks.Lock("nfs\x00" + dir)()
	is, err := mountedType(dir)
	switch {
	case err != nil:
		return agent.Mount{}, err
	case nfs.IsNFS(is):
		return m, nil
	case is != "":
		return agent.Mount{}, fmt.Errorf("%s: a file system of type %s is mounted at its mount point %s", vol, is, dir)
	}
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return agent.Mount{}, err
	}
	return m, v.cfg.NFS.Mount(ctx, vol, dir)
}

// AbortIO aborts the kernel's pending I/O on the NFS mounts of a pod, so that its killed processes
// can exit. Unwritten data is lost. It implements agent.Volumes.
func (v *Volumes) AbortIO(ctx context.Context, uid types.UID) error {
	if err := checkUID(uid); err != nil {
		return err
	}
	dir, err := filepath.EvalSymlinks(v.podDir(uid))
	if os.IsNotExist(err) {
		return nil
	}
	if err != nil {
		return err
	}
	points, err := mountinfo.GetMounts(mountinfo.PrefixFilter(dir))
	if err != nil {
		return err
	}
	var errs []error
	for _, p := range points {
		if nfs.IsNFS(p.FSType) {
			errs = append(errs, remote.AbortPending(ctx, p.Mountpoint))
		}
	}
	return errors.Join(errs...)
}

// mountedType returns the type of the file system that is mounted at a path, or "" if the path is
// not a mount point. It does not access that file system.
func mountedType(path string) (string, error) {
	dir, err := filepath.EvalSymlinks(filepath.Dir(path))
	if os.IsNotExist(err) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	found, err := mountinfo.GetMounts(mountinfo.SingleEntryFilter(filepath.Join(dir, filepath.Base(path))))
	if err != nil || len(found) == 0 {
		return "", err
	}
	return found[len(found)-1].FSType, nil
}
