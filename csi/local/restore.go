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

// makeOf makes a volume that begins with what a snapshot or another volume of this node holds.
func (d *Driver) makeOf(ctx context.Context, q *csi.CreateVolumeRequest, size int64, block bool) (int64, error) {
	id, want := q.GetName(), q.GetCapacityRange()
	r, source, err := d.source(q.GetVolumeContentSource())
	if err != nil {
		return 0, err
	}
	r.Block = block
	have, known, err := d.volume(id)
	if err != nil {
		return 0, status.Error(codes.Internal, err.Error())
	}
	if known && have.Ready {
		return have.Size, compatible(id, have, r, want)
	}
	switch {
	case source == nil || !source.Ready:
		if known { // begun, and of no use to anybody
			defer d.locks.Lock(id)()
			if err := d.discard(id, have); err != nil {
				return 0, status.Errorf(codes.Internal, "taking away what was begun of volume %s: %v", id, err)
			}
		}
		return 0, status.Errorf(codes.NotFound, "%s, of which volume %s is to be made, does not exist on node %s", nameOf(r), id, d.cfg.NodeID)
	case source.Backing == backingDirectory:
		return 0, noCopies(r.From)
	case source.Block != block:
		return 0, status.Errorf(codes.InvalidArgument, "%s is a block device: %v; volume %s, which is to be made of it, cannot be another thing", nameOf(r), source.Block, id)
	case want.GetRequiredBytes() == 0 && want.GetLimitBytes() == 0:
		size = source.Size
	case size < source.Size:
		return 0, status.Errorf(codes.OutOfRange, "volume %s of %d bytes is too small for what it is to hold: %s has %d", id, size, nameOf(r), source.Size)
	}
	r.Size, r.Used = size, source.Used
	over, err := d.jobs.run(ctx, d.life(), "volume "+id, func(ctx context.Context) error { return d.fillFrom(ctx, id, r) })
	switch {
	case !over:
		return 0, status.Errorf(codes.Aborted, "volume %s is still being made of %s", id, nameOf(r))
	case err != nil:
		return 0, err
	}
	return size, nil
}

// source is what a volume is to be made of: how its record says so, and the source's own record, nil where there is none.
func (d *Driver) source(s *csi.VolumeContentSource) (r record, source *record, err error) {
	var known bool
	var have record
	switch {
	case s.GetSnapshot() != nil:
		if _, err := d.folder(s.GetSnapshot().GetSnapshotId()); err != nil {
			return r, nil, err
		}
		r.FromRecord = s.GetSnapshot().GetSnapshotId()
		have, known, err = d.snapshot(r.FromRecord)
	case s.GetVolume() != nil:
		if _, err := d.folder(s.GetVolume().GetVolumeId()); err != nil {
			return r, nil, err
		}
		r.From = s.GetVolume().GetVolumeId()
		if have, known, err = d.volume(r.From); err != nil {
			err = status.Error(codes.Internal, err.Error())
		}
	default:
		return r, nil, status.Error(codes.InvalidArgument, "a volume is made of a snapshot or of a volume, and of nothing else")
	}
	if known {
		source = &have
	}
	return r, source, err
}

func nameOf(r record) string {
	if r.FromRecord != "" {
		return "snapshot " + r.FromRecord
	}
	return "volume " + r.From
}

// fillFrom makes a volume of what its record names unless it is there. Its whole size is taken of the disk first, so that
// it finds no room gone when the copy is there.
func (d *Driver) fillFrom(ctx context.Context, id string, r record) error {
	defer d.locks.Lock(id)()
	have, known, err := d.volume(id)
	switch {
	case err != nil:
		return status.Error(codes.Internal, err.Error())
	case known && have.Ready:
		return nil
	case known:
		if err := d.discard(id, have); err != nil {
			return status.Errorf(codes.Internal, "making volume %s: %v", id, err)
		}
	}
	lock := r.From
	if r.FromRecord != "" {
		lock = snapshotLock(r.FromRecord)
	}
	defer d.locks.Lock(lock)()
	r.Shared = true // as long as it is not known
	if err := d.promise(d.recordFile(id), "volume "+id, r); err != nil {
		return err
	}
	if r.FromRecord != "" {
		still := func(do func(context.Context) error) error { return do(ctx) }
		r.Shared, err = copyImage(ctx, d.snapshotFile(r.FromRecord), d.image(id), still)
	} else {
		r.Shared, err = d.copyVolume(ctx, r.From, d.image(id))
	}
	if err == nil {
		err = takeRoom(d.image(id), r.Size)
	}
	if err == nil {
		r.Ready = true
		err = d.keep(id, r)
	}
	if err == nil {
		return nil
	}
	return d.copyFailed("making volume "+id+" of "+nameOf(r), err, d.removeImage(id))
}

// takeRoom gives a file all the blocks of its size.
func takeRoom(path string, size int64) error {
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	return errors.Join(allocate(f, size), f.Sync(), f.Close())
}
