package local

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// wantsBlock reports whether the capabilities of a volume request a block device rather than a file
// system. It returns an error if they request both, because a volume cannot change its mode.
func wantsBlock(caps ...*csi.VolumeCapability) (bool, error) {
	blocks := 0
	for _, c := range caps {
		if c.GetBlock() != nil {
			blocks++
		}
	}
	if blocks != 0 && blocks != len(caps) {
		return false, status.Error(codes.InvalidArgument, "a volume is a block device or a file system, and not both")
	}
	return blocks > 0, nil
}

// checkVolumeMode returns an error if the capability want requests another mode (block device or
// file system) than the volume with this ID has. sized is false for a volume without a record r,
// which is a folder.
func checkVolumeMode(id string, r volumeRecord, sized bool, want *csi.VolumeCapability) error {
	block := want.GetBlock() != nil
	switch {
	case !sized && block:
		return status.Errorf(codes.InvalidArgument, "volume %s is a folder on the node, not a block device", id)
	case r.Backing == backingDirectory && block:
		return status.Errorf(codes.InvalidArgument, "volume %s is a folder (its class has %s: %s), not a block device",
			id, backingParam, backingDirectory)
	case sized && block && !r.Block:
		return status.Errorf(codes.InvalidArgument,
			"volume %s was created with a file system and cannot be used as a block device", id)
	case sized && !block && r.Block:
		return status.Errorf(codes.InvalidArgument, "volume %s was created as a block device and cannot be mounted", id)
	}
	return nil
}

// createBlankFile creates the backing file of a block device. All its bytes are zero, and all
// blocks are allocated.
func createBlankFile(path string, size int64) error {
	return createAllocatedFile(path, size, func(*os.File) error { return nil })
}

// createAllocatedFile creates a file of size bytes with all blocks allocated, so that later writes
// cannot fail because the disk is full. The function fill writes the initial content.
func createAllocatedFile(path string, size int64, fill func(*os.File) error) (err error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_TRUNC|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if err := allocateBlocks(f, size); err != nil {
		return fmt.Errorf("allocating %d bytes on the disk: %w", size, err)
	}
	if err := fill(f); err != nil {
		return err
	}
	return f.Sync()
}

// keepLoopDevice attaches a loop device to image, the backing file of a block device. The loop
// device stays attached until detachLoopDevice, even if it is not open.
func keepLoopDevice(image string) error {
	l, _, err := ensureLoopDevice(image)
	if err != nil {
		return err
	}
	defer l.Close()
	i, err := unix.IoctlLoopGetStatus64(int(l.Fd()))
	if err != nil {
		return fmt.Errorf("reading the status of %s: %w", l.Name(), err)
	}
	if i.Flags&unix.LO_FLAGS_AUTOCLEAR == 0 {
		return nil
	}
	i.Flags &^= unix.LO_FLAGS_AUTOCLEAR
	if err := unix.IoctlLoopSetStatus64(int(l.Fd()), i); err != nil {
		return fmt.Errorf("keeping %s attached: %w", l.Name(), err)
	}
	return nil
}

// detachLoopDevice detaches the loop device of image, the backing file of a volume. If the loop
// device is still open, it returns an error, and the kernel detaches the device when it is closed.
func detachLoopDevice(image string) error {
	l, err := findLoopDevice(image)
	if errors.Is(err, os.ErrNotExist) || l == nil && err == nil {
		return nil
	}
	if err != nil {
		return err
	}
	name := l.Name()
	err = unix.IoctlSetInt(int(l.Fd()), unix.LOOP_CLR_FD, 0)
	if err = errors.Join(err, l.Close()); err != nil && !errors.Is(err, unix.ENXIO) {
		return fmt.Errorf("detaching %s: %w", name, err)
	}
	if l, err = findLoopDevice(image); l != nil {
		l.Close()
		return fmt.Errorf("%s is still open somewhere on the node", name)
	}
	return err
}

