package local

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// nodeServer implements the Node service: it stages and publishes volumes, and reports their usage.
type nodeServer struct {
	csi.UnimplementedNodeServer
	driver *Driver
}

// NodeStageVolume mounts the file system of a volume at the staging path. It bind-mounts a volume
// that is a folder, and attaches the loop device of a block device. If the data of the volume are
// missing, it fails, unless CreateVolume did not create the volume (its PersistentVolume was
// written by hand). For such a volume, it creates a new folder.
func (s *nodeServer) NodeStageVolume(ctx context.Context, q *csi.NodeStageVolumeRequest) (
	*csi.NodeStageVolumeResponse, error,
) {
	id := q.GetVolumeId()
	dir, err := s.driver.store.volumeFolder(id)
	if err != nil {
		return nil, err
	}
	if q.GetStagingTargetPath() == "" {
		return nil, status.Error(codes.InvalidArgument, "staging target path is missing")
	}
	if err := checkCapabilities(q.GetVolumeCapability()); err != nil {
		return nil, err
	}
	defer s.driver.locks.Lock(id)()
	r, sized, err := s.driver.store.readVolume(id)
	if err == nil && (sized || q.GetVolumeContext()[sizedContextKey] == "") {
		if err := checkVolumeMode(id, r, sized, q.GetVolumeCapability()); err != nil {
			return nil, err
		}
	}
	switch {
	case err != nil:
		return nil, status.Error(codes.Internal, err.Error())
	case sized && !r.Ready || !sized && q.GetVolumeContext()[sizedContextKey] != "":
		return nil, status.Errorf(codes.NotFound,
			"volume %s has no data on node %s: its file is missing and is not replaced by an empty one", id,
			s.driver.cfg.NodeID)
	case r.Backing == backingDirectory:
		if err := s.driver.folders.stageDirectory(id, r, q.GetStagingTargetPath(),
			q.GetVolumeCapability().GetMount().GetMountFlags()); err != nil {
			return nil, err
		}
	case r.Block:
		err = keepLoopDevice(s.driver.store.imageFile(id))
	case sized:
		err = s.stageImage(ctx, id, r, q)
	default:
		if err = makeFolder(dir); err == nil {
			err = bindMount(dir, q.GetStagingTargetPath(), 0)
		}
	}
	if err != nil {
		return nil, status.Errorf(codes.Internal, "staging volume %s: %v", id, s.driver.space.explainReadOnly(err))
	}
	return &csi.NodeStageVolumeResponse{}, nil
}

// stageImage mounts the backing file of the volume with this ID at the staging path. At the first
// mount, it makes the root folder writable for all users, and removes lost+found, because some
// programs require an empty folder for their data.
func (s *nodeServer) stageImage(ctx context.Context, id string, r volumeRecord, q *csi.NodeStageVolumeRequest) error {
	path := q.GetStagingTargetPath()
	if err := mountImage(ctx, s.driver.store.imageFile(id), path,
		q.GetVolumeCapability().GetMount().GetMountFlags()); err != nil || r.Initialized {
		return err
	}
	err := os.Chmod(path, 0o777)
	if gone := os.Remove(filepath.Join(path, "lost+found")); err == nil && !errors.Is(gone, os.ErrNotExist) {
		err = gone
	}
	if errors.Is(err, unix.EROFS) {
		return nil // the next writable mount initializes the file system
	}
	if err != nil {
		return errors.Join(err, unmountAll(path))
	}
	r.Initialized = true
	return s.driver.store.writeVolume(id, r)
}

// NodeUnstageVolume unmounts the volume from the staging path. It detaches the loop device of a
// block device.
func (s *nodeServer) NodeUnstageVolume(_ context.Context, q *csi.NodeUnstageVolumeRequest) (
	*csi.NodeUnstageVolumeResponse, error,
) {
	if _, err := s.driver.store.volumeFolder(q.GetVolumeId()); err != nil {
		return nil, err
	}
	if q.GetStagingTargetPath() == "" {
		return nil, status.Error(codes.InvalidArgument, "staging target path is missing")
	}
	defer s.driver.locks.Lock(q.GetVolumeId())()
	r, _, err := s.driver.store.readVolume(q.GetVolumeId())
	if err == nil && r.Block {
		err = detachLoopDevice(s.driver.store.imageFile(q.GetVolumeId()))
	}
	if err = errors.Join(err, unmountAll(q.GetStagingTargetPath())); err != nil {
		return nil, status.Errorf(codes.Internal, "unstaging volume %s: %v", q.GetVolumeId(), err)
	}
	return &csi.NodeUnstageVolumeResponse{}, nil
}

