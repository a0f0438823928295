package local

import (
	"context"
	"fmt"
	"math"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// keptFree is the part of the disk that volumes leave: below it the node counts as short of disk and evicts pods.
const keptFree = 10 // percent

// room is how many bytes new volumes can have.
func (d *Driver) room() (int64, error) {
	var fs unix.Statfs_t
	if err := unix.Statfs(d.cfg.Root, &fs); err != nil {
		return 0, fmt.Errorf("free space of %s: %w", d.cfg.Root, err)
	}
	sum, open, err := d.promised()
	if err != nil {
		return 0, err
	}
	free := int64(fs.Bavail)*fs.Bsize - int64(fs.Blocks)*fs.Bsize/100*keptFree - open
	if d.cfg.Limit > 0 {
		free = min(free, d.cfg.Limit-sum)
	}
	return max(0, free/mib*mib), nil
}

// sizeOf is the size that a range asks for, in whole MiB.
func sizeOf(r *csi.CapacityRange) (int64, error) {
	least, most := r.GetRequiredBytes(), r.GetLimitBytes()
	switch {
	case least < 0 || most < 0:
		return 0, status.Error(codes.OutOfRange, "a size below zero")
	case most > 0 && least > most:
		return 0, status.Errorf(codes.OutOfRange, "at least %d bytes and at most %d", least, most)
	case least > math.MaxInt64-mib:
		return 0, status.Errorf(codes.OutOfRange, "%d bytes are more than a volume can have", least)
	}
	size := max(smallest, (least+mib-1)/mib*mib)
	if least == 0 && most == 0 {
		size = 1 << 30
	}
	if most > 0 && size > most {
		return 0, status.Errorf(codes.OutOfRange, "volumes have whole MiB, and %d of them at least: none has at most %d bytes", smallest/mib, most)
	}
	return size, nil
}

// GetCapacity implements the Controller service. Where volumes of the class cannot be made at all the answer is
// FailedPrecondition, with the reason: a number has no place for one.
func (d *Driver) GetCapacity(_ context.Context, q *csi.GetCapacityRequest) (*csi.GetCapacityResponse, error) {
	if len(q.GetVolumeCapabilities()) > 0 && supported(q.GetVolumeCapabilities()...) != nil {
		return &csi.GetCapacityResponse{}, nil
	}
	if t := q.GetAccessibleTopology(); t != nil && !d.reachable(&csi.TopologyRequirement{Requisite: []*csi.Topology{t}}) {
		return &csi.GetCapacityResponse{}, nil
	}
	// Of the class no more than this is asked: what else it has is refused when a volume is made, with a sentence for its claim.
	if q.GetParameters()[backingParam] == backingDirectory {
		if err := fitsDirectory(q.GetVolumeCapabilities(), nil); err != nil {
			return &csi.GetCapacityResponse{}, nil
		}
		if err := d.quotas.ready(d.cfg.Root); err != nil {
			return nil, status.Error(codes.FailedPrecondition, err.Error())
		}
	}
	d.making.Lock()
	defer d.making.Unlock()
	n, err := d.room()
	if err != nil {
		return nil, status.Error(codes.Internal, err.Error())
	}
	return &csi.GetCapacityResponse{AvailableCapacity: n}, nil
}
