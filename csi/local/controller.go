package local

import (
	"context"
	"errors"
	"os"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"keelson.dev/keelson/internal/safepath"
)

// CreateVolume creates a volume of the requested size: a backing file, or a folder if the
// StorageClass requests it. The name in the request becomes the volume ID, so that a repeated call
// returns the same volume.
func (d *Driver) CreateVolume(ctx context.Context, q *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	if _, err := d.store.volumeFolder(q.GetName()); err != nil {
		return nil, err
	}
	if err := checkCapabilities(q.GetVolumeCapabilities()...); err != nil {
		return nil, err
	}
	directory, err := usesDirectory(q.GetParameters())
	switch {
	case err == nil && directory:
		err = checkDirectoryRequest(q.GetVolumeCapabilities(), q.GetVolumeContentSource())
	case err == nil:
		err = checkImageOptions(q.GetVolumeCapabilities())
	}
	if err != nil {
		return nil, err
	}
	if !d.isReachable(q.GetAccessibilityRequirements()) {
		return nil, status.Errorf(codes.ResourceExhausted, "the volume is requested on another node: this is node %s",
			d.cfg.NodeID)
	}
	size, err := requestedSize(q.GetCapacityRange())
	if err != nil {
		return nil, err
	}
	block, err := wantsBlock(q.GetVolumeCapabilities()...)
	if err != nil {
		return nil, err
	}
	switch {
	case q.GetVolumeContentSource() != nil:
		size, err = d.createFromSource(ctx, q, size, block)
	case directory:
		defer d.locks.Lock(q.GetName())()
		size, err = d.createDirectoryVolume(q.GetName(), size, q.GetCapacityRange())
	default:
		defer d.locks.Lock(q.GetName())()
		size, err = d.createImageVolume(ctx, q.GetName(), volumeRecord{Size: size, Block: block}, q.GetCapacityRange())
	}
	if err != nil {
		return nil, err
	}
	return &csi.CreateVolumeResponse{Volume: &csi.Volume{VolumeId: q.GetName(), CapacityBytes: size,
		ContentSource:      q.GetVolumeContentSource(),
		VolumeContext:      map[string]string{sizedContextKey: "true"},
		AccessibleTopology: []*csi.Topology{d.nodeTopology()}}}, nil
}

// createImageVolume creates a volume with a backing file, unless it exists, and returns its size.
// The caller must hold the lock of the volume.
func (d *Driver) createImageVolume(ctx context.Context, id string, r volumeRecord, want *csi.CapacityRange) (
	int64, error,
) {
	return d.createOnce(id, r, want, func(r *volumeRecord) error {
		if err := d.space.checkSpace("volume "+id, r.Size); err != nil {
			return err
		}
		err := d.store.writeVolume(id, *r)
		if err != nil {
			return d.space.statusError("making volume "+id, err)
		}
		if r.Block {
			err = createBlankFile(d.store.imageFile(id), r.Size)
		} else {
			err = createImage(ctx, d.store.imageFile(id), r.Size)
		}
		if err != nil {
			return d.space.statusError("making volume "+id, errors.Join(err, d.store.removeImage(id)))
		}
		return nil
	})
}

// createOnce creates the volume with this ID and the record r, and returns its size. It calls do to
// create the volume's data. If the volume exists, createOnce only checks that it satisfies the
// request. It first removes the data of an unfinished creation. Concurrent calls run one after the
// other, so that no two volumes use the same free space.
func (d *Driver) createOnce(id string, r volumeRecord, want *csi.CapacityRange, do func(*volumeRecord) error) (
	int64, error,
) {
	failed := func(err error) (int64, error) { return 0, d.space.statusError("making volume "+id, err) }
	have, known, err := d.store.readVolume(id)
	if err != nil {
		return failed(err)
	}
	if known && have.Ready {
		return have.Size, checkCompatible(id, have, r, want)
	}
	d.space.mu.Lock()
	defer d.space.mu.Unlock()
	if known { // an earlier process of the driver did not finish the creation
		if err := d.discardVolume(id, have); err != nil {
			return failed(err)
		}
	}
	if err := do(&r); err != nil {
		return 0, err
	}
	r.Ready = true
	if err := d.store.writeVolume(id, r); err != nil {
		return failed(err)
	}
	return r.Size, nil
}

