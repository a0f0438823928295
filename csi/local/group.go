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
// written before the first snapshot is created, and again when all snapshots exist. It is deleted
// after the snapshots. The snapshots are ordinary snapshots with the ID of the group in their
// records.
const groupsDir = ".groups"

// maxGroupVolumes is the maximum number of volumes in a group. All of them are frozen at the same
// time.
const maxGroupVolumes = 64

// groupRecord is the JSON record of a group of snapshots. Unknown fields are ignored.
type groupRecord struct {
	Volumes   []string `json:"of"`              // IDs of the volumes of which the group has snapshots, sorted
	Ready     bool     `json:"ready,omitempty"` // false: unfinished, and created again
	CreatedAt int64    `json:"made,omitempty"`  // creation time in Unix nanoseconds
}

func (s *volumeStore) groupRecordFile(id string) string {
	return filepath.Join(s.cfg.Root, groupsDir, id+".json")
}

// readGroup returns the record of the group of snapshots with this ID. ok is false if no such group
// exists.
func (s *volumeStore) readGroup(id string) (g groupRecord, ok bool, err error) {
	b, err := os.ReadFile(s.groupRecordFile(id))
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

func (s *volumeStore) writeGroup(id string, g groupRecord) error {
	b, err := json.Marshal(g)
	if err == nil {
		err = os.MkdirAll(filepath.Join(s.cfg.Root, groupsDir), 0o700)
	}
	if err == nil {
		err = durable.WriteIfChanged(s.groupRecordFile(id), b, durable.Intact)
	}
	if err != nil {
		return fmt.Errorf("record of the group of snapshots %s: %w", id, err)
	}
	return nil
}

// groupLockName returns the key of the lock of the group with this ID. No volume or snapshot has
// this key.
func groupLockName(id string) string { return "group/" + id }

// memberSnapshotID returns the ID of a volume's snapshot in a group. It is a hash of the group ID
// and the volume ID, so that it need not be stored.
func memberSnapshotID(groupID, volume string) string {
	return fmt.Sprintf("member-%x", sha256.Sum256([]byte(groupID+"\x00"+volume)))
}

// groupServer implements the GroupController service: it creates and deletes groups of snapshots.
type groupServer struct {
	csi.UnimplementedGroupControllerServer
	driver *Driver
}

// GroupControllerGetCapabilities returns the optional calls of the GroupController service that
// this driver supports.
func (s *groupServer) GroupControllerGetCapabilities(
	context.Context, *csi.GroupControllerGetCapabilitiesRequest,
) (*csi.GroupControllerGetCapabilitiesResponse, error) {
	const can = csi.GroupControllerServiceCapability_RPC_CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT
	return &csi.GroupControllerGetCapabilitiesResponse{Capabilities: []*csi.GroupControllerServiceCapability{
			{Type: &csi.GroupControllerServiceCapability_Rpc{
				Rpc: &csi.GroupControllerServiceCapability_RPC{Type: can}}}}},
		nil
}

// CreateVolumeGroupSnapshot creates snapshots of several volumes, all of the same point in time.
// The name in the request becomes the group ID, so that a repeated call returns the same group.
func (s *groupServer) CreateVolumeGroupSnapshot(
	ctx context.Context, q *csi.CreateVolumeGroupSnapshotRequest,
) (*csi.CreateVolumeGroupSnapshotResponse, error) {
	id, of := q.GetName(), slices.Sorted(slices.Values(q.GetSourceVolumeIds()))
	if _, err := s.driver.store.volumeFolder(id); err != nil {
		return nil, err
	}
	if len(of) == 0 || len(of) > maxGroupVolumes {
		return nil, status.Errorf(codes.InvalidArgument, "a group of snapshots has 1 to %d volumes, but %s has %d",
			maxGroupVolumes, id, len(of))
	}
	for i, v := range of {
		if _, err := s.driver.store.volumeFolder(v); err != nil {
			return nil, err
		}
		if i > 0 && of[i-1] == v {
			return nil, status.Errorf(codes.InvalidArgument, "group of snapshots %s: volume %s is named twice", id, v)
		}
	}
	for k := range q.GetParameters() {
		return nil, status.Errorf(codes.InvalidArgument,
			"parameter %q of the group's class is unknown: this driver has no parameters", k)
	}
	have, known, err := s.driver.store.readGroup(id)
	switch {
	case err != nil:
		return nil, err
	case known && !slices.Equal(have.Volumes, of):
		return nil, status.Errorf(codes.AlreadyExists, "group of snapshots %s exists with the volumes %q",
			id, have.Volumes)
	case known && have.Ready:
		g, err := s.groupSnapshotOf(id, have)
		return &csi.CreateVolumeGroupSnapshotResponse{GroupSnapshot: g}, err
	}
	over, err := s.driver.jobs.runShared(ctx, s.driver.jobContext(), "group "+id, func(ctx context.Context) error {
		return s.createGroup(ctx, id, of)
	})
	switch {
	case !over:
		return nil, status.Errorf(codes.Aborted, "group of snapshots %s is still being made", id)
	case err != nil:
		return nil, err
	}
	if have, known, err = s.driver.store.readGroup(id); err == nil && !known {
		err = status.Errorf(codes.Aborted, "group of snapshots %s was deleted meanwhile", id)
	}
	if err != nil {
		return nil, err
	}
	g, err := s.groupSnapshotOf(id, have)
	return &csi.CreateVolumeGroupSnapshotResponse{GroupSnapshot: g}, err
}

// groupSnapshotOf returns the response message for the group with this ID, with all its snapshots.
// It returns an error if a snapshot is missing.
func (s *groupServer) groupSnapshotOf(id string, g groupRecord) (*csi.VolumeGroupSnapshot, error) {
	out := &csi.VolumeGroupSnapshot{GroupSnapshotId: id, CreationTime: timestamppb.New(time.Unix(0, g.CreatedAt)),
		ReadyToUse: g.Ready}
	for _, v := range g.Volumes {
		member := memberSnapshotID(id, v)
		r, ok, err := s.driver.store.readSnapshot(member)
		if err != nil {
			return nil, err
		}
		if !ok || !r.Ready {
			return nil, status.Errorf(codes.Internal,
				"group of snapshots %s has lost its snapshot of volume %s: delete the group", id, v)
		}
		out.Snapshots = append(out.Snapshots, snapshotOf(member, r))
	}
	return out, nil
}

// createGroup creates the group with this ID, with snapshots of the given volumes, unless it
// exists. It holds the locks of all these volumes.
func (s *groupServer) createGroup(ctx context.Context, id string, volumes []string) error {
	defer s.driver.locks.Lock(groupLockName(id))()
	have, known, err := s.driver.store.readGroup(id)
	if err != nil || known && have.Ready {
		return err
	}
	if known { // an earlier process of the driver did not finish the group
		if err := s.removeGroup(id, have); err != nil {
			return status.Errorf(codes.Internal, "group of snapshots %s: %v", id, err)
		}
	}
	for _, v := range volumes { // in sorted order, so that two calls cannot deadlock
		defer s.driver.locks.Lock(v)()
	}
	records, err := s.memberRecords(id, volumes)
	if err != nil {
		return err
	}
	g := groupRecord{Volumes: volumes}
	if err := s.driver.store.writeGroup(id, g); err != nil {
		return status.Errorf(codes.Internal, "%v", err)
	}
	for i, v := range volumes {
		if err := s.driver.space.reserveSpace(s.driver.store.snapshotRecordFile(memberSnapshotID(id, v)),
			"the snapshot of volume "+v+" in group "+id, records[i]); err != nil {
			return errors.Join(err, s.removeGroup(id, g))
		}
	}
	err = s.copyAtOnce(ctx, id, volumes, records, nil, nil)
	g.Ready, g.CreatedAt = true, time.Now().UnixNano()
	for i, v := range volumes {
		if err == nil {
			records[i].Ready, records[i].CreatedAt = true, g.CreatedAt
			err = writeRecord(s.driver.store.snapshotRecordFile(memberSnapshotID(id, v)), records[i])
		}
	}
	if err == nil {
		err = s.driver.store.writeGroup(id, g)
	}
	if err == nil {
		return nil
	}
	return s.driver.space.copyFailed(fmt.Sprintf("taking group of snapshots %s of volumes %q", id, volumes), err,
		s.removeGroup(id, groupRecord{Volumes: volumes}))
}

// memberRecords returns the records of the snapshots that the group with this ID will contain, one
// for each element of volumes. It returns an error if a volume does not exist or is a folder. The
// caller must hold the locks of the volumes.
func (s *groupServer) memberRecords(id string, volumes []string) ([]volumeRecord, error) {
	var out []volumeRecord
	for _, v := range volumes {
		source, sized, err := s.driver.store.readVolume(v)
		if err != nil {
			return nil, status.Errorf(codes.Internal, "group of snapshots %s: %v", id, err)
		}
		if !sized || !source.Ready {
			if _, err := os.Stat(filepath.Join(s.driver.cfg.Root, v)); err == nil && !sized {
				return nil, status.Errorf(codes.FailedPrecondition,
					"volume %s is a folder that was created by hand, which does not support snapshots", v)
			}
			return nil, status.Errorf(codes.NotFound,
				"volume %s does not exist on node %s: a group of snapshots is of volumes of one node", v,
				s.driver.cfg.NodeID)
		}
		if source.Backing == backingDirectory {
			return nil, errNoCopies(v)
		}
		out = append(out, volumeRecord{Size: source.Size, Initialized: source.Initialized, Block: source.Block,
			SourceVolume: v, Group: id, Shared: true})
	}
	return out, nil
}

// copyAtOnce copies the given volumes to their snapshots in the group with this ID, all of the same
// point in time. It copies each volume once while the volume may change. Then it freezes all
// mounted file systems, copies the differences, and thaws them. No copy contains data that were
// written after the freeze.
//
// It calls itself for each further volume. last contains the functions that copy the differences of
// the previous volumes, and mountPoints contains their mount points. The caller must hold the locks
// of the volumes.
func (s *groupServer) copyAtOnce(
	ctx context.Context, id string, volumes []string, records []volumeRecord,
	last []func(context.Context) error, mountPoints []string,
) error {
	if len(volumes) == 0 {
		return s.withAllFrozen(ctx, mountPoints, func(ctx context.Context) error {
			for _, one := range last {
				if err := one(ctx); err != nil {
					return err
				}
			}
			return nil
		})
	}
	mounted, busy, err := s.driver.mountpointOf(volumes[0])
	if err == nil && busy {
		err = errBusy
	}
	if err != nil {
		return fmt.Errorf("volume %s: %w", volumes[0], err)
	}
	if mounted != "" {
		mountPoints = append(mountPoints, mounted)
	}
	records[0].Shared, err = copyImage(ctx, s.driver.store.imageFile(volumes[0]),
		s.driver.store.snapshotFile(memberSnapshotID(id, volumes[0])), func(do func(context.Context) error) error {
			return s.copyAtOnce(ctx, id, volumes[1:], records[1:], append(last, do), mountPoints)
		})
	return err
}

// withAllFrozen freezes the file systems that are mounted at paths, calls do, and thaws them, even
// if do fails.
func (s *groupServer) withAllFrozen(ctx context.Context, paths []string, do func(context.Context) error) error {
	if len(paths) == 0 {
		return do(ctx)
	}
	return s.driver.withFrozen(ctx, paths[0], func(ctx context.Context) error {
		return s.withAllFrozen(ctx, paths[1:], do)
	})
}

// removeGroup deletes the snapshots of the group with this ID, and then the group's record.
func (s *groupServer) removeGroup(id string, g groupRecord) error {
	for _, v := range g.Volumes {
		member := memberSnapshotID(id, v)
		unlock := s.driver.locks.Lock(snapshotLockName(member)) // while a volume is created from it
		err := s.driver.store.removeSnapshot(member)
		unlock()
		if err != nil {
			return err
		}
	}
	if err := os.Remove(s.driver.store.groupRecordFile(id)); err != nil && !errors.Is(err, os.ErrNotExist) {
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
func (s *groupServer) DeleteVolumeGroupSnapshot(
	_ context.Context, q *csi.DeleteVolumeGroupSnapshotRequest,
) (*csi.DeleteVolumeGroupSnapshotResponse, error) {
	id := q.GetGroupSnapshotId()
	if _, err := s.driver.store.volumeFolder(id); err != nil {
		return nil, err
	}
	defer s.driver.locks.Lock(groupLockName(id))()
	g, known, err := s.driver.store.readGroup(id)
	if err != nil {
		return nil, err
	}
	if known {
		if err := g.checkMembers(id, q.GetSnapshotIds()); err != nil {
			return nil, err
		}
		if err := s.removeGroup(id, g); err != nil {
			return nil, status.Errorf(codes.Internal, "deleting group of snapshots %s: %v", id, err)
		}
	}
	return &csi.DeleteVolumeGroupSnapshotResponse{}, nil
}

// GetVolumeGroupSnapshot returns the description of a group with all its snapshots, or NotFound.
func (s *groupServer) GetVolumeGroupSnapshot(
	_ context.Context, q *csi.GetVolumeGroupSnapshotRequest,
) (*csi.GetVolumeGroupSnapshotResponse, error) {
	id := q.GetGroupSnapshotId()
	if _, err := s.driver.store.volumeFolder(id); err != nil {
		return nil, err
	}
	g, known, err := s.driver.store.readGroup(id)
	if err != nil {
		return nil, err
	}
	if !known || !g.Ready {
		return nil, status.Errorf(codes.NotFound, "group of snapshots %s does not exist on node %s", id,
			s.driver.cfg.NodeID)
	}
	if err := g.checkMembers(id, q.GetSnapshotIds()); err != nil {
		return nil, err
	}
	out, err := s.groupSnapshotOf(id, g)
	return &csi.GetVolumeGroupSnapshotResponse{GroupSnapshot: out}, err
}
