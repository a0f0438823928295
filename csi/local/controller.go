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

// CreateVolume makes an image or a folder of the size asked for. The name is the id: asking again finds the same volume.
func (d *Driver) CreateVolume(ctx context.Context, q *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	if _, err := d.folder(q.GetName()); err != nil {
		return nil, err
	}
	if err := supported(q.GetVolumeCapabilities()...); err != nil {
		return nil, err
	}
	directory, err := backing(q.GetParameters())
	switch {
	case err == nil && directory:
		err = fitsDirectory(q.GetVolumeCapabilities(), q.GetVolumeContentSource())
	case err == nil:
		err = fitsImage(q.GetVolumeCapabilities())
	}
	if err != nil {
		return nil, err
	}
	if !d.reachable(q.GetAccessibilityRequirements()) {
		return nil, status.Errorf(codes.ResourceExhausted, "the volume is wanted elsewhere: this is node %s", d.cfg.NodeID)
	}
	size, err := sizeOf(q.GetCapacityRange())
	if err != nil {
		return nil, err
	}
	block, err := wantsBlock(q.GetVolumeCapabilities()...)
	if err != nil {
		return nil, err
	}
	switch {
	case q.GetVolumeContentSource() != nil:
		size, err = d.makeOf(ctx, q, size, block)
	case directory:
		defer d.locks.Lock(q.GetName())()
		size, err = d.makeDirectory(q.GetName(), size, q.GetCapacityRange())
	default:
		defer d.locks.Lock(q.GetName())()
		size, err = d.make(ctx, q.GetName(), record{Size: size, Block: block}, q.GetCapacityRange())
	}
	if err != nil {
		return nil, err
	}
	return &csi.CreateVolumeResponse{Volume: &csi.Volume{VolumeId: q.GetName(), CapacityBytes: size, ContentSource: q.GetVolumeContentSource(),
		VolumeContext: map[string]string{sizedContext: "true"}, AccessibleTopology: []*csi.Topology{d.topology()}}}, nil
}

// make makes an image unless it is there. The volume is locked.
func (d *Driver) make(ctx context.Context, id string, r record, want *csi.CapacityRange) (int64, error) {
	return d.unlessThere(id, r, want, func(r *record) error {
		if err := d.fits("volume "+id, r.Size); err != nil {
			return err
		}
		err := d.keep(id, *r)
		if err != nil {
			return d.failed("making volume "+id, err)
		}
		if r.Block {
			err = makeBlank(d.image(id), r.Size)
		} else {
			err = makeImage(ctx, d.image(id), r.Size)
		}
		if err != nil {
			return d.failed("making volume "+id, errors.Join(err, d.removeImage(id)))
		}
		return nil
	})
}

// unlessThere makes a volume unless it is there, one at a time: room is what no other takes.
func (d *Driver) unlessThere(id string, r record, want *csi.CapacityRange, do func(*record) error) (int64, error) {
	failed := func(err error) (int64, error) { return 0, d.failed("making volume "+id, err) }
	have, known, err := d.volume(id)
	if err != nil {
		return failed(err)
	}
	if known && have.Ready {
		return have.Size, compatible(id, have, r, want)
	}
	d.making.Lock()
	defer d.making.Unlock()
	if known { // begun, and its driver ended
		if err := d.discard(id, have); err != nil {
			return failed(err)
		}
	}
	if err := do(&r); err != nil {
		return 0, err
	}
	r.Ready = true
	if err := d.keep(id, r); err != nil {
		return failed(err)
	}
	return r.Size, nil
}

// compatible says why a volume that is there is not what is asked for.
func compatible(id string, have, asked record, want *csi.CapacityRange) error {
	if most := want.GetLimitBytes(); have.Size < want.GetRequiredBytes() || most > 0 && have.Size > most {
		return status.Errorf(codes.AlreadyExists, "volume %s exists and has %d bytes", id, have.Size)
	}
	if have.Block != asked.Block {
		return status.Errorf(codes.AlreadyExists, "volume %s exists, and is a block device: %v", id, have.Block)
	}
	if have.Backing != asked.Backing {
		return status.Errorf(codes.AlreadyExists, "volume %s exists and is of another backing", id)
	}
	if have.From != asked.From || have.FromRecord != asked.FromRecord {
		return status.Errorf(codes.AlreadyExists, "volume %s exists and was made of something else", id)
	}
	return nil
}

// fits says why there is no room for more bytes. what is "volume x", or "snapshot x".
func (d *Driver) fits(what string, more int64) error {
	if err := d.writable(); err != nil {
		return status.Errorf(codes.ResourceExhausted, "%s on node %s: %v", what, d.cfg.NodeID, err)
	}
	room, err := d.room()
	if err != nil {
		return status.Errorf(codes.Internal, "making room for %s: %v", what, err)
	}
	if more > room {
		return status.Errorf(codes.ResourceExhausted, "%s wants %d MiB, and node %s has %d MiB left for volumes", what, more/mib, d.cfg.NodeID, room/mib)
	}
	return nil
}

// sizedContext is in the context of volumes that CreateVolume made: where one is missing, no folder takes its place.
const sizedContext = "keelson.dev/sized"

func (d *Driver) topology() *csi.Topology {
	return &csi.Topology{Segments: map[string]string{d.topologyKey(): d.cfg.NodeID}}
}

func (d *Driver) reachable(r *csi.TopologyRequirement) bool {
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
	return os.Chmod(dir, 0o777) // pods write as any user, whatever our mask says
}