// NodePublishVolume bind-mounts the staged volume at the target path. For access by a single pod,
// it returns an error if the volume is published at another path.
func (s *nodeServer) NodePublishVolume(_ context.Context, q *csi.NodePublishVolumeRequest) (
	*csi.NodePublishVolumeResponse, error,
) {
	dir, err := s.driver.store.volumeFolder(q.GetVolumeId())
	if err != nil {
		return nil, err
	}
	if q.GetTargetPath() == "" {
		return nil, status.Error(codes.InvalidArgument, "target path is missing")
	}
	if err := checkCapabilities(q.GetVolumeCapability()); err != nil {
		return nil, err
	}
	if q.GetStagingTargetPath() == "" {
		return nil, status.Error(codes.FailedPrecondition,
			"staging target path is missing: the volume has to be staged first")
	}
	defer s.driver.locks.Lock(q.GetVolumeId())()
	if ok, err := s.isStaged(q.GetVolumeId(), dir, q.GetStagingTargetPath()); err != nil || !ok {
		return nil, status.Errorf(codes.FailedPrecondition, "volume %s is not staged at %s (%v)", q.GetVolumeId(),
			q.GetStagingTargetPath(), err)
	}
	if q.GetVolumeCapability().GetBlock() != nil {
		if err := s.publishBlock(q); err != nil {
			return nil, err
		}
		return &csi.NodePublishVolumeResponse{}, nil
	}
	if q.GetVolumeCapability().GetAccessMode().GetMode() == csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER {
		if other, err := otherMount([]string{dir, s.driver.folders.directoryPath(q.GetVolumeId())},
			q.GetStagingTargetPath(), q.GetTargetPath()); err != nil || other != "" {
			return nil, status.Errorf(codes.FailedPrecondition,
				"volume %s is for one pod and is already published at %s (%v)", q.GetVolumeId(), other, err)
		}
	}
	var bits uintptr
	if q.GetReadonly() {
		bits = unix.MS_RDONLY
	}
	if err := bindMount(q.GetStagingTargetPath(), q.GetTargetPath(), bits); err != nil {
		return nil, status.Errorf(codes.Internal, "publishing volume %s: %v", q.GetVolumeId(), err)
	}
	return &csi.NodePublishVolumeResponse{}, nil
}

// NodeUnpublishVolume unmounts the volume from the target path, and removes this path.
func (s *nodeServer) NodeUnpublishVolume(_ context.Context, q *csi.NodeUnpublishVolumeRequest) (
	*csi.NodeUnpublishVolumeResponse, error,
) {
	if _, err := s.driver.store.volumeFolder(q.GetVolumeId()); err != nil {
		return nil, err
	}
	if q.GetTargetPath() == "" {
		return nil, status.Error(codes.InvalidArgument, "target path is missing")
	}
	defer s.driver.locks.Lock(q.GetVolumeId())()
	err := unmountAll(q.GetTargetPath())
	if err == nil {
		err = os.Remove(q.GetTargetPath()) // not RemoveAll, because a file that remains is user data
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, status.Errorf(codes.Internal, "unpublishing volume %s: %v", q.GetVolumeId(), err)
	}
	return &csi.NodeUnpublishVolumeResponse{}, nil
}

// isStaged reports whether the volume with this ID is staged at path. For a block device, it
// reports whether a loop device is attached. folder is the folder of a volume without a record, and
// is not used for other volumes.
func (s *nodeServer) isStaged(id, folder, path string) (bool, error) {
	switch r, sized, err := s.driver.store.readVolume(id); {
	case err != nil:
		return false, err
	case r.Backing == backingDirectory:
		return isSameFolder(s.driver.folders.directoryPath(id), path)
	case r.Block:
		l, err := findLoopDevice(s.driver.store.imageFile(id))
		if l != nil {
			l.Close()
		}
		return l != nil, err
	case sized:
		return isImageMount(s.driver.store.imageFile(id), path)
	}
	return isSameFolder(folder, path)
}

// otherMount returns a path at which a staged volume is mounted, except for the paths in own,
// staging and target. It returns "" if no such path exists.
func otherMount(own []string, staging, target string) (string, error) {
	own = append(own, filepath.Clean(staging), filepath.Clean(target))
	all, err := otherMountsOf(staging)
	for _, m := range all {
		if !slices.Contains(own, filepath.Clean(m)) {
			return m, nil
		}
	}
	return "", err
}

// NodeGetVolumeStats returns the usage and the size of a volume in bytes, and in inodes unless it
// is a block device.
func (s *nodeServer) NodeGetVolumeStats(_ context.Context, q *csi.NodeGetVolumeStatsRequest) (
	*csi.NodeGetVolumeStatsResponse, error,
) {
	dir, err := s.driver.store.volumeFolder(q.GetVolumeId())
	if err != nil {
		return nil, err
	}
	if q.GetVolumePath() == "" {
		return nil, status.Error(codes.InvalidArgument, "volume path is missing")
	}
	r, _, err := s.driver.findVolume(q.GetVolumeId(), dir)
	if err != nil {
		return nil, err
	}
	if r.Backing == backingDirectory {
		return s.driver.folders.directoryStats(q.GetVolumeId(), r, q.GetVolumePath())
	}
	if r.Block {
		size, err := deviceSize(q.GetVolumePath())
		if err != nil {
			return nil, status.Errorf(codes.NotFound, "volume %s at %s: %v", q.GetVolumeId(), q.GetVolumePath(), err)
		}
		return &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{{Unit: csi.VolumeUsage_BYTES, Total: size}}},
			nil
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(q.GetVolumePath(), &fs); err != nil {
		return nil, status.Errorf(codes.NotFound, "volume %s at %s: %v", q.GetVolumeId(), q.GetVolumePath(), err)
	}
	return &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{
		{Unit: csi.VolumeUsage_BYTES, Total: int64(fs.Blocks) * fs.Bsize, Available: int64(fs.Bavail) * fs.Bsize,
			Used: int64(fs.Blocks-fs.Bfree) * fs.Bsize},
		{Unit: csi.VolumeUsage_INODES, Total: int64(fs.Files), Available: int64(fs.Ffree),
			Used: int64(fs.Files - fs.Ffree)}}}, nil
}

