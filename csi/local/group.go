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

// groupsDir has the record of each group of snapshots, ID.json: written before the first of them is begun, again when all
// are there, and removed last. The snapshots themselves are as others, and their records name the group.
const groupsDir = ".groups"

// mostInGroup bounds how many volumes are held still at once.
const mostInGroup = 64

// group says what a group of snapshots is of. Fields that a later release adds are ignored.
type group struct {
	Of    []string `json:"of"`              // volumes, in order
	Ready bool     `json:"ready,omitempty"` // false: it was begun and is to be made anew
	Made  int64    `json:"made,omitempty"`  // when it was taken, in nanoseconds of 1970
}

func (d *Driver) groupRecord(id string) string {
	return filepath.Join(d.cfg.Root, groupsDir, id+".json")
}

// group returns the record of a group; ok is false where it has none.
func (d *Driver) group(id string) (g group, ok bool, err error) {
	b, err := os.ReadFile(d.groupRecord(id))
	if errors.Is(err, os.ErrNotExist) {
		return group{}, false, nil
	}
	if err == nil {
		err = json.Unmarshal(b, &g)
	}
	if err != nil {
		return group{}, false, status.Errorf(codes.Internal, "record of the group of snapshots %s: %v", id, err)
	}
	return g, true, nil
}

func (d *Driver) keepGroup(id string, g group) error {
	b, err := json.Marshal(g)
	if err == nil {
		err = os.MkdirAll(filepath.Join(d.cfg.Root, groupsDir), 0o700)
	}
	if err == nil {
		err = durable.Write(d.groupRecord(id), b)
	}
	if err != nil {
		return fmt.Errorf("record of the group of snapshots %s: %w", id, err)
	}
	return nil
}

// groupLock is the name of a group's lock, which is none that a volume or a snapshot can have.
func groupLock(id string) string { return "group/" + id }

// memberOf is the id of the snapshot of a volume in a group. It follows from both, so that it is found again.
func memberOf(id, volume string) string {
	return fmt.Sprintf("member-%x", sha256.Sum256([]byte(id+"\x00"+volume)))
}

// GroupControllerGetCapabilities implements the GroupController service.
func (d *Driver) GroupControllerGetCapabilities(context.Context, *csi.GroupControllerGetCapabilitiesRequest) (*csi.GroupControllerGetCapabilitiesResponse, error) {
	const can = csi.GroupControllerServiceCapability_RPC_CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT
	return &csi.GroupControllerGetCapabilitiesResponse{Capabilities: []*csi.GroupControllerServiceCapability{
		{Type: &csi.GroupControllerServiceCapability_Rpc{Rpc: &csi.GroupControllerServiceCapability_RPC{Type: can}}}}}, nil
}

// CreateVolumeGroupSnapshot keeps what several volumes hold at one moment. The name is the id: asking again finds the same.
func (d *Driver) CreateVolumeGroupSnapshot(ctx context.Context, q *csi.CreateVolumeGroupSnapshotRequest) (*csi.CreateVolumeGroupSnapshotResponse, error) {
	id, of := q.GetName(), slices.Sorted(slices.Values(q.GetSourceVolumeIds()))
	if _, err := d.folder(id); err != nil {
		return nil, err
	}
	if len(of) == 0 || len(of) > mostInGroup {
		return nil, status.Errorf(codes.InvalidArgument, "a group of snapshots is of 1 to %d volumes, and %s of %d", mostInGroup, id, len(of))
	}
	for i, v := range of {
		if _, err := d.folder(v); err != nil {
			return nil, err
		}
		if i > 0 && of[i-1] == v {
			return nil, status.Errorf(codes.InvalidArgument, "group of snapshots %s: volume %s is named twice", id, v)
		}
	}
	for k := range q.GetParameters() {
		return nil, status.Errorf(codes.InvalidArgument, "parameter %q of the group's class is not known: this driver has none", k)
	}
	have, known, err := d.group(id)
	switch {
	case err != nil:
		return nil, err
	case known && !slices.Equal(have.Of, of):
		return nil, status.Errorf(codes.AlreadyExists, "group of snapshots %s exists and is one of volumes %q", id, have.Of)
	case known && have.Ready:
		g, err := d.groupOf(id, have)
		return &csi.CreateVolumeGroupSnapshotResponse{GroupSnapshot: g}, err
	}
	over, err := d.jobs.run(ctx, d.life(), "group "+id, func(ctx context.Context) error { return d.takeGroup(ctx, id, of) })
	switch {
	case !over:
		return nil, status.Errorf(codes.Aborted, "group of snapshots %s is still being made", id)
	case err != nil:
		return nil, err
	}
	if have, known, err = d.group(id); err == nil && !known {
		err = status.Errorf(codes.Aborted, "group of snapshots %s was deleted meanwhile", id)
	}
	if err != nil {
		return nil, err
	}
	g, err := d.groupOf(id, have)
	return &csi.CreateVolumeGroupSnapshotResponse{GroupSnapshot: g}, err
}

