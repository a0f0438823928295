// Package csi is a client for the services of Container Storage Interface (CSI) drivers on this
// node. Its Registry finds the drivers by their sockets. It is independent of pods. Package
// csi/local is a CSI driver.
package csi

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	spec "github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
)

// callTimeout is the maximum duration of one call to a CSI driver, so that a driver that hangs does
// not block its pods forever. Callers retry.
const callTimeout = 2 * time.Minute

// queryTimeout is the maximum duration of a call that reads properties of a CSI driver or of a
// volume.
const queryTimeout = 10 * time.Second

// Driver is a connection to a CSI driver on this node. It is safe for concurrent use.
type Driver struct {
	Name   string
	NodeID string
	// Topology contains the topology segments of this node, as the driver reports them.
	Topology map[string]string
	// MaxVolumes is the maximum number of the driver's volumes on this node; 0 means that it is
	// unknown.
	MaxVolumes int64

	socket string
	conn   *grpc.ClientConn
	node   spec.NodeClient
	can    nodeCapabilities

	mu    sync.Mutex
	locks map[string]*volumeLock
}

// nodeCapabilities holds the optional features of the driver's Node service. loadCapabilities sets
// it before the driver is used; it does not change afterwards.
type nodeCapabilities struct {
	stage      bool // STAGE_UNSTAGE_VOLUME: volumes are staged before they are published
	mountGroup bool // VOLUME_MOUNT_GROUP: the driver applies FSGroup itself
	multiWrite bool // SINGLE_NODE_MULTI_WRITER: the driver supports the single-node access modes
	expand     bool // EXPAND_VOLUME: volumes must also be expanded on the node
	stats      bool // GET_VOLUME_STATS: the driver reports volume usage
	condition  bool // VOLUME_CONDITION (CSI 1.12 and earlier): the driver reports volume health
	health     bool // GET_VOLUME_HEALTH (CSI 1.13 and later): the driver reports volume health
}

type volumeLock struct {
	ch    chan struct{}
	users int
}

// Volume contains the parameters of the Node service's calls for one pod's volume.
type Volume struct {
	ID             string
	StagingPath    string // "": the volume is published without staging
	TargetPath     string // path of a folder, or of a file for a block device
	Block          bool   // the volume is a block device; FSType, MountFlags, and FSGroup are ignored
	FSType         string
	MountFlags     []string
	AccessMode     string // "ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", or "ReadWriteOncePod"
	ReadOnly       bool
	FSGroup        *int64
	VolumeContext  map[string]string
	PublishContext map[string]string
	StageSecrets   map[string]string
	PublishSecrets map[string]string
}

// Dial connects to the CSI driver at a Unix socket, and reads its name, topology, and capabilities.
func Dial(ctx context.Context, socket string) (*Driver, error) {
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, fmt.Errorf("CSI driver at %s: %w", socket, err)
	}
	d := &Driver{socket: socket, conn: conn, node: spec.NewNodeClient(conn), locks: map[string]*volumeLock{}}
	if err := d.loadCapabilities(ctx); err != nil {
		conn.Close()
		return nil, fmt.Errorf("CSI driver at %s: %w", socket, err)
	}
	return d, nil
}

func (d *Driver) loadCapabilities(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, queryTimeout)
	defer cancel()
	info, err := spec.NewIdentityClient(d.conn).GetPluginInfo(ctx, &spec.GetPluginInfoRequest{})
	if err != nil {
		return fmt.Errorf("GetPluginInfo: %w", err)
	}
	if d.Name = info.GetName(); d.Name == "" {
		return fmt.Errorf("GetPluginInfo: the driver has no name")
	}
	n, err := d.node.NodeGetInfo(ctx, &spec.NodeGetInfoRequest{})
	if err != nil {
		return fmt.Errorf("%s: NodeGetInfo: %w", d.Name, err)
	}
	d.NodeID, d.MaxVolumes, d.Topology = n.GetNodeId(), n.GetMaxVolumesPerNode(),
		n.GetAccessibleTopology().GetSegments()
	c, err := d.node.NodeGetCapabilities(ctx, &spec.NodeGetCapabilitiesRequest{})
	if err != nil {
		return fmt.Errorf("%s: NodeGetCapabilities: %w", d.Name, err)
	}
	can := func(t spec.NodeServiceCapability_RPC_Type) bool {
		return slices.ContainsFunc(c.GetCapabilities(), func(x *spec.NodeServiceCapability) bool {
			return x.GetRpc().GetType() == t
		})
	}
	d.can.stage = can(spec.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME)
	d.can.mountGroup = can(spec.NodeServiceCapability_RPC_VOLUME_MOUNT_GROUP)
	d.can.multiWrite = can(spec.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER)
	d.can.expand = can(spec.NodeServiceCapability_RPC_EXPAND_VOLUME)
	d.can.stats = can(spec.NodeServiceCapability_RPC_GET_VOLUME_STATS)
	d.can.condition = can(volumeCondition)
	d.can.health = can(spec.NodeServiceCapability_RPC_GET_VOLUME_HEALTH)
	return nil
}

// isAlive reports whether the driver still responds on this connection with the same name.
func (d *Driver) isAlive(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, queryTimeout)
	defer cancel()
	info, err := spec.NewIdentityClient(d.conn).GetPluginInfo(ctx, &spec.GetPluginInfoRequest{})
	return err == nil && info.GetName() == d.Name
}