// NodeGetCapabilities returns the optional calls of the Node service that this driver supports.
func (s *nodeServer) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (
	*csi.NodeGetCapabilitiesResponse, error,
) {
	var out []*csi.NodeServiceCapability
	for _, t := range []csi.NodeServiceCapability_RPC_Type{csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME,
		csi.NodeServiceCapability_RPC_GET_VOLUME_STATS, csi.NodeServiceCapability_RPC_EXPAND_VOLUME,
		csi.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER} {
		out = append(out,
			&csi.NodeServiceCapability{
				Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: t}}})
	}
	return &csi.NodeGetCapabilitiesResponse{Capabilities: out}, nil
}

// NodeGetInfo returns the ID of this node, and the topology segment that binds volumes to it.
func (s *nodeServer) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return &csi.NodeGetInfoResponse{NodeId: s.driver.cfg.NodeID, AccessibleTopology: s.driver.nodeTopology()}, nil
}

// bindMount bind-mounts the folder source at target. The mount has the mount flags of source and
// the flags in bits. The call is idempotent.
func bindMount(source, target string, bits uintptr) error {
	if err := os.MkdirAll(target, 0o750); err != nil {
		return err
	}
	mounted, err := mountinfo.Mounted(target)
	if err != nil {
		return err
	}
	if mounted {
		ok, err := isSameFolder(source, target)
		if err != nil {
			return err
		}
		if !ok {
			return fmt.Errorf("something else is mounted at %s", target)
		}
	} else if err := unix.Mount(source, target, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("binding %s to %s: %w", source, target, err)
	}
	if bits == 0 {
		return nil
	}
	have, err := mountFlagsOf(target)
	if err == nil {
		err = unix.Mount("", target, "", unix.MS_BIND|unix.MS_REMOUNT|have|bits, "")
	}
	if err != nil {
		return errors.Join(fmt.Errorf("giving %s its mount options: %w", target, err), unmountAll(target))
	}
	return nil
}

// mountFlagsOf returns the flags of the mount at path. A remount must repeat them, because it
// resets all other flags.
func mountFlagsOf(path string) (bits uintptr, err error) {
	var fs unix.Statfs_t
	if err := unix.Statfs(path, &fs); err != nil {
		return 0, err
	}
	for has, bit := range map[int64]uintptr{unix.ST_RDONLY: unix.MS_RDONLY, unix.ST_NOSUID: unix.MS_NOSUID,
		unix.ST_NODEV:  unix.MS_NODEV,
		unix.ST_NOEXEC: unix.MS_NOEXEC, unix.ST_NOATIME: unix.MS_NOATIME, unix.ST_NODIRATIME: unix.MS_NODIRATIME,
		unix.ST_RELATIME: unix.MS_RELATIME} {
		if fs.Flags&has != 0 {
			bits |= bit
		}
	}
	return bits, nil
}

func unmountAll(target string) error {
	for {
		mounted, err := mountinfo.Mounted(target)
		if errors.Is(err, os.ErrNotExist) || err == nil && !mounted {
			return nil
		}
		if err != nil {
			return err
		}
		if err := unix.Unmount(target, unix.UMOUNT_NOFOLLOW); err != nil {
			return fmt.Errorf("unmounting %s: %w", target, err)
		}
	}
}

// isSameFolder reports whether the paths a and b refer to the same folder, for example because of a
// bind mount.
func isSameFolder(a, b string) (bool, error) {
	x, err := os.Stat(a)
	if err != nil {
		return false, err
	}
	y, err := os.Stat(b)
	if err != nil {
		return false, err
	}
	return os.SameFile(x, y), nil
}

// otherMountsOf returns the paths, other than dir, at which the folder dir is bind-mounted. If dir
// is a mount point of a backing file, these are the other mount points of its file system.
func otherMountsOf(dir string) ([]string, error) {
	st, err := os.Stat(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	all, err := mountinfo.GetMounts(nil)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, m := range all {
		if m.Root == "/" && m.Major != loopMajor || filepath.Clean(m.Mountpoint) == filepath.Clean(dir) {
			continue // neither a bind mount of a folder nor a mount of a backing file
		}
		if x, err := os.Stat(m.Mountpoint); err == nil && os.SameFile(st, x) {
			out = append(out, m.Mountpoint)
		}
	}
	return out, nil
}
