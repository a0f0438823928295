package local

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"keelson.dev/keelson/internal/durable"
)

// groupsDir is the folder with the record of each group of snapshots, ID.json. The record is
// written before the first snapshot is created, and again when all exist. It is deleted after the
// snapshots. They are ordinary snapshots, and the record of each contains the ID of the group.
const groupsDir = ".groups"

// maxGroupVolumes is the maximum number of volumes in a group, which are frozen at the same time.
const maxGroupVolumes = 64

// groupRecord is the JSON record of a group of snapshots. Unknown fields are ignored.
type groupRecord struct {
	Volumes   []string `json:"of"`              // volume IDs of the snapshots, sorted
	Ready     bool     `json:"ready,omitempty"` // false: unfinished, and created again
	CreatedAt int64    `json:"made,omitempty"`  // creation time in Unix nanoseconds
}

func (d *Driver) groupRecordFile(id string) string {
	return filepath.Join(d.cfg.Root, groupsDir, id+".json")
}

// readGroup returns the record of the group of snapshots id; ok is false if none exists.
func (d *Driver) readGroup(id string) (g groupRecord, ok bool, err error) {
	b, err := os.ReadFile(d.groupRecordFile(id))
	if errors.Is(err, os.ErrNotExist) {
		return groupRecord{}, false, nil
	}
	if err == nil {
		err = json.Unmarshal(b, &g)
	}
	if err != nil {
		return groupRecord{}, false, status.Errorf(codes.Internal, "record of the group of snapshots %s: %v", id, err)
	}
	return g, true, nil
}

func (d *Driver) writeGroup(id string, g groupRecord) error {
	b, err := json.Marshal(g)
	if err == nil {
		err = os.MkdirAll(filepath.Join(d.cfg.Root, groupsDir), 0o700)
	}
	if err == nil {
		err = durable.Write(d.groupRecordFile(id), b)
	}
	if err != nil {
		return fmt.Errorf("record of the group of snapshots %s: %w", id, err)
	}
	return nil
}

// groupLockName returns the key of the lock of the group id. No volume or snapshot has this key.
func groupLockName(id string) string { return "group/" + id }

// memberSnapshotID returns the ID of the snapshot of a volume in the group id. It is a hash of
// both, so that it need not be stored.
func memberSnapshotID(id, volume string) string {
	return fmt.Sprintf("member-%x", sha256.Sum256([]byte(id+"\x00"+volume)))
}

// GroupControllerGetCapabilities returns the optional calls of the GroupController service that
// this driver supports.
func (d *Driver) GroupControllerGetCapabilities(context.Context, *csi.GroupControllerGetCapabilitiesRequest) (*csi.GroupControllerGetCapabilitiesResponse, error) {
	const can = csi.GroupControllerServiceCapability_RPC_CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT
	return &csi.GroupControllerGetCapabilitiesResponse{Capabilities: []*csi.GroupControllerServiceCapability{
		{Type: &csi.GroupControllerServiceCapability_Rpc{Rpc: &csi.GroupControllerServiceCapability_RPC{Type: can}}}}}, nil
}

// CreateVolumeGroupSnapshot creates snapshots of several volumes with their content at a single
// moment. The name in the request becomes the group ID, so that a repeated call returns the same
// group.
func (d *Driver) CreateVolumeGroupSnapshot(ctx context.Context, q *csi.CreateVolumeGroupSnapshotRequest) (*csi.CreateVolumeGroupSnapshotResponse, error) {
	id, of := q.GetName(), slices.Sorted(slices.Values(q.GetSourceVolumeIds()))
	if _, err := d.volumeFolder(id); err != nil {
		return nil, err
	}
	if len(of) == 0 || len(of) > maxGroupVolumes {
		return nil, status.Errorf(codes.InvalidArgument, "a group of snapshots has 1 to %d volumes, but %s has %d", maxGroupVolumes, id, len(of))
	}
	for i, v := range of {
		if _, err := d.volumeFolder(v); err != nil {
			return nil, err
		}
		if i > 0 && of[i-1] == v {
			return nil, status.Errorf(codes.InvalidArgument, "group of snapshots %s: volume %s is named twice", id, v)
		}
	}
	for k := range q.GetParameters() {
		return nil, status.Errorf(codes.InvalidArgument, "parameter %q of the group's class is unknown: this driver has no parameters", k)
	}
	have, known, err := d.readGroup(id)
	switch {
	case err != nil:
		return nil, err
	case known && !slices.Equal(have.Volumes, of):
		return nil, status.Errorf(codes.AlreadyExists, "group of snapshots %s exists with the volumes %q", id, have.Volumes)
	case known && have.Ready:
		g, err := d.groupSnapshotOf(id, have)
		return &csi.CreateVolumeGroupSnapshotResponse{GroupSnapshot: g}, err
	}
	over, err := d.jobs.runShared(ctx, d.jobContext(), "group "+id, func(ctx context.Context) error { return d.createGroup(ctx, id, of) })
	switch {
	case !over:
		return nil, status.Errorf(codes.Aborted, "group of snapshots %s is still being made", id)
	case err != nil:
		return nil, err
	}
	if have, known, err = d.readGroup(id); err == nil && !known {
		err = status.Errorf(codes.Aborted, "group of snapshots %s was deleted meanwhile", id)
	}
	if err != nil {
		return nil, err
	}
	g, err := d.groupSnapshotOf(id, have)
	return &csi.CreateVolumeGroupSnapshotResponse{GroupSnapshot: g}, err
}

