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

// filled makes a folder under its name once it is whole, and nothing where it is there already: its folder data has what
// from has, and is empty where from is "".
func filled(dir, from string) error {
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		return err
	}
	half := filepath.Join(filepath.Dir(dir), ".half-"+filepath.Base(dir))
	if err := os.RemoveAll(half); err != nil { // of a process that was killed meanwhile
		return err
	}
	if err := os.MkdirAll(filepath.Join(half, "data"), 0o755); err != nil {
		return err
	}
	if from != "" {
		if err := os.CopyFS(filepath.Join(half, "data"), os.DirFS(from)); err != nil {
			return err
		}
	}
	return os.Rename(half, dir)
}

// ofSnapshot runs f for a snapshot while nobody else does anything.
func (d driver) ofSnapshot(snapshot string, f func(dir string) error) error {
	if !names.MatchString(snapshot) {
		return status.Errorf(codes.InvalidArgument, "snapshot %q is no name of a folder", snapshot)
	}
	return journal.Locked(d.shared, func() error { return f(filepath.Join(d.shared, "snapshots", snapshot)) })
}

// CreateSnapshot copies a volume. Its name begins with that of the volume.
func (d driver) CreateSnapshot(_ context.Context, q *csi.CreateSnapshotRequest) (*csi.CreateSnapshotResponse, error) {
	volume, id := q.GetSourceVolumeId(), q.GetSourceVolumeId()+"."+q.GetName()
	if !names.MatchString(volume) {
		return nil, status.Errorf(codes.InvalidArgument, "volume %q is no name of a folder", volume)
	}
	var made *csi.Snapshot
	err := d.ofSnapshot(id, func(dir string) error {
		from := filepath.Join(d.shared, "volumes", volume)
		if _, err := os.Stat(dir); errors.Is(err, os.ErrNotExist) {
			if err := there(from); err != nil {
				return err
			}
		}
		if err := filled(dir, filepath.Join(from, "data")); err != nil {
			return err
		}
		st, err := os.Stat(dir)
		if err == nil {
			made = &csi.Snapshot{SnapshotId: id, SourceVolumeId: volume, CreationTime: timestamppb.New(st.ModTime()), ReadyToUse: true}
		}
		return err
	})
	return &csi.CreateSnapshotResponse{Snapshot: made}, err
}

func (d driver) DeleteSnapshot(_ context.Context, q *csi.DeleteSnapshotRequest) (*csi.DeleteSnapshotResponse, error) {
	return &csi.DeleteSnapshotResponse{}, d.ofSnapshot(q.GetSnapshotId(), os.RemoveAll)
}

// contentOf is the folder that a new volume begins with; "" for an empty one.
func (d driver) contentOf(q *csi.CreateVolumeRequest) (string, error) {
	if q.GetVolumeContentSource() == nil {
		return "", nil
	}
	snapshot := q.GetVolumeContentSource().GetSnapshot().GetSnapshotId()
	if !names.MatchString(snapshot) {
		return "", status.Errorf(codes.InvalidArgument, "volumes are made of snapshots, and %v is none", q.GetVolumeContentSource())
	}
	dir := filepath.Join(d.shared, "snapshots", snapshot)
	if _, err := os.Stat(dir); err != nil {
		return "", status.Errorf(codes.NotFound, "snapshot %s: %v", snapshot, err)
	}
	return filepath.Join(dir, "data"), nil
}

// subject says which volume or snapshot a call is about, or which it begins with.
func subject(q any) string {
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

// lifeOf is the life of a volume that a call is part of, by the prefix of the volume's class; "" for one without.
func lifeOf(q any) string {
	life, _, _ := strings.Cut(subject(q), "-pvc-")
	if !strings.HasPrefix(life, "held-") {
		return ""
	}
	return life
}
