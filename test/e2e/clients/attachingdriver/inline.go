package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// NodePublishVolume creates an ephemeral volume of a pod: a folder with a file that names the pod.
func (d driver) NodePublishVolume(ctx context.Context, q *csi.NodePublishVolumeRequest) (
	*csi.NodePublishVolumeResponse, error,
) {
	about := q.GetVolumeContext()
	if about["csi.storage.k8s.io/ephemeral"] != "true" {
		return d.NodeServer.NodePublishVolume(ctx, q)
	}
	dir, err := volumeFile(d.inline, q.GetVolumeId())
	if err == nil {
		err = publishFolder(dir, q.GetTargetPath(),
			about["csi.storage.k8s.io/pod.namespace"]+"/"+about["csi.storage.k8s.io/pod.name"])
	}
	if err != nil {
		return nil, status.Errorf(codes.Internal, "publishing volume %s: %v", q.GetVolumeId(), err)
	}
	return &csi.NodePublishVolumeResponse{}, nil
}

func publishFolder(dir, target, owner string) error {
	if err := errors.Join(os.MkdirAll(dir, 0o750), os.MkdirAll(target, 0o750)); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "pod"), []byte(owner), 0o644); err != nil {
		return err
	}
	if mounted, err := mountinfo.Mounted(target); mounted || err != nil {
		return err
	}
	return unix.Mount(dir, target, "", unix.MS_BIND, "")
}

// NodeUnpublishVolume deletes an ephemeral volume of a pod.
func (d driver) NodeUnpublishVolume(ctx context.Context, q *csi.NodeUnpublishVolumeRequest) (
	*csi.NodeUnpublishVolumeResponse, error,
) {
	dir, err := volumeFile(d.inline, q.GetVolumeId())
	if err != nil {
		return nil, err
	}
	if _, err := os.Stat(dir); errors.Is(err, os.ErrNotExist) {
		return d.NodeServer.NodeUnpublishVolume(ctx, q)
	}
	if mounted, err := mountinfo.Mounted(q.GetTargetPath()); err == nil && mounted {
		err = unix.Unmount(q.GetTargetPath(), unix.UMOUNT_NOFOLLOW)
		if err != nil {
			return nil, status.Errorf(codes.Internal, "unpublishing volume %s: %v", q.GetVolumeId(), err)
		}
	}
	if err := os.Remove(q.GetTargetPath()); err != nil && !errors.Is(err, os.ErrNotExist) {
		// a mount point is not an empty folder
		return nil, status.Errorf(codes.Internal, "unpublishing volume %s: %v", q.GetVolumeId(), err)
	}
	if err := os.RemoveAll(dir); err != nil {
		return nil, status.Errorf(codes.Internal, "deleting volume %s: %v", q.GetVolumeId(), err)
	}
	return &csi.NodeUnpublishVolumeResponse{}, nil
}
