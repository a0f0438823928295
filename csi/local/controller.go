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

// CreateVolume creates an image or a folder of the requested size. The name is the volume ID, so
// that a repeated call finds the same volume.
func (d *Driver) CreateVolume(ctx context.Context, q *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	if _, err := d.volumeFolder(q.GetName()); err != nil {
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
		return nil, status.Errorf(codes.ResourceExhausted, "the volume is requested on another node: this is node %s", d.cfg.NodeID)
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
	return &csi.CreateVolumeResponse{Volume: &csi.Volume{VolumeId: q.GetName(), CapacityBytes: size, ContentSource: q.GetVolumeContentSource(),
		VolumeContext: map[string]string{sizedContextKey: "true"}, AccessibleTopology: []*csi.Topology{d.nodeTopology()}}}, nil
}

// createImageVolume creates an image unless it exists. The caller must hold the volume's lock.
func (d *Driver) createImageVolume(ctx context.Context, id string, r volumeRecord, want *csi.CapacityRange) (int64, error) {
	return d.createOnce(id, r, want, func(r *volumeRecord) error {
		if err := d.checkSpace("volume "+id, r.Size); err != nil {
			return err
		}
		err := d.writeVolume(id, *r)
		if err != nil {
			return d.statusError("making volume "+id, err)
		}
		if r.Block {
			err = createBlankFile(d.imageFile(id), r.Size)
		} else {
			err = createImage(ctx, d.imageFile(id), r.Size)
		}
		if err != nil {
			return d.statusError("making volume "+id, errors.Join(err, d.removeImage(id)))
		}
		return nil
	})
}

// createOnce runs do to create a volume unless it exists. Creations are serialized, so that no two
// of them use the same free space.
func (d *Driver) createOnce(id string, r volumeRecord, want *csi.CapacityRange, do func(*volumeRecord) error) (int64, error) {
	failed := func(err error) (int64, error) { return 0, d.statusError("making volume "+id, err) }
	have, known, err := d.readVolume(id)
	if err != nil {
		return failed(err)
	}
	if known && have.Ready {
		return have.Size, checkCompatible(id, have, r, want)
	}
	d.allocMu.Lock()
	defer d.allocMu.Unlock()
	if known { // an earlier driver process did not finish it
		if err := d.discardVolume(id, have); err != nil {
			return failed(err)
		}
	}
	if err := do(&r); err != nil {
		return 0, err
	}
	r.Ready = true
	if err := d.writeVolume(id, r); err != nil {
		return failed(err)
	}
	return r.Size, nil
}

// checkCompatible returns an error if an existing volume does not satisfy the request.
func checkCompatible(id string, have, asked volumeRecord, want *csi.CapacityRange) error {
	if most := want.GetLimitBytes(); have.Size < want.GetRequiredBytes() || most > 0 && have.Size > most {
		return status.Errorf(codes.AlreadyExists, "volume %s exists and has %d bytes", id, have.Size)
	}
	if have.Block != asked.Block {
		return status.Errorf(codes.AlreadyExists, "volume %s exists, and is a block device: %v", id, have.Block)
	}
	if have.Backing != asked.Backing {
		return status.Errorf(codes.AlreadyExists, "volume %s exists and is of another backing", id)
	}
	if have.SourceVolume != asked.SourceVolume || have.SourceSnapshot != asked.SourceSnapshot {
		return status.Errorf(codes.AlreadyExists, "volume %s exists and was created from another source", id)
	}
	return nil
}

// checkSpace returns an error if there is no space for more bytes. what is "volume x" or "snapshot
// x".
func (d *Driver) checkSpace(what string, more int64) error {
	if err := d.checkWritable(); err != nil {
		return status.Errorf(codes.ResourceExhausted, "%s on node %s: %v", what, d.cfg.NodeID, err)
	}
	room, err := d.availableBytes()
	if err != nil {
		return status.Errorf(codes.Internal, "making room for %s: %v", what, err)
	}
	if more > room {
		return status.Errorf(codes.ResourceExhausted, "%s wants %d MiB, and node %s has %d MiB left for volumes", what, more/mib, d.cfg.NodeID, room/mib)
	}
	return nil
}

// sizedContextKey is in the volume context of volumes that CreateVolume created. If such a volume
// is missing, it is not replaced by an empty folder.
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

// DeleteVolume deletes a volume and its data. It refuses a volume that is still staged or
// published.
func (d *Driver) DeleteVolume(_ context.Context, q *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	id := q.GetVolumeId()
	dir, err := d.volumeFolder(id)
	if err != nil {
		return nil, err
	}
	defer d.locks.Lock(id)()
	r, _, err := d.readVolume(id)
	if err != nil {
		return nil, status.Errorf(codes.Internal, "deleting volume %s: %v", id, err)
	}
	if r.Backing == backingDirectory {
		dir = d.directoryPath(id)
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
		return nil, status.Errorf(codes.Internal, "deleting volume %s on node %s: %v", id, d.cfg.NodeID, d.explainReadOnly(err))
	}
	return &csi.DeleteVolumeResponse{}, nil
}

// attachedDevices returns the loop device of the volume's image, if any; it means that the volume
// is mounted somewhere.
func (d *Driver) attachedDevices(id string) ([]string, error) {
	l, err := findLoopDevice(d.imageFile(id))
	if errors.Is(err, os.ErrNotExist) || l == nil {
		if errors.Is(err, os.ErrNotExist) {
			err = nil
		}
		return nil, err
	}
	defer l.Close()
	return []string{l.Name()}, nil
}

// removeVolume deletes a volume that is not in use. It does not delete files on other mounts.
func (d *Driver) removeVolume(id string, r volumeRecord) error {
	// Rename first, so that a partially deleted volume is never found under its name.
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

// removeImage deletes an image, and its record last.
func (d *Driver) removeImage(id string) error {
	for _, path := range []string{d.imageFile(id), d.recordFile(id)} {
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}

// findVolume returns the record of an existing volume; sized is false for a folder without a
// record. It returns NotFound if there is no such volume.
func (d *Driver) findVolume(id, dir string) (r volumeRecord, sized bool, err error) {
	r, sized, err = d.readVolume(id)
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

// ControllerExpandVolume implements the Controller service. The file system grows while it is
// mounted, or when it is mounted next. If it cannot grow while it is mounted, the response requires
// expansion on the node.
func (d *Driver) ControllerExpandVolume(_ context.Context, q *csi.ControllerExpandVolumeRequest) (*csi.ControllerExpandVolumeResponse, error) {
	id := q.GetVolumeId()
	dir, err := d.volumeFolder(id)
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
	if !sized { // the size of a folder is not limited
		return &csi.ControllerExpandVolumeResponse{CapacityBytes: q.GetCapacityRange().GetRequiredBytes()}, nil
	}
	d.allocMu.Lock()
	defer d.allocMu.Unlock()
	if more := size - have.Size; more > 0 {
		if err := d.checkSpace("volume "+id, more); err != nil {
			return nil, err
		}
		// Reserved before it is allocated: after a crash in between, no space is counted twice.
		have.Size = size
		if err := d.writeVolume(id, have); err != nil {
			return nil, d.statusError("growing volume "+id, err)
		}
	}
	if have.Backing == backingDirectory {
		if err := d.setSizeLimit(have); err != nil {
			return nil, status.Errorf(codes.FailedPrecondition, "growing volume %s on node %s: %v", id, d.cfg.NodeID, err)
		}
		return &csi.ControllerExpandVolumeResponse{CapacityBytes: have.Size}, nil
	}
	err = growImage(d.imageFile(id), have.Size)
	if err != nil && !errors.Is(err, errOfflineOnly) {
		return nil, d.statusError("growing volume "+id, errors.Join(err, d.revertSize(id, have, err)))
	}
	return &csi.ControllerExpandVolumeResponse{CapacityBytes: have.Size, NodeExpansionRequired: err != nil}, nil
}

// revertSize sets the recorded size back to the size of the image if the disk was too full for the
// larger size. A request for less then succeeds.
func (d *Driver) revertSize(id string, r volumeRecord, cause error) error {
	if !errors.Is(cause, unix.ENOSPC) && !errors.Is(cause, unix.EDQUOT) {
		return nil
	}
	st, err := os.Stat(d.imageFile(id))
	if err != nil {
		return err
	}
	r.Size = st.Size()
	return d.writeVolume(id, r)
}

// ValidateVolumeCapabilities implements the Controller service.
func (d *Driver) ValidateVolumeCapabilities(_ context.Context, q *csi.ValidateVolumeCapabilitiesRequest) (*csi.ValidateVolumeCapabilitiesResponse, error) {
	dir, err := d.volumeFolder(q.GetVolumeId())
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

// ControllerGetCapabilities implements the Controller service.
func (d *Driver) ControllerGetCapabilities(context.Context, *csi.ControllerGetCapabilitiesRequest) (*csi.ControllerGetCapabilitiesResponse, error) {
	var out []*csi.ControllerServiceCapability
	for _, t := range []csi.ControllerServiceCapability_RPC_Type{csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME,
		csi.ControllerServiceCapability_RPC_GET_CAPACITY, csi.ControllerServiceCapability_RPC_EXPAND_VOLUME,
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_SNAPSHOT, csi.ControllerServiceCapability_RPC_LIST_SNAPSHOTS,
		csi.ControllerServiceCapability_RPC_CLONE_VOLUME, csi.ControllerServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER} {
		out = append(out, &csi.ControllerServiceCapability{Type: &csi.ControllerServiceCapability_Rpc{Rpc: &csi.ControllerServiceCapability_RPC{Type: t}}})
	}
	return &csi.ControllerGetCapabilitiesResponse{Capabilities: out}, nil
}
