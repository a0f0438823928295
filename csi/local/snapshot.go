package local

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"
)

func (s *volumeStore) snapshotFile(id string) string {
	return filepath.Join(s.cfg.Root, snapshotsDir, id)
}
func (s *volumeStore) snapshotRecordFile(id string) string {
	return s.snapshotFile(id) + ".json"
}

// readSnapshot returns the record of the snapshot with this ID. ok is false if no such snapshot
// exists.
func (s *volumeStore) readSnapshot(id string) (r volumeRecord, ok bool, err error) {
	r, ok, err = readRecord(s.snapshotRecordFile(id))
	if err != nil {
		err = status.Errorf(codes.Internal, "record of snapshot %s: %v", id, err)
	}
	return r, ok, err
}

func snapshotOf(id string, r volumeRecord) *csi.Snapshot {
	return &csi.Snapshot{SnapshotId: id, SourceVolumeId: r.SourceVolume, SizeBytes: r.Size,
		CreationTime: timestamppb.New(time.Unix(0, r.CreatedAt)),
		ReadyToUse:   true, GroupSnapshotId: r.Group}
}

// CreateSnapshot copies the current content of a volume. The name in the request becomes the
// snapshot ID, so that a repeated call returns the same snapshot.
func (d *Driver) CreateSnapshot(ctx context.Context, q *csi.CreateSnapshotRequest) (
	*csi.CreateSnapshotResponse, error,
) {
	id, from := q.GetName(), q.GetSourceVolumeId()
	if _, err := d.store.volumeFolder(id); err != nil {
		return nil, err
	}
	dir, err := d.store.volumeFolder(from)
	if err != nil {
		return nil, err
	}
	for k := range q.GetParameters() {
		return nil, status.Errorf(codes.InvalidArgument,
			"parameter %q of the snapshot's class is unknown: this driver has no parameters", k)
	}
	have, known, err := d.store.readSnapshot(id)
	if err != nil {
		return nil, err
	}
	if known && have.Group != "" {
		return nil, status.Errorf(codes.AlreadyExists, "snapshot %s exists and is part of group %s", id, have.Group)
	}
	if known && have.SourceVolume != from {
		return nil, status.Errorf(codes.AlreadyExists, "snapshot %s exists and is a snapshot of volume %s", id,
			have.SourceVolume)
	}
	if !known || !have.Ready {
		if r, sized, err := d.findVolume(from, dir); err != nil {
			return nil, err
		} else if r.Backing == backingDirectory {
			return nil, errNoCopies(from)
		} else if !sized {
			return nil, status.Errorf(codes.FailedPrecondition,
				"volume %s is a folder that was created by hand, which does not support snapshots", from)
		}
		over, err := d.jobs.runShared(ctx, d.jobContext(), "snapshot "+id, func(ctx context.Context) error {
			return d.createSnapshot(ctx, id, from)
		})
		switch {
		case !over:
			return nil, status.Errorf(codes.Aborted, "snapshot %s is still being made", id)
		case err != nil:
			return nil, err
		}
		if have, known, err = d.store.readSnapshot(id); err == nil && !known {
			err = status.Errorf(codes.Aborted, "snapshot %s was deleted meanwhile", id)
		}
		if err != nil {
			return nil, err
		}
	}
	return &csi.CreateSnapshotResponse{Snapshot: snapshotOf(id, have)}, nil
}

// createSnapshot creates a snapshot, with this ID, of a volume, given by its ID. It does nothing if
// the snapshot exists. It takes the locks of the snapshot and the volume.
func (d *Driver) createSnapshot(ctx context.Context, id, volume string) error {
	defer d.locks.Lock(snapshotLockName(id))()
	if have, known, err := d.store.readSnapshot(id); err != nil || known && have.Ready {
		return err
	}
	defer d.locks.Lock(volume)()
	source, sized, err := d.store.readVolume(volume)
	if err == nil && (!sized || !source.Ready) {
		return status.Errorf(codes.NotFound, "volume %s does not exist on node %s", volume, d.cfg.NodeID)
	}
	if err == nil {
		err = d.store.removeSnapshot(id) // an earlier process of the driver did not finish the snapshot
	}
	if err != nil {
		return status.Errorf(codes.Internal, "snapshot %s: %v", id, err)
	}
	// Shared is true until copyVolume has returned its value.
	r := volumeRecord{Size: source.Size, Initialized: source.Initialized, Block: source.Block,
		SourceVolume: volume, Shared: true}
	if err := d.space.reserveSpace(d.store.snapshotRecordFile(id), "snapshot "+id, r); err != nil {
		return err
	}
	r.Shared, err = d.copyVolume(ctx, volume, d.store.snapshotFile(id))
	if err == nil {
		r.Ready, r.CreatedAt = true, time.Now().UnixNano()
		err = writeRecord(d.store.snapshotRecordFile(id), r)
	}
	if err == nil {
		return nil
	}
	return d.space.copyFailed("taking snapshot "+id+" of volume "+volume, err, d.store.removeSnapshot(id))
}

