package local

import (
	"context"
	"errors"
	"os"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// CreateVolume makes the folder. The name is the id: asking again finds the same volume.
func (d *Driver) CreateVolume(_ context.Context, q *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	dir, err := d.folder(q.GetName())
	if err != nil {
		return nil, err
	}
	if err := supported(q.GetVolumeCapabilities()...); err != nil {
		return nil, err
	}
	if q.GetVolumeContentSource() != nil {
		return nil, status.Error(codes.InvalidArgument, "volumes cannot be made from snapshots or other volumes")
	}
	if !d.reachable(q.GetAccessibilityRequirements()) {
		return nil, status.Errorf(codes.ResourceExhausted, "the volume is wanted elsewhere: this is node %s", d.cfg.NodeID)
	}
	if err := makeFolder(dir); err != nil {
		return nil, status.Errorf(codes.Internal, "making volume %s: %v", q.GetName(), err)
	}
	return &csi.CreateVolumeResponse{Volume: &csi.Volume{VolumeId: q.GetName(), CapacityBytes: q.GetCapacityRange().GetRequiredBytes(),
		VolumeContext: q.GetParameters(), AccessibleTopology: []*csi.Topology{d.topology()}}}, nil
}

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

// DeleteVolume removes the folder and what is in it. A volume that is still published is refused.
func (d *Driver) DeleteVolume(_ context.Context, q *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	dir, err := d.folder(q.GetVolumeId())
	if err != nil {
		return nil, err
	}
	used, err := mountsOf(dir)
	if err != nil {
		return nil, status.Errorf(codes.Internal, "deleting volume %s: %v", q.GetVolumeId(), err)
	}
	if len(used) > 0 {
		return nil, status.Errorf(codes.FailedPrecondition, "volume %s is in use at %s", q.GetVolumeId(), used[0])
	}
	// First out of sight, so that half of a volume is never found under its name.
	trash := filepath.Join(d.cfg.Root, ".deleted-"+q.GetVolumeId())
	if err := os.RemoveAll(trash); err != nil {
		return nil, status.Errorf(codes.Internal, "deleting volume %s: %v", q.GetVolumeId(), err)
	}
	if err := os.Rename(dir, trash); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, status.Errorf(codes.Internal, "deleting volume %s: %v", q.GetVolumeId(), err)
	}
	if err := os.RemoveAll(trash); err != nil {
		return nil, status.Errorf(codes.Internal, "deleting volume %s: %v", q.GetVolumeId(), err)
	}
	return &csi.DeleteVolumeResponse{}, nil
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
	if _, err := os.Stat(dir); err != nil {
		return nil, status.Errorf(codes.NotFound, "volume %s does not exist", q.GetVolumeId())
	}
	if err := supported(q.GetVolumeCapabilities()...); err != nil {
		return &csi.ValidateVolumeCapabilitiesResponse{Message: status.Convert(err).Message()}, nil
	}
	return &csi.ValidateVolumeCapabilitiesResponse{Confirmed: &csi.ValidateVolumeCapabilitiesResponse_Confirmed{VolumeCapabilities: q.GetVolumeCapabilities(), VolumeContext: q.GetVolumeContext()}}, nil
}

// ControllerGetCapabilities implements the Controller service.
func (d *Driver) ControllerGetCapabilities(context.Context, *csi.ControllerGetCapabilitiesRequest) (*csi.ControllerGetCapabilitiesResponse, error) {
	return &csi.ControllerGetCapabilitiesResponse{Capabilities: []*csi.ControllerServiceCapability{{Type: &csi.ControllerServiceCapability_Rpc{
		Rpc: &csi.ControllerServiceCapability_RPC{Type: csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME}}}}}, nil
}
