package local

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// NodeStageVolume binds the volume's folder to the staging path. The folder is made when it is
// missing: behind a PersistentVolume that somebody wrote by hand there was no CreateVolume.
func (d *Driver) NodeStageVolume(_ context.Context, q *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	dir, err := d.folder(q.GetVolumeId())
	if err != nil {
		return nil, err
	}
	if q.GetStagingTargetPath() == "" {
		return nil, status.Error(codes.InvalidArgument, "staging target path is missing")
	}
	if err := supported(q.GetVolumeCapability()); err != nil {
		return nil, err
	}
	if err := makeFolder(dir); err != nil {
		return nil, status.Errorf(codes.Internal, "making volume %s: %v", q.GetVolumeId(), err)
	}
	if err := bind(dir, q.GetStagingTargetPath(), false); err != nil {
		return nil, status.Errorf(codes.Internal, "staging volume %s: %v", q.GetVolumeId(), err)
	}
	return &csi.NodeStageVolumeResponse{}, nil
}

// NodeUnstageVolume implements the Node service.
func (d *Driver) NodeUnstageVolume(_ context.Context, q *csi.NodeUnstageVolumeRequest) (*csi.NodeUnstageVolumeResponse, error) {
	if _, err := d.folder(q.GetVolumeId()); err != nil {
		return nil, err
	}
	if q.GetStagingTargetPath() == "" {
		return nil, status.Error(codes.InvalidArgument, "staging target path is missing")
	}
	if err := unbind(q.GetStagingTargetPath()); err != nil {
		return nil, status.Errorf(codes.Internal, "unstaging volume %s: %v", q.GetVolumeId(), err)
	}
	return &csi.NodeUnstageVolumeResponse{}, nil
}

// NodePublishVolume binds the staged volume to the target path.
func (d *Driver) NodePublishVolume(_ context.Context, q *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	dir, err := d.folder(q.GetVolumeId())
	if err != nil {
		return nil, err
	}
	if q.GetTargetPath() == "" {
		return nil, status.Error(codes.InvalidArgument, "target path is missing")
	}
	if q.GetStagingTargetPath() == "" {
		return nil, status.Error(codes.FailedPrecondition, "staging target path is missing: the volume has to be staged first")
	}
	if err := supported(q.GetVolumeCapability()); err != nil {
		return nil, err
	}
	if ok, err := same(dir, q.GetStagingTargetPath()); err != nil || !ok {
		return nil, status.Errorf(codes.FailedPrecondition, "volume %s is not staged at %s (%v)", q.GetVolumeId(), q.GetStagingTargetPath(), err)
	}
	if err := bind(q.GetStagingTargetPath(), q.GetTargetPath(), q.GetReadonly()); err != nil {
		return nil, status.Errorf(codes.Internal, "publishing volume %s: %v", q.GetVolumeId(), err)
	}
	return &csi.NodePublishVolumeResponse{}, nil
}

// NodeUnpublishVolume implements the Node service. The target path itself is removed too.
func (d *Driver) NodeUnpublishVolume(_ context.Context, q *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	if _, err := d.folder(q.GetVolumeId()); err != nil {
		return nil, err
	}
	if q.GetTargetPath() == "" {
		return nil, status.Error(codes.InvalidArgument, "target path is missing")
	}
	err := unbind(q.GetTargetPath())
	if err == nil {
		err = os.Remove(q.GetTargetPath()) // never RemoveAll: what is in there is somebody's data
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, status.Errorf(codes.Internal, "unpublishing volume %s: %v", q.GetVolumeId(), err)
	}
	return &csi.NodeUnpublishVolumeResponse{}, nil
}

// NodeGetCapabilities implements the Node service.
func (d *Driver) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	return &csi.NodeGetCapabilitiesResponse{Capabilities: []*csi.NodeServiceCapability{{Type: &csi.NodeServiceCapability_Rpc{
		Rpc: &csi.NodeServiceCapability_RPC{Type: csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME}}}}}, nil
}

// NodeGetInfo implements the Node service.
func (d *Driver) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return &csi.NodeGetInfoResponse{NodeId: d.cfg.NodeID, AccessibleTopology: d.topology()}, nil
}

// bind mounts source at target once, however often it is asked.
func bind(source, target string, readonly bool) error {
	if err := os.MkdirAll(target, 0o750); err != nil {
		return err
	}
	mounted, err := mountinfo.Mounted(target)
	if err != nil {
		return err
	}
	if mounted {
		ok, err := same(source, target)
		if err != nil {
			return err
		}
		if !ok {
			return fmt.Errorf("something else is mounted at %s", target)
		}
	} else if err := unix.Mount(source, target, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("binding %s to %s: %w", source, target, err)
	}
	if readonly {
		if err := unix.Mount("", target, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
			return errors.Join(fmt.Errorf("making %s read-only: %w", target, err), unbind(target))
		}
	}
	return nil
}

func unbind(target string) error {
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

// same says whether two paths show the same folder.
func same(a, b string) (bool, error) {
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

// mountsOf lists where a folder is bound to.
func mountsOf(dir string) ([]string, error) {
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
		if m.Root == "/" || filepath.Clean(m.Mountpoint) == filepath.Clean(dir) {
			continue // not a bind of a folder
		}
		if x, err := os.Stat(m.Mountpoint); err == nil && os.SameFile(st, x) {
			out = append(out, m.Mountpoint)
		}
	}
	return out, nil
}