// groupSnapshotOf returns the description of the group id with all its snapshots, for a response.
// It returns an error if a snapshot is missing.
func (d *Driver) groupSnapshotOf(id string, g groupRecord) (*csi.VolumeGroupSnapshot, error) {
	out := &csi.VolumeGroupSnapshot{GroupSnapshotId: id, CreationTime: timestamppb.New(time.Unix(0, g.CreatedAt)), ReadyToUse: g.Ready}
	for _, v := range g.Volumes {
		member := memberSnapshotID(id, v)
		r, ok, err := d.readSnapshot(member)
		if err != nil {
			return nil, err
		}
		if !ok || !r.Ready {
			return nil, status.Errorf(codes.Internal, "group of snapshots %s has lost its snapshot of volume %s: delete the group", id, v)
		}
		out.Snapshots = append(out.Snapshots, snapshotOf(member, r))
	}
	return out, nil
}

// createGroup creates the group of snapshots id of the volumes of, unless it exists. It holds the
// locks of all these volumes.
func (d *Driver) createGroup(ctx context.Context, id string, of []string) error {
	defer d.locks.Lock(groupLockName(id))()
	have, known, err := d.readGroup(id)
	if err != nil || known && have.Ready {
		return err
	}
	if known { // an earlier process of the driver did not finish the group
		if err := d.removeGroup(id, have); err != nil {
			return status.Errorf(codes.Internal, "group of snapshots %s: %v", id, err)
		}
	}
	for _, v := range of { // in sorted order, so that two calls cannot deadlock
		defer d.locks.Lock(v)()
	}
	records, err := d.memberRecords(id, of)
	if err != nil {
		return err
	}
	g := groupRecord{Volumes: of}
	if err := d.writeGroup(id, g); err != nil {
		return status.Errorf(codes.Internal, "%v", err)
	}
	for i, v := range of {
		if err := d.reserveSpace(d.snapshotRecordFile(memberSnapshotID(id, v)), "the snapshot of volume "+v+" in group "+id, records[i]); err != nil {
			return errors.Join(err, d.removeGroup(id, g))
		}
	}
	err = d.copyAtOnce(ctx, id, of, records, nil, nil)
	g.Ready, g.CreatedAt = true, time.Now().UnixNano()
	for i, v := range of {
		if err == nil {
			records[i].Ready, records[i].CreatedAt = true, g.CreatedAt
			err = writeRecord(d.snapshotRecordFile(memberSnapshotID(id, v)), records[i])
		}
	}
	if err == nil {
		err = d.writeGroup(id, g)
	}
	if err == nil {
		return nil
	}
	return d.copyFailed(fmt.Sprintf("taking group of snapshots %s of volumes %q", id, of), err, d.removeGroup(id, groupRecord{Volumes: of}))
}

// memberRecords returns the records of the snapshots that the group id is to contain, one for each
// volume in of. It returns an error if a volume does not exist or is a folder. The caller must hold
// the locks of the volumes.
func (d *Driver) memberRecords(id string, of []string) ([]volumeRecord, error) {
	var out []volumeRecord
	for _, v := range of {
		source, sized, err := d.readVolume(v)
		if err != nil {
			return nil, status.Errorf(codes.Internal, "group of snapshots %s: %v", id, err)
		}
		if !sized || !source.Ready {
			if _, err := os.Stat(filepath.Join(d.cfg.Root, v)); err == nil && !sized {
				return nil, status.Errorf(codes.FailedPrecondition, "volume %s is a folder that was created by hand, which does not support snapshots", v)
			}
			return nil, status.Errorf(codes.NotFound, "volume %s does not exist on node %s: a group of snapshots is of volumes of one node", v, d.cfg.NodeID)
		}
		if source.Backing == backingDirectory {
			return nil, errNoCopies(v)
		}
		out = append(out, volumeRecord{Size: source.Size, Initialized: source.Initialized, Block: source.Block, SourceVolume: v, Group: id, Shared: true})
	}
	return out, nil
}

