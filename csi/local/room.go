package local

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// diskSpace reserves space on the disk for volumes and snapshots, and explains errors of the disk.
type diskSpace struct {
	cfg     *Config
	store   *volumeStore
	folders *folderVolumes
	mu      sync.Mutex // held while disk space is checked and allocated
}

// checkWritable returns an error, with a remedy, if the disk of the root folder is mounted
// read-only.
func (s *diskSpace) checkWritable() error {
	var fs unix.Statfs_t
	if err := unix.Statfs(s.cfg.Root, &fs); err != nil || fs.Flags&unix.ST_RDONLY == 0 {
		return nil // a later write reports its own error
	}
	return fmt.Errorf("%s, where the node has its volumes, is on a disk that is read-only: "+
		"the node's kernel log may say why; mount it for writing", s.cfg.Root)
}

// statusError returns the gRPC status of a failed creation or expansion. Its message is prefix, the
// node, and err. If the disk is full or read-only, the code is ResourceExhausted, so that the
// caller tries another node.
func (s *diskSpace) statusError(prefix string, err error) error {
	code := codes.Internal
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		code, err = codes.ResourceExhausted, fmt.Errorf("the disk of %s is full: %w", s.cfg.Root, err)
	case errors.Is(err, unix.EROFS):
		code, err = codes.ResourceExhausted, s.explainReadOnly(err)
	case errors.Is(err, errToolMissing), errors.Is(err, errBusy), errors.Is(err, errOfflineOnly):
		code = codes.FailedPrecondition
	}
	return status.Errorf(code, "%s on node %s: %v", prefix, s.cfg.NodeID, err)
}

// explainReadOnly returns err, with a remedy if the disk is mounted read-only and this caused err.
func (s *diskSpace) explainReadOnly(err error) error {
	if why := s.checkWritable(); why != nil && errors.Is(err, unix.EROFS) {
		return fmt.Errorf("%w (%w)", why, err)
	}
	return err
}

// availableBytes returns the number of bytes that new volumes may use. It is limited by
// Config.Limit and KeepFree.
func (s *diskSpace) availableBytes() (int64, error) {
	var fs unix.Statfs_t
	if err := unix.Statfs(s.cfg.Root, &fs); err != nil {
		return 0, fmt.Errorf("free space of %s: %w", s.cfg.Root, err)
	}
	sum, open, err := s.reservedBytes()
	if err != nil {
		return 0, err
	}
	free := int64(fs.Bavail)*fs.Bsize - s.cfg.KeepFree.BytesOf(int64(fs.Blocks)*fs.Bsize) - open
	if s.cfg.Limit > 0 {
		free = min(free, s.cfg.Limit-sum)
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
		return 0, status.Errorf(codes.OutOfRange,
			"a volume has a multiple of 1 MiB and at least %d MiB: no volume has at most %d bytes",
			minVolumeBytes/mib, most)
	}
	return size, nil
}

// GetCapacity returns the number of bytes that new volumes with the requested parameters may use.
// It returns FailedPrecondition with the reason if such volumes cannot be created at all, because
// the response has no field for a reason.
func (d *Driver) GetCapacity(_ context.Context, q *csi.GetCapacityRequest) (*csi.GetCapacityResponse, error) {
	if len(q.GetVolumeCapabilities()) > 0 && checkCapabilities(q.GetVolumeCapabilities()...) != nil {
		return &csi.GetCapacityResponse{}, nil
	}
	if t := q.GetAccessibleTopology(); t != nil &&
		!d.isReachable(&csi.TopologyRequirement{Requisite: []*csi.Topology{t}}) {
		return &csi.GetCapacityResponse{}, nil
	}
	if err := d.space.checkWritable(); err != nil {
		return nil, status.Error(codes.FailedPrecondition, err.Error())
	}
	// Other parameters are not checked here: CreateVolume refuses them with an error for the user.
	if q.GetParameters()[backingParam] == backingDirectory {
		if err := checkDirectoryRequest(q.GetVolumeCapabilities(), nil); err != nil {
			return &csi.GetCapacityResponse{}, nil
		}
		if err := d.folders.quotas.checkReady(d.cfg.Root); err != nil {
			return nil, status.Error(codes.FailedPrecondition, err.Error())
		}
	}
	d.space.mu.Lock()
	defer d.space.mu.Unlock()
	n, err := d.space.availableBytes()
	if err != nil {
		return nil, status.Error(codes.Internal, err.Error())
	}
	return &csi.GetCapacityResponse{AvailableCapacity: n}, nil
}