// groupOf is what callers are told of a group.
func (d *Driver) groupOf(id string, g group) (*csi.VolumeGroupSnapshot, error) {
	out := &csi.VolumeGroupSnapshot{GroupSnapshotId: id, CreationTime: timestamppb.New(time.Unix(0, g.Made)), ReadyToUse: g.Ready}
	for _, v := range g.Of {
		member := memberOf(id, v)
		r, ok, err := d.snapshot(member)
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

// takeGroup makes a group of snapshots unless it is there.
func (d *Driver) takeGroup(ctx context.Context, id string, of []string) error {
	defer d.locks.Lock(groupLock(id))()
	have, known, err := d.group(id)
	if err != nil || known && have.Ready {
		return err
	}
	if known { // begun by a driver that ended
		if err := d.removeGroup(id, have); err != nil {
			return status.Errorf(codes.Internal, "group of snapshots %s: %v", id, err)
		}
	}
	for _, v := range of { // in order, so that two groups never wait for one another
		defer d.locks.Lock(v)()
	}
	records, err := d.members(id, of)
	if err != nil {
		return err
	}
	g := group{Of: of}
	if err := d.keepGroup(id, g); err != nil {
		return status.Errorf(codes.Internal, "%v", err)
	}
	for i, v := range of {
		if err := d.promise(d.snapshotRecord(memberOf(id, v)), "the snapshot of volume "+v+" in group "+id, records[i]); err != nil {
			return errors.Join(err, d.removeGroup(id, g))
		}
	}
	err = d.copyTogether(ctx, id, of, records, nil, nil)
	g.Ready, g.Made = true, time.Now().UnixNano()
	for i, v := range of {
		if err == nil {
			records[i].Ready, records[i].Made = true, g.Made
			err = write(d.snapshotRecord(memberOf(id, v)), records[i])
		}
	}
	if err == nil {
		err = d.keepGroup(id, g)
	}
	if err == nil {
		return nil
	}
	return d.copyFailed(fmt.Sprintf("taking group of snapshots %s of volumes %q", id, of), err, d.removeGroup(id, group{Of: of}))
}

// members are the records that the snapshots of a group begin with. The volumes are locked.
func (d *Driver) members(id string, of []string) ([]record, error) {
	var out []record
	for _, v := range of {
		source, sized, err := d.volume(v)
		if err != nil {
			return nil, status.Errorf(codes.Internal, "group of snapshots %s: %v", id, err)
		}
		if !sized || !source.Ready {
			if _, err := os.Stat(filepath.Join(d.cfg.Root, v)); err == nil && !sized {
				return nil, status.Errorf(codes.FailedPrecondition, "volume %s is a folder that somebody made by hand: there are no snapshots of such", v)
			}
			return nil, status.Errorf(codes.NotFound, "volume %s does not exist on node %s: a group of snapshots is of volumes of one node", v, d.cfg.NodeID)
		}
		if source.Backing == backingDirectory {
			return nil, noCopies(v)
		}
		out = append(out, record{Size: source.Size, Used: source.Used, Block: source.Block, From: v, Group: id, Shared: true})
	}
	return out, nil
}

// copyTogether copies volumes as they all are at one moment. Each is copied once as it changes; then all that are mounted
// are held still, and what changed is copied again: what a volume holds then, it holds until the last is done, and nothing
// that was written after that moment is in any of the copies. last are the second copies to be made, at where to hold
// still; the volumes are locked.
func (d *Driver) copyTogether(ctx context.Context, id string, of []string, records []record, last []func(context.Context) error, at []string) error {
	if len(of) == 0 {
		return d.allFrozen(ctx, at, func(ctx context.Context) error {
			for _, one := range last {
				if err := one(ctx); err != nil {
					return err
				}
			}
			return nil
		})
	}
	mounted, busy, err := d.mountOf(of[0])
	if err == nil && busy {
		err = errBusy
	}
	if err != nil {
		return fmt.Errorf("volume %s: %w", of[0], err)
	}
	if mounted != "" {
		at = append(at, mounted)
	}
	records[0].Shared, err = copyImage(ctx, d.image(of[0]), d.snapshotFile(memberOf(id, of[0])), func(do func(context.Context) error) error {
		return d.copyTogether(ctx, id, of[1:], records[1:], append(last, do), at)
	})
	return err
}

// allFrozen runs a function while nothing is written to any of some file systems.
func (d *Driver) allFrozen(ctx context.Context, at []string, do func(context.Context) error) error {
	if len(at) == 0 {
		return do(ctx)
	}
	return d.frozen(ctx, at[0], func(ctx context.Context) error { return d.allFrozen(ctx, at[1:], do) })
}

// removeGroup takes away the snapshots of a group, and its record last.
func (d *Driver) removeGroup(id string, g group) error {
	for _, v := range g.Of {
		member := memberOf(id, v)
		unlock := d.locks.Lock(snapshotLock(member)) // a volume may be being made of it
		err := d.removeSnapshot(member)
		unlock()
		if err != nil {
			return err
		}
	}
	if err := os.Remove(d.groupRecord(id)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// has refuses snapshots that are none of a group.
func (g group) has(id string, snapshots []string) error {
	var mine []string
	for _, v := range g.Of {
		mine = append(mine, memberOf(id, v))
	}
	for _, s := range snapshots {
		if !slices.Contains(mine, s) {
			return status.Errorf(codes.InvalidArgument, "snapshot %s is none of group %s", s, id)
		}
	}
	return nil
}

// DeleteVolumeGroupSnapshot removes a group and its snapshots. Volumes that were made of them stay.
func (d *Driver) DeleteVolumeGroupSnapshot(_ context.Context, q *csi.DeleteVolumeGroupSnapshotRequest) (*csi.DeleteVolumeGroupSnapshotResponse, error) {
	id := q.GetGroupSnapshotId()
	if _, err := d.folder(id); err != nil {
		return nil, err
	}
	defer d.locks.Lock(groupLock(id))()
	g, known, err := d.group(id)
	if err != nil {
		return nil, err
	}
	if known {
		if err := g.has(id, q.GetSnapshotIds()); err != nil {
			return nil, err
		}
		if err := d.removeGroup(id, g); err != nil {
			return nil, status.Errorf(codes.Internal, "deleting group of snapshots %s: %v", id, err)
		}
	}
	return &csi.DeleteVolumeGroupSnapshotResponse{}, nil
}

// GetVolumeGroupSnapshot implements the GroupController service.
func (d *Driver) GetVolumeGroupSnapshot(_ context.Context, q *csi.GetVolumeGroupSnapshotRequest) (*csi.GetVolumeGroupSnapshotResponse, error) {
	id := q.GetGroupSnapshotId()
	if _, err := d.folder(id); err != nil {
		return nil, err
	}
	g, known, err := d.group(id)
	if err != nil {
		return nil, err
	}
	if !known || !g.Ready {
		return nil, status.Errorf(codes.NotFound, "group of snapshots %s does not exist on node %s", id, d.cfg.NodeID)
	}
	if err := g.has(id, q.GetSnapshotIds()); err != nil {
		return nil, err
	}
	out, err := d.groupOf(id, g)
	return &csi.GetVolumeGroupSnapshotResponse{GroupSnapshot: out}, err
}
