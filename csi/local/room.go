package local

import (
	"context"
	"errors"
	"fmt"
	"math"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// writable says that nothing can be written to the disk of the volumes, and what to do about it.
func (d *Driver) writable() error {
	var fs unix.Statfs_t
	if err := unix.Statfs(d.cfg.Root, &fs); err != nil || fs.Flags&unix.ST_RDONLY == 0 {
		return nil // what is to be written says why it is not
	}
	return fmt.Errorf("%s, where the node has its volumes, is on a disk that is read-only: "+
		"the node's kernel log may say why; mount it for writing", d.cfg.Root)
}

// failed is the answer to a call by which something was to be made, or to grow. Where the disk is in the way it says so, with
// the code that has who calls look for another node.
func (d *Driver) failed(what string, err error) error {
	code := codes.Internal
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		code, err = codes.ResourceExhausted, fmt.Errorf("the disk of %s is full: %w", d.cfg.Root, err)
	case errors.Is(err, unix.EROFS):
		code, err = codes.ResourceExhausted, d.explained(err)
	case errors.Is(err, errTool), errors.Is(err, errBusy), errors.Is(err, errOffline):
		code = codes.FailedPrecondition
	}
	return status.Errorf(code, "%s on node %s: %v", what, d.cfg.NodeID, err)
}

// explained is an error with what is to be done where the disk is read-only.
func (d *Driver) explained(err error) error {
	if why := d.writable(); why != nil && errors.Is(err, unix.EROFS) {
		return fmt.Errorf("%w (%w)", why, err)
	}
	return err
}

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
	free := int64(fs.Bavail)*fs.Bsize - d.cfg.KeepFree.BytesOf(int64(fs.Blocks)*fs.Bsize) - open
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
	if err := d.writable(); err != nil {
		return nil, status.Error(codes.FailedPrecondition, err.Error())
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
