package local

import (
	"context"
	"errors"
	"os"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// createFromSource creates a volume with the content of a snapshot, or of another volume of this
// node, unless the new volume exists. It returns the size of the new volume. The request q contains
// the source.
func (d *Driver) createFromSource(ctx context.Context, q *csi.CreateVolumeRequest, size int64, block bool) (
	int64, error,
) {
	id, want := q.GetName(), q.GetCapacityRange()
	r, source, err := d.resolveSource(q.GetVolumeContentSource())
	if err != nil {
		return 0, err
	}
	r.Block = block
	have, known, err := d.store.readVolume(id)
	if err != nil {
		return 0, status.Error(codes.Internal, err.Error())
	}
	if known && have.Ready {
		return have.Size, checkCompatible(id, have, r, want)
	}
	switch {
	case source == nil || !source.Ready:
		if known { // unfinished; without its source, it cannot be finished
			defer d.locks.Lock(id)()
			if err := d.discardVolume(id, have); err != nil {
				return 0, status.Errorf(codes.Internal, "removing the unfinished volume %s: %v", id, err)
			}
		}
		return 0, status.Errorf(codes.NotFound, "%s, the source of volume %s, does not exist on node %s", sourceName(r),
			id, d.cfg.NodeID)
	case source.Backing == backingDirectory:
		return 0, errNoCopies(r.SourceVolume)
	case source.Block != block:
		return 0, status.Errorf(codes.InvalidArgument,
			"%s is a block device: %v; volume %s, a copy of it, must have the same mode", sourceName(r),
			source.Block, id)
	case want.GetRequiredBytes() == 0 && want.GetLimitBytes() == 0:
		size = source.Size
	case size < source.Size:
		return 0, status.Errorf(codes.OutOfRange, "volume %s with %d bytes is too small for its source: %s has %d", id,
			size, sourceName(r), source.Size)
	}
	r.Size, r.Initialized = size, source.Initialized
	over, err := d.jobs.runShared(ctx, d.jobContext(), "volume "+id, func(ctx context.Context) error {
		return d.copyFromSource(ctx, id, r)
	})
	switch {
	case !over:
		return 0, status.Errorf(codes.Aborted, "volume %s is still being made of %s", id, sourceName(r))
	case err != nil:
		return 0, err
	}
	return size, nil
}

// resolveSource returns the record of the source s, a snapshot or a volume, or nil if it does not
// exist. It also returns a record r for a new volume that is created from s. Only the fields about
// the source are set in r.
func (d *Driver) resolveSource(s *csi.VolumeContentSource) (r volumeRecord, source *volumeRecord, err error) {
	var known bool
	var have volumeRecord
	switch {
	case s.GetSnapshot() != nil:
		if _, err := d.store.volumeFolder(s.GetSnapshot().GetSnapshotId()); err != nil {
			return r, nil, err
		}
		r.SourceSnapshot = s.GetSnapshot().GetSnapshotId()
		have, known, err = d.store.readSnapshot(r.SourceSnapshot)
	case s.GetVolume() != nil:
		if _, err := d.store.volumeFolder(s.GetVolume().GetVolumeId()); err != nil {
			return r, nil, err
		}
		r.SourceVolume = s.GetVolume().GetVolumeId()
		if have, known, err = d.store.readVolume(r.SourceVolume); err != nil {
			err = status.Error(codes.Internal, err.Error())
		}
	default:
		return r, nil, status.Error(codes.InvalidArgument, "the source of a volume must be a snapshot or a volume")
	}
	if known {
		source = &have
	}
	return r, source, err
}

func sourceName(r volumeRecord) string {
	if r.SourceSnapshot != "" {
		return "snapshot " + r.SourceSnapshot
	}
	return "volume " + r.SourceVolume
}

// copyFromSource creates the volume with this ID, unless it exists, with the content of the source
// in its record r. It reserves the full size first, so that the space is still available after the
// copy.
func (d *Driver) copyFromSource(ctx context.Context, id string, r volumeRecord) error {
	defer d.locks.Lock(id)()
	have, known, err := d.store.readVolume(id)
	switch {
	case err != nil:
		return status.Error(codes.Internal, err.Error())
	case known && have.Ready:
		return nil
	case known:
		if err := d.discardVolume(id, have); err != nil {
			return status.Errorf(codes.Internal, "making volume %s: %v", id, err)
		}
	}
	lock := r.SourceVolume
	if r.SourceSnapshot != "" {
		lock = snapshotLockName(r.SourceSnapshot)
	}
	defer d.locks.Lock(lock)()
	r.Shared = true // until the copy has shown it
	if err := d.space.reserveSpace(d.store.recordFile(id), "volume "+id, r); err != nil {
		return err
	}
	if r.SourceSnapshot != "" {
		still := func(do func(context.Context) error) error { return do(ctx) }
		r.Shared, err = copyImage(ctx, d.store.snapshotFile(r.SourceSnapshot), d.store.imageFile(id), still)
	} else {
		r.Shared, err = d.copyVolume(ctx, r.SourceVolume, d.store.imageFile(id))
	}
	if err == nil {
		err = allocateWhole(d.store.imageFile(id), r.Size)
	}
	if err == nil {
		r.Ready = true
		err = d.store.writeVolume(id, r)
	}
	if err == nil {
		return nil
	}
	return d.space.copyFailed("making volume "+id+" of "+sourceName(r), err, d.store.removeImage(id))
}

// allocateWhole allocates disk blocks for the first size bytes of the file at path, and syncs the
// file.
func allocateWhole(path string, size int64) error {
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	return errors.Join(allocateBlocks(f, size), f.Sync(), f.Close())
}