// checkCompatible returns an error if an existing volume does not satisfy a request. existing is
// the volume's record. want is the requested size, and requested contains the other requested
// properties.
func checkCompatible(id string, existing, requested volumeRecord, want *csi.CapacityRange) error {
	if most := want.GetLimitBytes(); existing.Size < want.GetRequiredBytes() || most > 0 && existing.Size > most {
		return status.Errorf(codes.AlreadyExists, "volume %s exists and has %d bytes", id, existing.Size)
	}
	if existing.Block != requested.Block {
		return status.Errorf(codes.AlreadyExists, "volume %s exists, and is a block device: %v", id, existing.Block)
	}
	if existing.Backing != requested.Backing {
		return status.Errorf(codes.AlreadyExists, "volume %s exists and is of another backing", id)
	}
	if existing.SourceVolume != requested.SourceVolume || existing.SourceSnapshot != requested.SourceSnapshot {
		return status.Errorf(codes.AlreadyExists, "volume %s exists and was created from another source", id)
	}
	return nil
}

// checkSpace returns an error if fewer than required bytes are available for volumes, or if the
// disk is read-only. object is the name of the new object in the error, such as "volume x".
func (s *diskSpace) checkSpace(object string, required int64) error {
	if err := s.checkWritable(); err != nil {
		return status.Errorf(codes.ResourceExhausted, "%s on node %s: %v", object, s.cfg.NodeID, err)
	}
	room, err := s.availableBytes()
	if err != nil {
		return status.Errorf(codes.Internal, "making room for %s: %v", object, err)
	}
	if required > room {
		return status.Errorf(codes.ResourceExhausted, "%s wants %d MiB, and node %s has %d MiB left for volumes",
			object,
			required/mib, s.cfg.NodeID, room/mib)
	}
	return nil
}

// sizedContextKey is the key in the volume context that marks the volumes that CreateVolume
// created. If the data of such a volume are missing, staging fails and creates no empty folder.
const sizedContextKey = "keelson.dev/sized"

func (d *Driver) nodeTopology() *csi.Topology {
	return &csi.Topology{Segments: map[string]string{d.topologyKey(): d.cfg.NodeID}}
}

func (d *Driver) isReachable(r *csi.TopologyRequirement) bool {
	if len(r.GetRequisite()) == 0 {
		return true
	}
	for _, t := range r.GetRequisite() {
		if v, ok := t.GetSegments()[d.topologyKey()]; !ok || v == d.cfg.NodeID {
			return true
		}
	}
	return false
}

func makeFolder(dir string) error {
	if err := os.Mkdir(dir, 0o777); err != nil {
		if errors.Is(err, os.ErrExist) {
			return nil
		}
		return err
	}
	return os.Chmod(dir, 0o777) // pods write as any user, whatever the umask is
}

// DeleteVolume deletes a volume with its data. It returns FailedPrecondition if the volume is still
// staged or published.
func (d *Driver) DeleteVolume(_ context.Context, q *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	id := q.GetVolumeId()
	dir, err := d.store.volumeFolder(id)
	if err != nil {
		return nil, err
	}
	defer d.locks.Lock(id)()
	r, _, err := d.store.readVolume(id)
	if err != nil {
		return nil, status.Errorf(codes.Internal, "deleting volume %s: %v", id, err)
	}
	if r.Backing == backingDirectory {
		dir = d.folders.directoryPath(id)
	}
	used, err := otherMountsOf(dir)
	if err == nil && len(used) == 0 {
		used, err = d.attachedDevices(id)
	}
	if err != nil {
		return nil, status.Errorf(codes.Internal, "deleting volume %s: %v", id, err)
	}
	if len(used) > 0 {
		return nil, status.Errorf(codes.FailedPrecondition, "volume %s is in use at %s", id, used[0])
	}
	if err := d.removeVolume(id, r); err != nil {
		return nil, status.Errorf(codes.Internal, "deleting volume %s on node %s: %v", id, d.cfg.NodeID,
			d.space.explainReadOnly(err))
	}
	return &csi.DeleteVolumeResponse{}, nil
}

