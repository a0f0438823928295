package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"keelson.dev/keelson/test/fault/attachdriver/journal"
)

// createFolder creates the folder dir with a subfolder data, which has the content of source or is
// empty if source is "". The folder appears under its name when it is complete. If dir already
// exists, createFolder does nothing.
func createFolder(dir, source string) error {
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		return err
	}
	half := filepath.Join(filepath.Dir(dir), ".half-"+filepath.Base(dir))
	if err := os.RemoveAll(half); err != nil { // left by a process that was killed
		return err
	}
	if err := os.MkdirAll(filepath.Join(half, "data"), 0o755); err != nil {
		return err
	}
	if source != "" {
		if err := os.CopyFS(filepath.Join(half, "data"), os.DirFS(source)); err != nil {
			return err
		}
	}
	return os.Rename(half, dir)
}

// withSnapshot runs f with the folder of a snapshot under the lock of the shared folder.
func (d driver) withSnapshot(snapshot string, f func(dir string) error) error {
	if !names.MatchString(snapshot) {
		return status.Errorf(codes.InvalidArgument, "snapshot ID %q is not a file name", snapshot)
	}
	return journal.WithLock(d.shared, func() error { return f(filepath.Join(d.shared, "snapshots", snapshot)) })
}

// CreateSnapshot copies a volume. The snapshot's ID is prefixed with the ID of the volume.
func (d driver) CreateSnapshot(_ context.Context, q *csi.CreateSnapshotRequest) (*csi.CreateSnapshotResponse, error) {
	volume, id := q.GetSourceVolumeId(), q.GetSourceVolumeId()+"."+q.GetName()
	if !names.MatchString(volume) {
		return nil, status.Errorf(codes.InvalidArgument, "volume ID %q is not a file name", volume)
	}
	var made *csi.Snapshot
	err := d.withSnapshot(id, func(dir string) error {
		from := filepath.Join(d.shared, "volumes", volume)
		if _, err := os.Stat(dir); errors.Is(err, os.ErrNotExist) {
			if err := requireVolume(from); err != nil {
				return err
			}
		}
		if err := createFolder(dir, filepath.Join(from, "data")); err != nil {
			return err
		}
		st, err := os.Stat(dir)
		if err == nil {
			made = &csi.Snapshot{SnapshotId: id, SourceVolumeId: volume, CreationTime: timestamppb.New(st.ModTime()),
				ReadyToUse: true}
		}
		return err
	})
	return &csi.CreateSnapshotResponse{Snapshot: made}, err
}

func (d driver) DeleteSnapshot(_ context.Context, q *csi.DeleteSnapshotRequest) (*csi.DeleteSnapshotResponse, error) {
	return &csi.DeleteSnapshotResponse{}, d.withSnapshot(q.GetSnapshotId(), os.RemoveAll)
}

// sourceFolder returns the folder of the snapshot from which a new volume is created, or "" for an
// empty volume.
func (d driver) sourceFolder(q *csi.CreateVolumeRequest) (string, error) {
	if q.GetVolumeContentSource() == nil {
		return "", nil
	}
	snapshot := q.GetVolumeContentSource().GetSnapshot().GetSnapshotId()
	if !names.MatchString(snapshot) {
		return "", status.Errorf(codes.InvalidArgument, "the source of a volume must be a snapshot, not %v",
			q.GetVolumeContentSource())
	}
	dir := filepath.Join(d.shared, "snapshots", snapshot)
	if _, err := os.Stat(dir); err != nil {
		return "", status.Errorf(codes.NotFound, "snapshot %s: %v", snapshot, err)
	}
	return filepath.Join(dir, "data"), nil
}

// requestedID returns the ID of the volume or snapshot that a request concerns. For a snapshot to
// be created it is the ID of its source volume.
func requestedID(q any) string {
	switch q := q.(type) {
	case interface{ GetVolumeId() string }:
		return q.GetVolumeId()
	case *csi.CreateVolumeRequest:
		return q.GetParameters()["prefix"] + q.GetName()
	case *csi.CreateSnapshotRequest:
		return q.GetSourceVolumeId()
	case *csi.DeleteSnapshotRequest:
		return q.GetSnapshotId()
	}
	return ""
}

// classPrefix returns the volume's class prefix if it starts with "held-", or "". A test uses a
// separate prefix for each volume.
func classPrefix(q any) string {
	life, _, _ := strings.Cut(requestedID(q), "-pvc-")
	if !strings.HasPrefix(life, "held-") {
		return ""
	}
	return life
}