// copyAtOnce copies the volumes of to their snapshots in the group id, with their content at a
// single moment. It copies each volume once while it may change. Then it freezes all mounted file
// systems, copies the differences, and thaws them. No copy contains data that were written after
// the freeze.
//
// It calls itself for each further volume. The argument last contains the functions that copy the
// differences of the previous volumes, and at contains their mount points. The caller must hold the
// locks of the volumes.
func (d *Driver) copyAtOnce(ctx context.Context, id string, of []string, records []volumeRecord, last []func(context.Context) error, at []string) error {
	if len(of) == 0 {
		return d.withAllFrozen(ctx, at, func(ctx context.Context) error {
			for _, one := range last {
				if err := one(ctx); err != nil {
					return err
				}
			}
			return nil
		})
	}
	mounted, busy, err := d.mountpointOf(of[0])
	if err == nil && busy {
		err = errBusy
	}
	if err != nil {
		return fmt.Errorf("volume %s: %w", of[0], err)
	}
	if mounted != "" {
		at = append(at, mounted)
	}
	records[0].Shared, err = copyImage(ctx, d.imageFile(of[0]), d.snapshotFile(memberSnapshotID(id, of[0])), func(do func(context.Context) error) error {
		return d.copyAtOnce(ctx, id, of[1:], records[1:], append(last, do), at)
	})
	return err
}

// withAllFrozen calls do while the file systems at all the paths at are frozen.
func (d *Driver) withAllFrozen(ctx context.Context, at []string, do func(context.Context) error) error {
	if len(at) == 0 {
		return do(ctx)
	}
	return d.withFrozen(ctx, at[0], func(ctx context.Context) error { return d.withAllFrozen(ctx, at[1:], do) })
}

// removeGroup deletes the snapshots of the group id, and then the group's record.
func (d *Driver) removeGroup(id string, g groupRecord) error {
	for _, v := range g.Volumes {
		member := memberSnapshotID(id, v)
		unlock := d.locks.Lock(snapshotLockName(member)) // while a volume is created from it
		err := d.removeSnapshot(member)
		unlock()
		if err != nil {
			return err
		}
	}
	if err := os.Remove(d.groupRecordFile(id)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// checkMembers returns an error if one of the snapshot IDs is not a snapshot of this group.
func (g groupRecord) checkMembers(id string, snapshots []string) error {
	var mine []string
	for _, v := range g.Volumes {
		mine = append(mine, memberSnapshotID(id, v))
	}
	for _, s := range snapshots {
		if !slices.Contains(mine, s) {
			return status.Errorf(codes.InvalidArgument, "snapshot %s is not part of group %s", s, id)
		}
	}
	return nil
}

// DeleteVolumeGroupSnapshot deletes a group and its snapshots. Volumes that were created from the
// snapshots remain.
func (d *Driver) DeleteVolumeGroupSnapshot(_ context.Context, q *csi.DeleteVolumeGroupSnapshotRequest) (*csi.DeleteVolumeGroupSnapshotResponse, error) {
	id := q.GetGroupSnapshotId()
	if _, err := d.volumeFolder(id); err != nil {
		return nil, err
	}
	defer d.locks.Lock(groupLockName(id))()
	g, known, err := d.readGroup(id)
	if err != nil {
		return nil, err
	}
	if known {
		if err := g.checkMembers(id, q.GetSnapshotIds()); err != nil {
			return nil, err
		}
		if err := d.removeGroup(id, g); err != nil {
			return nil, status.Errorf(codes.Internal, "deleting group of snapshots %s: %v", id, err)
		}
	}
	return &csi.DeleteVolumeGroupSnapshotResponse{}, nil
}

// GetVolumeGroupSnapshot returns the description of a group with all its snapshots, or NotFound.
func (d *Driver) GetVolumeGroupSnapshot(_ context.Context, q *csi.GetVolumeGroupSnapshotRequest) (*csi.GetVolumeGroupSnapshotResponse, error) {
	id := q.GetGroupSnapshotId()
	if _, err := d.volumeFolder(id); err != nil {
		return nil, err
	}
	g, known, err := d.readGroup(id)
	if err != nil {
		return nil, err
	}
	if !known || !g.Ready {
		return nil, status.Errorf(codes.NotFound, "group of snapshots %s does not exist on node %s", id, d.cfg.NodeID)
	}
	if err := g.checkMembers(id, q.GetSnapshotIds()); err != nil {
		return nil, err
	}
	out, err := d.groupSnapshotOf(id, g)
	return &csi.GetVolumeGroupSnapshotResponse{GroupSnapshot: out}, err
}
