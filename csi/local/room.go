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

// checkWritable returns an error, with a remedy, if the disk of the root folder is mounted
// read-only.
func (d *Driver) checkWritable() error {
	var fs unix.Statfs_t
	if err := unix.Statfs(d.cfg.Root, &fs); err != nil || fs.Flags&unix.ST_RDONLY == 0 {
		return nil // a later write reports its own error
	}
	return fmt.Errorf("%s, where the node has its volumes, is on a disk that is read-only: "+
		"the node's kernel log may say why; mount it for writing", d.cfg.Root)
}

// statusError returns the gRPC status of a failed creation or expansion. The argument what is the
// text before err. The status has the code ResourceExhausted if the disk is full or read-only, so
// that the caller tries another node.
func (d *Driver) statusError(what string, err error) error {
	code := codes.Internal
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		code, err = codes.ResourceExhausted, fmt.Errorf("the disk of %s is full: %w", d.cfg.Root, err)
	case errors.Is(err, unix.EROFS):
		code, err = codes.ResourceExhausted, d.explainReadOnly(err)
	case errors.Is(err, errToolMissing), errors.Is(err, errBusy), errors.Is(err, errOfflineOnly):
		code = codes.FailedPrecondition
	}
	return status.Errorf(code, "%s on node %s: %v", what, d.cfg.NodeID, err)
}

// explainReadOnly returns err with a remedy if its cause is that the disk is mounted read-only.
// Otherwise it returns err unchanged.
func (d *Driver) explainReadOnly(err error) error {
	if why := d.checkWritable(); why != nil && errors.Is(err, unix.EROFS) {
		return fmt.Errorf("%w (%w)", why, err)
	}
	return err
}

// availableBytes returns the number of bytes that new volumes may use. It is limited by
// Config.Limit and KeepFree.
func (d *Driver) availableBytes() (int64, error) {
	var fs unix.Statfs_t
	if err := unix.Statfs(d.cfg.Root, &fs); err != nil {
		return 0, fmt.Errorf("free space of %s: %w", d.cfg.Root, err)
	}
	sum, open, err := d.reservedBytes()
	if err != nil {
		return 0, err
	}
	free := int64(fs.Bavail)*fs.Bsize - d.cfg.KeepFree.BytesOf(int64(fs.Blocks)*fs.Bsize) - open
	if d.cfg.Limit > 0 {
		free = min(free, d.cfg.Limit-sum)
	}
	return max(0, free/mib*mib), nil
}

// requestedSize returns the size of a new volume for the requested range r, or 1 GiB for an empty
// range. It is the smallest multiple of 1 MiB in the range that is at least minVolumeBytes. It
// returns OutOfRange if there is no such size.
func requestedSize(r *csi.CapacityRange) (int64, error) {
	least, most := r.GetRequiredBytes(), r.GetLimitBytes()
	switch {
	case least < 0 || most < 0:
		return 0, status.Error(codes.OutOfRange, "the size is negative")
	case most > 0 && least > most:
		return 0, status.Errorf(codes.OutOfRange, "the minimum size %d is more than the maximum size %d", least, most)
	case least > math.MaxInt64-mib:
		return 0, status.Errorf(codes.OutOfRange, "%d bytes exceed the maximum size of a volume", least)
	}
	size := max(minVolumeBytes, (least+mib-1)/mib*mib)
	if least == 0 && most == 0 {
		size = 1 << 30
	}
	if most > 0 && size > most {
		return 0, status.Errorf(codes.OutOfRange, "a volume has a multiple of 1 MiB and at least %d MiB: no volume has at most %d bytes", minVolumeBytes/mib, most)
	}
	return size, nil
}

// GetCapacity returns the number of bytes that new volumes with the requested parameters may use.
// If such volumes cannot be created at all, it returns FailedPrecondition with the reason, because
// the response has no field for it.
func (d *Driver) GetCapacity(_ context.Context, q *csi.GetCapacityRequest) (*csi.GetCapacityResponse, error) {
	if len(q.GetVolumeCapabilities()) > 0 && checkCapabilities(q.GetVolumeCapabilities()...) != nil {
		return &csi.GetCapacityResponse{}, nil
	}
	if t := q.GetAccessibleTopology(); t != nil && !d.isReachable(&csi.TopologyRequirement{Requisite: []*csi.Topology{t}}) {
		return &csi.GetCapacityResponse{}, nil
	}
	if err := d.checkWritable(); err != nil {
		return nil, status.Error(codes.FailedPrecondition, err.Error())
	}
	// Other parameters are not checked here: CreateVolume refuses them with an error for the user.
	if q.GetParameters()[backingParam] == backingDirectory {
		if err := checkDirectoryRequest(q.GetVolumeCapabilities(), nil); err != nil {
			return &csi.GetCapacityResponse{}, nil
		}
		if err := d.quotas.checkReady(d.cfg.Root); err != nil {
			return nil, status.Error(codes.FailedPrecondition, err.Error())
		}
	}
	d.allocMu.Lock()
	defer d.allocMu.Unlock()
	n, err := d.availableBytes()
	if err != nil {
		return nil, status.Error(codes.Internal, err.Error())
	}
	return &csi.GetCapacityResponse{AvailableCapacity: n}, nil
}
