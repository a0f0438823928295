package volume

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/component-helpers/storage/ephemeral"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/volume/nfs"
)

// claimName returns the name of the PersistentVolumeClaim of a pod's volume, or "" if the volume
// has no claim. readonly is true if the pod uses the claim read-only.
func claimName(pod *v1.Pod, vol *v1.Volume) (name string, readonly bool) {
	switch {
	case vol.PersistentVolumeClaim != nil:
		return vol.PersistentVolumeClaim.ClaimName, vol.PersistentVolumeClaim.ReadOnly
	case vol.Ephemeral != nil:
		return pod.Name + "-" + vol.Name, false
	}
	return "", false
}

// boundClaim returns the claim with this name in the pod's namespace, and the PersistentVolume that
// the claim is bound to. It returns an error unless claim and PersistentVolume refer to each other.
func boundClaim(objects agent.Objects, pod *v1.Pod, vol *v1.Volume, name string) (
	*v1.PersistentVolumeClaim, *v1.PersistentVolume, error,
) {
	ns := pod.Namespace
	pvc, ok := objects.Claim(ns, name)
	if !ok {
		return nil, nil, fmt.Errorf("persistentvolumeclaim \"%s/%s\" not found", ns, name)
	}
	if vol.Ephemeral != nil {
		if err := ephemeral.VolumeIsForPod(pod, pvc); err != nil { // the claim with this name belongs to another owner
			return nil, nil, err
		}
	}
	if pvc.Spec.VolumeName == "" || pvc.Status.Phase == v1.ClaimPending {
		return nil, nil, fmt.Errorf("persistentvolumeclaim \"%s/%s\" is not bound", ns, name)
	}
	pv, ok := objects.PersistentVolume(pvc.Spec.VolumeName)
	if !ok {
		return nil, nil, fmt.Errorf("persistentvolume %q of claim \"%s/%s\" not found", pvc.Spec.VolumeName, ns, name)
	}
	if r := pv.Spec.ClaimRef; r == nil || r.Namespace != ns || r.Name != name || r.UID != "" && r.UID != pvc.UID {
		return nil, nil, fmt.Errorf("persistentvolume %q is not bound to claim \"%s/%s\"", pv.Name, ns, name)
	}
	return pvc, withAnnotatedOptions(pv), nil
}

// withAnnotatedOptions returns pv with the mount options of its annotation, which Kubernetes
// prefers to spec.mountOptions. pv itself is not modified.
func withAnnotatedOptions(pv *v1.PersistentVolume) *v1.PersistentVolume {
	options, annotated := pv.Annotations[v1.MountOptionAnnotation]
	if !annotated {
		return pv
	}
	out := *pv
	out.Spec.MountOptions = nil
	for option := range strings.SplitSeq(options, ",") {
		if option = strings.TrimSpace(option); option != "" {
			out.Spec.MountOptions = append(out.Spec.MountOptions, option)
		}
	}
	return &out
}

// groupAnnotation is the annotation with the group that owns the content of a PersistentVolume.
const groupAnnotation = "pv.beta.kubernetes.io/gid"

// volumeGroup returns the group in the annotation groupAnnotation of a PersistentVolume, or nil.
// Like Kubernetes, it ignores a value that is not a number.
func volumeGroup(pv *v1.PersistentVolume) *int64 {
	group, err := strconv.ParseInt(pv.Annotations[groupAnnotation], 10, 64)
	if err != nil || len(validation.IsValidGroupID(group)) > 0 {
		return nil
	}
	return &group
}

// mountClaim mounts the PersistentVolume that the claim of a pod's volume is bound to.
func (v *Volumes) mountClaim(ctx context.Context, pod *v1.Pod, vol *v1.Volume) (agent.Mount, error) {
	name, readonly := claimName(pod, vol)
	pvc, pv, err := boundClaim(v.cfg.Objects, pod, vol, name)
	if err != nil {
		return agent.Mount{}, err
	}
	m, err := v.mountPersistentVolume(ctx, pod, vol, pvc, pv, readonly)
	m.Group = volumeGroup(pv)
	return m, err
}