// Close closes the connection to the driver.
func (d *Driver) Close() error { return d.conn.Close() }

// Stages reports whether the driver requires that Stage is called before Publish.
func (d *Driver) Stages() bool { return d.can.stage }

// AppliesGroup reports whether the driver applies Volume.FSGroup to files itself. Otherwise the
// caller must change the group of the files.
func (d *Driver) AppliesGroup() bool { return d.can.mountGroup }

// Stage calls NodeStageVolume, which mounts the volume at StagingPath. It does nothing if the
// driver does not stage volumes. It is idempotent.
func (d *Driver) Stage(ctx context.Context, v Volume) error {
	if !d.can.stage {
		return nil
	}
	return d.callForVolume(ctx, v.ID, "NodeStageVolume", func(ctx context.Context) error {
		_, err := d.node.NodeStageVolume(ctx, &spec.NodeStageVolumeRequest{VolumeId: v.ID,
			StagingTargetPath: v.StagingPath, VolumeCapability: d.volumeCapability(v),
			VolumeContext: v.VolumeContext, PublishContext: v.PublishContext, Secrets: v.StageSecrets})
		return err
	})
}

// Publish calls NodePublishVolume, which mounts the volume at TargetPath for one pod. It is
// idempotent.
func (d *Driver) Publish(ctx context.Context, v Volume) error {
	return d.callForVolume(ctx, v.ID, "NodePublishVolume", func(ctx context.Context) error {
		q := &spec.NodePublishVolumeRequest{VolumeId: v.ID, TargetPath: v.TargetPath,
			VolumeCapability: d.volumeCapability(v), Readonly: v.ReadOnly,
			VolumeContext: v.VolumeContext, PublishContext: v.PublishContext, Secrets: v.PublishSecrets}
		if d.can.stage {
			q.StagingTargetPath = v.StagingPath // "" for an inline volume
		}
		_, err := d.node.NodePublishVolume(ctx, q)
		return err
	})
}

// Unpublish calls NodeUnpublishVolume, which unmounts the volume with this ID from the path target.
// It undoes Publish and is idempotent.
func (d *Driver) Unpublish(ctx context.Context, id, target string) error {
	return d.callForVolume(ctx, id, "NodeUnpublishVolume", func(ctx context.Context) error {
		_, err := d.node.NodeUnpublishVolume(ctx, &spec.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: target})
		return err
	})
}

// Unstage calls NodeUnstageVolume, which unmounts the volume with this ID from the path staging. It
// undoes Stage and is idempotent.
func (d *Driver) Unstage(ctx context.Context, id, staging string) error {
	if !d.can.stage {
		return nil
	}
	return d.callForVolume(ctx, id, "NodeUnstageVolume", func(ctx context.Context) error {
		_, err := d.node.NodeUnstageVolume(ctx,
			&spec.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging})
		return err
	})
}

// IsUnknownVolume reports whether err means that the driver does not have the volume (NotFound).
func IsUnknownVolume(err error) bool { return status.Code(err) == codes.NotFound }

func (d *Driver) volumeCapability(v Volume) *spec.VolumeCapability {
	mode := spec.VolumeCapability_AccessMode_SINGLE_NODE_WRITER
	switch v.AccessMode {
	case "ReadOnlyMany":
		mode = spec.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY
	case "ReadWriteMany":
		mode = spec.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER
	case "ReadWriteOncePod":
		if d.can.multiWrite {
			mode = spec.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER
		}
	default:
		if d.can.multiWrite {
			mode = spec.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
		}
	}
	out := &spec.VolumeCapability{AccessMode: &spec.VolumeCapability_AccessMode{Mode: mode}}
	if v.Block {
		out.AccessType = &spec.VolumeCapability_Block{Block: &spec.VolumeCapability_BlockVolume{}}
		return out
	}
	m := &spec.VolumeCapability_MountVolume{FsType: v.FSType, MountFlags: v.MountFlags}
	if d.can.mountGroup && v.FSGroup != nil {
		m.VolumeMountGroup = fmt.Sprint(*v.FSGroup)
	}
	out.AccessType = &spec.VolumeCapability_Mount{Mount: m}
	return out
}

// callForVolume calls f, which must make one call to the driver for a volume. The context of f ends
// after callTimeout. Before that, callForVolume waits for other calls for the same volume, because
// the CSI specification allows only one at a time. verb is the name of the call in errors.
func (d *Driver) callForVolume(ctx context.Context, volume, verb string, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	unlock, err := d.lockVolume(ctx, volume)
	if err != nil {
		return fmt.Errorf("CSI driver %s: %s of volume %s: waiting for an earlier call: %w", d.Name, verb, volume, err)
	}
	defer unlock()
	if err := f(ctx); err != nil {
		return fmt.Errorf("CSI driver %s: %s of volume %s: %w", d.Name, verb, volume, err)
	}
	return nil
}

func (d *Driver) lockVolume(ctx context.Context, volume string) (unlock func(), err error) {
	d.mu.Lock()
	l := d.locks[volume]
	if l == nil {
		l = &volumeLock{ch: make(chan struct{}, 1)}
		d.locks[volume] = l
	}
	l.users++
	d.mu.Unlock()
	leave := func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		if l.users--; l.users == 0 {
			delete(d.locks, volume)
		}
	}
	select {
	case l.ch <- struct{}{}:
		return func() { <-l.ch; leave() }, nil
	case <-ctx.Done():
		leave()
		return nil, ctx.Err()
	}
}