// reserveSpace reserves disk space for a new volume or snapshot: it writes the object's record r to
// path. It returns an error if the disk does not have enough space. object is the name of the
// object in errors.
func (s *diskSpace) reserveSpace(path, object string, r volumeRecord) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.checkSpace(object, r.Size); err != nil {
		return err
	}
	if err := writeRecord(path, r); err != nil {
		return s.statusError("record of "+object, err)
	}
	return nil
}

// copyFailed returns the gRPC status for a copy that has failed with err. prefix is the start of
// its message. cleanupErr is the error, if any, of removing the incomplete copy.
func (s *diskSpace) copyFailed(prefix string, err, cleanupErr error) error {
	return s.statusError(prefix, errors.Join(err, cleanupErr))
}

// snapshotLockName returns the key of the lock of the snapshot with this ID. No volume has this
// key.
func snapshotLockName(id string) string { return "snapshot/" + id }

// removeSnapshot deletes the file of the snapshot with this ID, and then its record.
func (s *volumeStore) removeSnapshot(id string) error {
	for _, path := range []string{s.snapshotFile(id), s.snapshotRecordFile(id)} {
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}

// DeleteSnapshot deletes a snapshot. Volumes that were created from it remain. It returns an error
// for a snapshot in a group.
func (d *Driver) DeleteSnapshot(_ context.Context, q *csi.DeleteSnapshotRequest) (*csi.DeleteSnapshotResponse, error) {
	if _, err := d.store.volumeFolder(q.GetSnapshotId()); err != nil {
		return nil, err
	}
	defer d.locks.Lock(snapshotLockName(q.GetSnapshotId()))()
	if r, known, err := d.store.readSnapshot(q.GetSnapshotId()); err != nil {
		return nil, err
	} else if known && r.Group != "" {
		return nil, status.Errorf(codes.InvalidArgument, "snapshot %s is part of group %s: delete the group",
			q.GetSnapshotId(), r.Group)
	}
	if err := d.store.removeSnapshot(q.GetSnapshotId()); err != nil {
		return nil, status.Errorf(codes.Internal, "deleting snapshot %s: %v", q.GetSnapshotId(), err)
	}
	return &csi.DeleteSnapshotResponse{}, nil
}

// ListSnapshots returns the complete snapshots that match the request, sorted by ID. The page token
// is the index of the next snapshot.
func (d *Driver) ListSnapshots(_ context.Context, q *csi.ListSnapshotsRequest) (*csi.ListSnapshotsResponse, error) {
	var all []*csi.ListSnapshotsResponse_Entry
	entries, err := os.ReadDir(filepath.Join(d.cfg.Root, snapshotsDir))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, status.Error(codes.Internal, err.Error())
	}
	for _, e := range entries {
		id, isRecord := strings.CutSuffix(e.Name(), ".json")
		if !isRecord || q.GetSnapshotId() != "" && q.GetSnapshotId() != id {
			continue
		}
		r, ok, err := d.store.readSnapshot(id)
		if err != nil {
			return nil, err
		}
		if ok && r.Ready && (q.GetSourceVolumeId() == "" || q.GetSourceVolumeId() == r.SourceVolume) {
			all = append(all, &csi.ListSnapshotsResponse_Entry{Snapshot: snapshotOf(id, r)})
		}
	}
	slices.SortFunc(all, func(a, b *csi.ListSnapshotsResponse_Entry) int {
		return strings.Compare(a.Snapshot.SnapshotId, b.Snapshot.SnapshotId)
	})
	first := 0
	if t := q.GetStartingToken(); t != "" {
		if first, err = strconv.Atoi(t); err != nil || first < 0 || first > len(all) {
			return nil, status.Errorf(codes.Aborted, "starting token %q is invalid", t)
		}
	}
	if q.GetMaxEntries() < 0 {
		return nil, status.Error(codes.InvalidArgument, "the number of entries is negative")
	}
	res := &csi.ListSnapshotsResponse{Entries: all[first:]}
	if most := int(q.GetMaxEntries()); most > 0 && most < len(res.Entries) {
		res.Entries, res.NextToken = res.Entries[:most], strconv.Itoa(first+most)
	}
	return res, nil
}