// mountPersistentVolume mounts a PersistentVolume for a pod. The source of the PersistentVolume
// selects the kind of mount: hostPath, local, NFS, iSCSI or CSI.
func (v *Volumes) mountPersistentVolume(ctx context.Context, pod *v1.Pod, vol *v1.Volume, pvc *v1.PersistentVolumeClaim,
	pv *v1.PersistentVolume, readonly bool) (agent.Mount, error) {
	if err := checkVolumeMode(pod, vol.Name, pv); err != nil {
		return agent.Mount{}, err
	}
	if err := v.claims.claimExclusively(ctx, pod, pvc, pv); err != nil {
		return agent.Mount{}, err
	}
	switch s := &pv.Spec; {
	case s.HostPath != nil && isBlock(pv):
		return agent.Mount{},
			fmt.Errorf("persistentvolume %q: a hostPath must have volumeMode Filesystem: use a local volume for a "+
				"block device of the node", pv.Name)
	case s.HostPath != nil && len(s.MountOptions) > 0:
		return agent.Mount{},
			fmt.Errorf("persistentvolume %q: mount options are not supported for this volume type: remove mountOptions",
				pv.Name)
	case s.HostPath != nil:
		m, err := hostPath(s.HostPath)
		m.ReadOnly = readonly
		return m, err
	case s.Local != nil:
		return v.mountLocal(ctx, pod, vol.Name, pv, readonly)
	case s.CSI != nil:
		return v.csi.mountCSI(ctx, pod, vol.Name, persistentSource(pv, pvc, readonly))
	case s.NFS != nil && isBlock(pv):
		return agent.Mount{},
			fmt.Errorf("persistentvolume %q: NFS does not support volumeMode Block: use volumeMode Filesystem", pv.Name)
	case s.NFS != nil:
		m, err := v.mountNFS(ctx, pod, vol.Name,
			nfs.Volume{Server: s.NFS.Server, Path: s.NFS.Path, ReadOnly: readonly || s.NFS.ReadOnly,
				Options: s.MountOptions})
		if err != nil {
			err = fmt.Errorf("persistentvolume %q: %w", pv.Name, err)
		}
		return m, err
	}
	if pv.Spec.ISCSI != nil {
		s, err := claimedISCSI(pod, pv, readonly)
		if err != nil {
			return agent.Mount{}, err
		}
		return v.iscsi.mountISCSI(ctx, pod, vol.Name, s)
	}
	return agent.Mount{}, fmt.Errorf("persistentvolume %q has a source that is not supported on this node", pv.Name)
}

// isBlock reports whether containers receive a volume as a block device.
func isBlock(pv *v1.PersistentVolume) bool {
	return pv.Spec.VolumeMode != nil && *pv.Spec.VolumeMode == v1.PersistentVolumeBlock
}

// checkVolumeMode returns an error if a container uses a Block volume in volumeMounts, or a
// Filesystem volume in volumeDevices.
func checkVolumeMode(pod *v1.Pod, volume string, pv *v1.PersistentVolume) error {
	for _, list := range [][]v1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range list {
			c := &list[i]
			mounts := slices.ContainsFunc(c.VolumeMounts, func(m v1.VolumeMount) bool { return m.Name == volume })
			devices := slices.ContainsFunc(c.VolumeDevices, func(d v1.VolumeDevice) bool { return d.Name == volume })
			switch {
			case mounts && isBlock(pv):
				return fmt.Errorf("persistentvolume %q has volumeMode Block, but container %q has it in volumeMounts: "+
					"name it in volumeDevices, or use a claim with volumeMode Filesystem",
					pv.Name, c.Name)
			case devices && !isBlock(pv):
				return fmt.Errorf("persistentvolume %q has volumeMode Filesystem, but container %q has it in "+
					"volumeDevices: name it in volumeMounts, or use a claim with volumeMode Block",
					pv.Name, c.Name)
			}
		}
	}
	return nil
}

// applyGroup sets the group of all files in the volume folder dir to the pod's fsGroup. It never
// follows a symbolic link out of the volume.
func applyGroup(dir string, pod *v1.Pod) error {
	group := fsGroup(pod)
	if group == nil {
		return nil
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	policy := pod.Spec.SecurityContext.FSGroupChangePolicy
	if policy != nil && *policy == v1.FSGroupChangeOnRootMismatch {
		if st, err := root.Stat("."); err == nil && fileGroup(st) == *group && st.Mode()&os.ModeSetgid != 0 &&
			st.Mode().Perm()&0o070 == 0o070 {
			return nil
		}
	}
	return walkGroup(root, ".", int(*group))
}

func walkGroup(root *os.Root, path string, gid int) error {
	st, err := root.Lstat(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil // another pod deleted it
	}
	if err != nil {
		return err
	}
	if err := root.Lchown(path, -1, gid); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("giving %s to group %s: %w", path, strconv.Itoa(gid), err)
	}
	if st.Mode()&os.ModeSymlink != 0 {
		return nil
	}
	mode := st.Mode() | 0o660
	if st.IsDir() {
		mode |= 0o110 | os.ModeSetgid
	}
	if err := root.Chmod(path, mode.Perm()|mode&(os.ModeSetgid|os.ModeSetuid|os.ModeSticky)); err != nil &&
		!errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("giving %s to group %d: %w", path, gid, err)
	}
	if !st.IsDir() {
		return nil
	}
	// The path may have become a FIFO; opening it must not block.
	f, err := root.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		return nil
	}
	if err != nil {
		return err
	}
	names, err := f.Readdirnames(-1)
	f.Close()
	if err != nil {
		return err
	}
	for _, n := range names {
		if err := walkGroup(root, filepath.Join(path, n), gid); err != nil {
			return err
		}
	}
	return nil
}
