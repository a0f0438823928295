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

func (d *Driver) snapshotFile(id string) string { return filepath.Join(d.cfg.Root, snapshotsDir, id) }
func (d *Driver) snapshotRecord(id string) string {
	return d.snapshotFile(id) + ".json"
}

// snapshot returns the record of a snapshot; ok is false where it has none.
func (d *Driver) snapshot(id string) (r record, ok bool, err error) {
	r, ok, err = read(d.snapshotRecord(id))
	if err != nil {
		err = status.Errorf(codes.Internal, "record of snapshot %s: %v", id, err)
	}
	return r, ok, err
}

func snapshotOf(id string, r record) *csi.Snapshot {
	return &csi.Snapshot{SnapshotId: id, SourceVolumeId: r.From, SizeBytes: r.Size, CreationTime: timestamppb.New(time.Unix(0, r.Made)),
		ReadyToUse: true, GroupSnapshotId: r.Group}
}

// CreateSnapshot keeps what a volume holds now. The name is the id: asking again finds the same snapshot.
func (d *Driver) CreateSnapshot(ctx context.Context, q *csi.CreateSnapshotRequest) (*csi.CreateSnapshotResponse, error) {
	id, from := q.GetName(), q.GetSourceVolumeId()
	if _, err := d.folder(id); err != nil {
		return nil, err
	}
	dir, err := d.folder(from)
	if err != nil {
		return nil, err
	}
	for k := range q.GetParameters() {
		return nil, status.Errorf(codes.InvalidArgument, "parameter %q of the snapshot's class is not known: this driver has none", k)
	}
	have, known, err := d.snapshot(id)
	if err != nil {
		return nil, err
	}
	if known && have.Group != "" {
		return nil, status.Errorf(codes.AlreadyExists, "snapshot %s exists and is one of group %s", id, have.Group)
	}
	if known && have.From != from {
		return nil, status.Errorf(codes.AlreadyExists, "snapshot %s exists and is one of volume %s", id, have.From)
	}
	if !known || !have.Ready {
		if r, sized, err := d.exists(from, dir); err != nil {
			return nil, err
		} else if r.Backing == backingDirectory {
			return nil, noCopies(from)
		} else if !sized {
			return nil, status.Errorf(codes.FailedPrecondition, "volume %s is a folder that somebody made by hand: there are no snapshots of such", from)
		}
		over, err := d.jobs.run(ctx, d.life(), "snapshot "+id, func(ctx context.Context) error { return d.take(ctx, id, from) })
		switch {
		case !over:
			return nil, status.Errorf(codes.Aborted, "snapshot %s is still being made", id)
		case err != nil:
			return nil, err
		}
		if have, known, err = d.snapshot(id); err == nil && !known {
			err = status.Errorf(codes.Aborted, "snapshot %s was deleted meanwhile", id)
		}
		if err != nil {
			return nil, err
		}
	}
	return &csi.CreateSnapshotResponse{Snapshot: snapshotOf(id, have)}, nil
}

// take makes a snapshot unless it is there.
func (d *Driver) take(ctx context.Context, id, from string) error {
	defer d.locks.Lock(snapshotLock(id))()
	if have, known, err := d.snapshot(id); err != nil || known && have.Ready {
		return err
	}
	defer d.locks.Lock(from)()
	source, sized, err := d.volume(from)
	if err == nil && (!sized || !source.Ready) {
		return status.Errorf(codes.NotFound, "volume %s does not exist on node %s", from, d.cfg.NodeID)
	}
	if err == nil {
		err = d.removeSnapshot(id) // what was begun by a driver that ended
	}
	if err != nil {
		return status.Errorf(codes.Internal, "snapshot %s: %v", id, err)
	}
	r := record{Size: source.Size, Used: source.Used, Block: source.Block, From: from, Shared: true} // Shared: as long as that is not known
	if err := d.promise(d.snapshotRecord(id), "snapshot "+id, r); err != nil {
		return err
	}
	r.Shared, err = d.copyVolume(ctx, from, d.snapshotFile(id))
	if err == nil {
		r.Ready, r.Made = true, time.Now().UnixNano()
		err = write(d.snapshotRecord(id), r)
	}
	if err == nil {
		return nil
	}
	return d.copyFailed("taking snapshot "+id+" of volume "+from, err, d.removeSnapshot(id))
}

// promise notes what is about to be made if there is room for it.
func (d *Driver) promise(path, what string, r record) error {
	d.making.Lock()
	defer d.making.Unlock()
	if err := d.fits(what, r.Size); err != nil {
		return err
	}
	if err := write(path, r); err != nil {
		return d.failed("record of "+what, err)
	}
	return nil
}

// copyFailed is the answer to a call whose copy did not come about; undo is what came of taking it away.
func (d *Driver) copyFailed(what string, err, undo error) error {
	return d.failed(what, errors.Join(err, undo))
}

// snapshotLock is the name of a snapshot's lock, which is none that a volume can have.
func snapshotLock(id string) string { return "snapshot/" + id }

// removeSnapshot takes away a snapshot, its record last.
func (d *Driver) removeSnapshot(id string) error {
	for _, path := range []string{d.snapshotFile(id), d.snapshotRecord(id)} {
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}

// DeleteSnapshot removes a snapshot. Volumes that were made of it stay.
func (d *Driver) DeleteSnapshot(_ context.Context, q *csi.DeleteSnapshotRequest) (*csi.DeleteSnapshotResponse, error) {
	if _, err := d.folder(q.GetSnapshotId()); err != nil {
		return nil, err
	}
	defer d.locks.Lock(snapshotLock(q.GetSnapshotId()))()
	if r, known, err := d.snapshot(q.GetSnapshotId()); err != nil {
		return nil, err
	} else if known && r.Group != "" {
		return nil, status.Errorf(codes.InvalidArgument, "snapshot %s is one of group %s and goes with it: delete the group", q.GetSnapshotId(), r.Group)
	}
	if err := d.removeSnapshot(q.GetSnapshotId()); err != nil {
		return nil, status.Errorf(codes.Internal, "deleting snapshot %s: %v", q.GetSnapshotId(), err)
	}
	return &csi.DeleteSnapshotResponse{}, nil
}

// ListSnapshots lists by id. A token is the place in the list that comes next.
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
		r, ok, err := d.snapshot(id)
		if err != nil {
			return nil, err
		}
		if ok && r.Ready && (q.GetSourceVolumeId() == "" || q.GetSourceVolumeId() == r.From) {
			all = append(all, &csi.ListSnapshotsResponse_Entry{Snapshot: snapshotOf(id, r)})
		}
	}
	slices.SortFunc(all, func(a, b *csi.ListSnapshotsResponse_Entry) int {
		return strings.Compare(a.Snapshot.SnapshotId, b.Snapshot.SnapshotId)
	})
	first := 0
	if t := q.GetStartingToken(); t != "" {
		if first, err = strconv.Atoi(t); err != nil || first < 0 || first > len(all) {
			return nil, status.Errorf(codes.Aborted, "starting token %q is none of this driver's", t)
		}
	}
	if q.GetMaxEntries() < 0 {
		return nil, status.Error(codes.InvalidArgument, "a number of entries below zero")
	}
	res := &csi.ListSnapshotsResponse{Entries: all[first:]}
	if most := int(q.GetMaxEntries()); most > 0 && most < len(res.Entries) {
		res.Entries, res.NextToken = res.Entries[:most], strconv.Itoa(first+most)
	}
	return res, nil
}