// DeleteVolume removes a volume and what is in it. One that is still staged or published is refused.
func (d *Driver) DeleteVolume(_ context.Context, q *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	id := q.GetVolumeId()
	dir, err := d.folder(id)
	if err != nil {
		return nil, err
	}
	defer d.locks.Lock(id)()
	r, _, err := d.volume(id)
	if err != nil {
		return nil, status.Errorf(codes.Internal, "deleting volume %s: %v", id, err)
	}
	if r.Backing == backingDirectory {
		dir = d.directory(id)
	}
	used, err := mountsOf(dir)
	if err == nil && len(used) == 0 {
		used, err = d.shownAt(id)
	}
	if err != nil {
		return nil, status.Errorf(codes.Internal, "deleting volume %s: %v", id, err)
	}
	if len(used) > 0 {
		return nil, status.Errorf(codes.FailedPrecondition, "volume %s is in use at %s", id, used[0])
	}
	if err := d.remove(id, r); err != nil {
		return nil, status.Errorf(codes.Internal, "deleting volume %s on node %s: %v", id, d.cfg.NodeID, d.explained(err))
	}
	return &csi.DeleteVolumeResponse{}, nil
}

// shownAt names the block device that shows the volume's image: whoever has it mounted.
func (d *Driver) shownAt(id string) ([]string, error) {
	l, err := attached(d.image(id))
	if errors.Is(err, os.ErrNotExist) || l == nil {
		if errors.Is(err, os.ErrNotExist) {
			err = nil
		}
		return nil, err
	}
	defer l.Close()
	return []string{l.Name()}, nil
}

// remove takes away a volume that nobody uses. Nothing is removed from another mount.
func (d *Driver) remove(id string, r record) error {
	// First out of sight, so that half of a volume is never found under its name.
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
	return d.discard(id, r)
}

// removeImage takes away an image, its record last.
func (d *Driver) removeImage(id string) error {
	for _, path := range []string{d.image(id), d.recordFile(id)} {
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}

// exists says whether there is such a volume, of either sort.
func (d *Driver) exists(id, dir string) (r record, sized bool, err error) {
	r, sized, err = d.volume(id)
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

// ControllerExpandVolume implements the Controller service. The file system grows with the volume, while it is mounted or
// when it is again. Where it cannot while it is mounted, that is left to be done on the node.
func (d *Driver) ControllerExpandVolume(_ context.Context, q *csi.ControllerExpandVolumeRequest) (*csi.ControllerExpandVolumeResponse, error) {
	id := q.GetVolumeId()
	dir, err := d.folder(id)
	if err != nil {
		return nil, err
	}
	if q.GetCapacityRange() == nil {
		return nil, status.Error(codes.InvalidArgument, "capacity range is missing")
	}
	size, err := sizeOf(q.GetCapacityRange())
	if err != nil {
		return nil, err
	}
	defer d.locks.Lock(id)()
	have, sized, err := d.exists(id, dir)
	if err != nil {
		return nil, err
	}
	if !sized { // a folder has the room of its disk
		return &csi.ControllerExpandVolumeResponse{CapacityBytes: q.GetCapacityRange().GetRequiredBytes()}, nil
	}
	d.making.Lock()
	defer d.making.Unlock()
	if more := size - have.Size; more > 0 {
		if err := d.fits("volume "+id, more); err != nil {
			return nil, err
		}
		// Promised before it is taken: an end in between leaves no room counted twice.
		have.Size = size
		if err := d.keep(id, have); err != nil {
			return nil, d.failed("growing volume "+id, err)
		}
	}
	if have.Backing == backingDirectory {
		if err := d.holdTo(have); err != nil {
			return nil, status.Errorf(codes.FailedPrecondition, "growing volume %s on node %s: %v", id, d.cfg.NodeID, err)
		}
		return &csi.ControllerExpandVolumeResponse{CapacityBytes: have.Size}, nil
	}
	err = growImage(d.image(id), have.Size)
	if err != nil && !errors.Is(err, errOffline) {
		return nil, d.failed("growing volume "+id, errors.Join(err, d.asItWas(id, have, err)))
	}
	return &csi.ControllerExpandVolumeResponse{CapacityBytes: have.Size, NodeExpansionRequired: err != nil}, nil
}

// asItWas takes back what was promised to a volume which the disk has no room for after all: who asks for less then has that.
func (d *Driver) asItWas(id string, r record, cause error) error {
	if !errors.Is(cause, unix.ENOSPC) && !errors.Is(cause, unix.EDQUOT) {
		return nil
	}
	st, err := os.Stat(d.image(id))
	if err != nil {
		return err
	}
	r.Size = st.Size()
	return d.keep(id, r)
}

// ValidateVolumeCapabilities implements the Controller service.
func (d *Driver) ValidateVolumeCapabilities(_ context.Context, q *csi.ValidateVolumeCapabilitiesRequest) (*csi.ValidateVolumeCapabilitiesResponse, error) {
	dir, err := d.folder(q.GetVolumeId())
	if err != nil {
		return nil, err
	}
	if len(q.GetVolumeCapabilities()) == 0 {
		return nil, status.Error(codes.InvalidArgument, "volume capabilities are missing")
	}
	if _, _, err := d.exists(q.GetVolumeId(), dir); err != nil {
		return nil, err
	}
	if err := supported(q.GetVolumeCapabilities()...); err != nil {
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