// bindDevice bind-mounts the loop device of the backing file image on the file target. It is
// idempotent.
func bindDevice(image, target string) error {
	l, err := findLoopDevice(image)
	if err != nil {
		return err
	}
	if l == nil {
		return fmt.Errorf("no loop device is attached to %s", image)
	}
	defer l.Close()
	if err := os.MkdirAll(filepath.Dir(target), 0o750); err != nil {
		return err
	}
	f, err := os.OpenFile(target, os.O_CREATE|os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
	if err != nil {
		return err
	}
	f.Close()
	is, err := mountinfo.Mounted(target)
	if err != nil {
		return err
	}
	if !is {
		if err := unix.Mount(l.Name(), target, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("binding %s to %s: %w", l.Name(), target, err)
		}
		return nil
	}
	if ok, err := isDevice(target, l.number); err != nil || !ok {
		return errors.Join(err, fmt.Errorf("something else is mounted at %s", target))
	}
	return nil
}

// isDevice reports whether the file at path is the device node of the loop device with this number.
func isDevice(path string, number uint64) (bool, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return false, err
	}
	return st.Mode&unix.S_IFMT == unix.S_IFBLK && st.Rdev == unix.Mkdev(loopMajor, uint32(number)), nil
}

// publishBlock bind-mounts the loop device of a staged block device at the target path of the
// request. For access by a single pod, it returns an error if the device is mounted elsewhere.
func (s *nodeServer) publishBlock(q *csi.NodePublishVolumeRequest) error {
	id := q.GetVolumeId()
	if q.GetVolumeCapability().GetAccessMode().GetMode() == csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER {
		if other, err := s.otherDeviceMount(id, q.GetTargetPath()); err != nil || other != "" {
			return status.Errorf(codes.FailedPrecondition,
				"volume %s is for one pod and is already published at %s (%v)", id, other, err)
		}
	}
	if err := bindDevice(s.driver.store.imageFile(id), q.GetTargetPath()); err != nil {
		return status.Errorf(codes.Internal, "publishing volume %s: %v", id, err)
	}
	return nil
}

// otherDeviceMount returns a path, other than target, at which the block device of the volume with
// this ID is bind-mounted. It returns "" if no such path exists.
func (s *nodeServer) otherDeviceMount(id, target string) (string, error) {
	l, err := findLoopDevice(s.driver.store.imageFile(id))
	if l == nil || err != nil {
		return "", err
	}
	defer l.Close()
	root := "/" + filepath.Base(l.Name())
	all, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		return m.Root != root || filepath.Clean(m.Mountpoint) == filepath.Clean(target), false
	})
	for _, m := range all {
		if ok, err := isDevice(m.Mountpoint, l.number); err == nil && ok {
			return m.Mountpoint, nil
		}
	}
	return "", err
}

// NodeExpandVolume grows the file system of a mounted volume to the size of the volume, or sets the
// quota of a folder to that size. The Controller service must have expanded the volume before.
func (s *nodeServer) NodeExpandVolume(_ context.Context, q *csi.NodeExpandVolumeRequest) (
	*csi.NodeExpandVolumeResponse, error,
) {
	id := q.GetVolumeId()
	dir, err := s.driver.store.volumeFolder(id)
	if err != nil {
		return nil, err
	}
	if q.GetVolumePath() == "" {
		return nil, status.Error(codes.InvalidArgument, "volume path is missing")
	}
	defer s.driver.locks.Lock(id)()
	r, sized, err := s.driver.findVolume(id, dir)
	if err != nil {
		return nil, err
	}
	if !sized { // a folder without a record has no size limit
		return &csi.NodeExpandVolumeResponse{CapacityBytes: q.GetCapacityRange().GetRequiredBytes()}, nil
	}
	if want := q.GetCapacityRange().GetRequiredBytes(); want > r.Size {
		return nil, status.Errorf(codes.OutOfRange,
			"volume %s has %d bytes, and %d are requested: expand the volume first", id, r.Size, want)
	}
	if r.Backing == backingDirectory {
		if err := s.driver.folders.setSizeLimit(r); err != nil {
			return nil, status.Errorf(codes.FailedPrecondition, "growing volume %s on node %s: %v", id,
				s.driver.cfg.NodeID, err)
		}
		return &csi.NodeExpandVolumeResponse{CapacityBytes: r.Size}, nil
	}
	if err := growImage(s.driver.store.imageFile(id), r.Size); err != nil {
		return nil, s.driver.space.statusError("growing volume "+id, err)
	}
	return &csi.NodeExpandVolumeResponse{CapacityBytes: r.Size}, nil
}

// deviceSize returns the size in bytes of the block device at a path.
func deviceSize(path string) (int64, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	return f.Seek(0, io.SeekEnd)
}