// attachedDevices returns the path of the loop device that is attached to the backing file of the
// volume with this ID. The volume is then in use. Without a loop device, the result is empty.
func (d *Driver) attachedDevices(id string) ([]string, error) {
	l, err := findLoopDevice(d.store.imageFile(id))
	if errors.Is(err, os.ErrNotExist) || l == nil {
		if errors.Is(err, os.ErrNotExist) {
			err = nil
		}
		return nil, err
	}
	defer l.Close()
	return []string{l.Name()}, nil
}

// removeVolume deletes the volume with this ID and the record r, which must not be in use. It does
// not delete files in mounts below the volume's folder.
func (d *Driver) removeVolume(id string, r volumeRecord) error {
	// The folder is renamed first, so that no call finds a partially deleted volume.
	trash := filepath.Join(d.cfg.Root, ".deleted-"+id)
	if err := safepath.RemoveAll(trash); err != nil {
		return err
	}
	if err := os.Rename(filepath.Join(d.cfg.Root, id), trash); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := safepath.RemoveAll(trash); err != nil {
		return err
	}
	return d.discardVolume(id, r)
}

// removeImage deletes the backing file of the volume with this ID, and then the volume's record.
func (s *volumeStore) removeImage(id string) error {
	for _, path := range []string{s.imageFile(id), s.recordFile(id)} {
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}

// findVolume returns the record of the existing volume with this ID. If the volume has no record,
// it is the plain folder dir without a size limit. In that case sized is false and r is empty.
// findVolume returns NotFound if the volume does not exist or is unfinished.
func (d *Driver) findVolume(id, dir string) (r volumeRecord, sized bool, err error) {
	r, sized, err = d.store.readVolume(id)
	if err != nil {
		return r, sized, status.Error(codes.Internal, err.Error())
	}
	if sized && r.Ready {
		return r, true, nil
	}
	if _, err := os.Stat(dir); err != nil || sized {
		return r, false, status.Errorf(codes.NotFound, "volume %s does not exist on node %s", id, d.cfg.NodeID)
	}
	return r, false, nil
}

// ControllerExpandVolume increases the size of a volume. A mounted file system grows at once; an
// unmounted file system grows at the next mount. If a mounted file system can grow only while it is
// not mounted, the response requires NodeExpandVolume.
func (d *Driver) ControllerExpandVolume(_ context.Context, q *csi.ControllerExpandVolumeRequest) (
	*csi.ControllerExpandVolumeResponse, error,
) {
	id := q.GetVolumeId()
	dir, err := d.store.volumeFolder(id)
	if err != nil {
		return nil, err
	}
	if q.GetCapacityRange() == nil {
		return nil, status.Error(codes.InvalidArgument, "capacity range is missing")
	}
	size, err := requestedSize(q.GetCapacityRange())
	if err != nil {
		return nil, err
	}
	defer d.locks.Lock(id)()
	have, sized, err := d.findVolume(id, dir)
	if err != nil {
		return nil, err
	}
	if !sized { // a folder without a record has no size limit
		return &csi.ControllerExpandVolumeResponse{CapacityBytes: q.GetCapacityRange().GetRequiredBytes()}, nil
	}
	d.space.mu.Lock()
	defer d.space.mu.Unlock()
	if more := size - have.Size; more > 0 {
		if err := d.space.checkSpace("volume "+id, more); err != nil {
			return nil, err
		}
		// The record reserves the space before the allocation, so that no other volume can use it
		// after a crash in between.
		have.Size = size
		if err := d.store.writeVolume(id, have); err != nil {
			return nil, d.space.statusError("growing volume "+id, err)
		}
	}
	if have.Backing == backingDirectory {
		if err := d.folders.setSizeLimit(have); err != nil {
			return nil, status.Errorf(codes.FailedPrecondition, "growing volume %s on node %s: %v", id,
				d.cfg.NodeID, err)
		}
		return &csi.ControllerExpandVolumeResponse{CapacityBytes: have.Size}, nil
	}
	err = growImage(d.store.imageFile(id), have.Size)
	if err != nil && !errors.Is(err, errOfflineOnly) {
		return nil, d.space.statusError("growing volume "+id, errors.Join(err, d.revertSize(id, have, err)))
	}
	return &csi.ControllerExpandVolumeResponse{CapacityBytes: have.Size, NodeExpansionRequired: err != nil}, nil
}

// revertSize sets the size in the record r to the size of the backing file, if an expansion failed
// with cause because the disk is full. A later request for less space can then succeed. For other
// causes it does nothing.
func (d *Driver) revertSize(id string, r volumeRecord, cause error) error {
	if !errors.Is(cause, unix.ENOSPC) && !errors.Is(cause, unix.EDQUOT) {
		return nil
	}
	st, err := os.Stat(d.store.imageFile(id))
	if err != nil {
		return err
	}
	r.Size = st.Size()
	return d.store.writeVolume(id, r)
}

// ValidateVolumeCapabilities confirms the requested capabilities if the volume supports all of
// them. Otherwise the response contains the reason.
func (d *Driver) ValidateVolumeCapabilities(
	_ context.Context, q *csi.ValidateVolumeCapabilitiesRequest,
) (*csi.ValidateVolumeCapabilitiesResponse, error) {
	dir, err := d.store.volumeFolder(q.GetVolumeId())
	if err != nil {
		return nil, err
	}
	if len(q.GetVolumeCapabilities()) == 0 {
		return nil, status.Error(codes.InvalidArgument, "volume capabilities are missing")
	}
	if _, _, err := d.findVolume(q.GetVolumeId(), dir); err != nil {
		return nil, err
	}
	if err := checkCapabilities(q.GetVolumeCapabilities()...); err != nil {
		return &csi.ValidateVolumeCapabilitiesResponse{Message: status.Convert(err).Message()}, nil
	}
	return &csi.ValidateVolumeCapabilitiesResponse{Confirmed: &csi.ValidateVolumeCapabilitiesResponse_Confirmed{
		VolumeCapabilities: q.GetVolumeCapabilities(), VolumeContext: q.GetVolumeContext()}}, nil
}

// ControllerGetCapabilities returns the optional calls of the Controller service that this driver
// supports.
func (d *Driver) ControllerGetCapabilities(
	context.Context, *csi.ControllerGetCapabilitiesRequest,
) (*csi.ControllerGetCapabilitiesResponse, error) {
	var out []*csi.ControllerServiceCapability
	for _, t := range []csi.ControllerServiceCapability_RPC_Type{
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME,
		csi.ControllerServiceCapability_RPC_GET_CAPACITY, csi.ControllerServiceCapability_RPC_EXPAND_VOLUME,
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_SNAPSHOT, csi.ControllerServiceCapability_RPC_LIST_SNAPSHOTS,
		csi.ControllerServiceCapability_RPC_CLONE_VOLUME,
		csi.ControllerServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER} {
		out = append(out,
			&csi.ControllerServiceCapability{
				Type: &csi.ControllerServiceCapability_Rpc{Rpc: &csi.ControllerServiceCapability_RPC{Type: t}}})
	}
	return &csi.ControllerGetCapabilitiesResponse{Capabilities: out}, nil
}
