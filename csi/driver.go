// Package csi speaks with Container Storage Interface drivers on a node: a client of
// their Identity and Node services, and a registry that finds them by their sockets.
// It knows nothing of pods; csi/local is a driver of our own.
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

// callLimit bounds one call: a driver that hangs must not hang its pods for ever. The next try is the retry.
const callLimit = 2 * time.Minute

// askLimit bounds the questions of who a driver is.
const askLimit = 10 * time.Second

// Driver is one CSI driver on this node. Safe for concurrent use.
type Driver struct {
	Name   string
	NodeID string
	// Topology are the segments the driver reports for this node.
	Topology map[string]string
	// MaxVolumes is how many volumes the node can hold; 0 = no limit known.
	MaxVolumes int64

	socket  string
	conn    *grpc.ClientConn
	node    spec.NodeClient
	stages  bool // volumes are staged before they are published
	fsGroup bool // the driver applies the group itself
	shares  bool // the driver tells a volume of one pod from one of several pods of the node
	grows   bool // what the driver grows on the node has to be grown there
	counts  bool // the driver says how full volumes are
	judges  bool // the driver says so of CSI 1.12 and before whether volumes are well
	health  bool // the driver says so of CSI 1.13 and later

	mu    sync.Mutex
	locks map[string]*volumeLock
}

type volumeLock struct {
	ch    chan struct{}
	users int
}

// Volume is one volume as a pod uses it.
type Volume struct {
	ID             string
	StagingPath    string // "" = it is published without being staged
	TargetPath     string // a folder, or of a block device a file
	Block          bool   // it is given as a block device: FSType, MountFlags and FSGroup mean nothing
	FSType         string
	MountFlags     []string
	AccessMode     string // "ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"
	ReadOnly       bool
	FSGroup        *int64
	VolumeContext  map[string]string
	PublishContext map[string]string
	StageSecrets   map[string]string
	PublishSecrets map[string]string
}

// Dial asks the driver behind a unix socket who it is and what it can do.
func Dial(ctx context.Context, socket string) (*Driver, error) {
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, fmt.Errorf("CSI driver at %s: %w", socket, err)
	}
	d := &Driver{socket: socket, conn: conn, node: spec.NewNodeClient(conn), locks: map[string]*volumeLock{}}
	if err := d.identify(ctx); err != nil {
		conn.Close()
		return nil, fmt.Errorf("CSI driver at %s: %w", socket, err)
	}
	return d, nil
}

func (d *Driver) identify(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, askLimit)
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
	d.NodeID, d.MaxVolumes, d.Topology = n.GetNodeId(), n.GetMaxVolumesPerNode(), n.GetAccessibleTopology().GetSegments()
	c, err := d.node.NodeGetCapabilities(ctx, &spec.NodeGetCapabilitiesRequest{})
	if err != nil {
		return fmt.Errorf("%s: NodeGetCapabilities: %w", d.Name, err)
	}
	can := func(t spec.NodeServiceCapability_RPC_Type) bool {
		return slices.ContainsFunc(c.GetCapabilities(), func(x *spec.NodeServiceCapability) bool { return x.GetRpc().GetType() == t })
	}
	d.stages = can(spec.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME)
	d.fsGroup = can(spec.NodeServiceCapability_RPC_VOLUME_MOUNT_GROUP)
	d.shares = can(spec.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER)
	d.grows = can(spec.NodeServiceCapability_RPC_EXPAND_VOLUME)
	d.counts = can(spec.NodeServiceCapability_RPC_GET_VOLUME_STATS)
	d.judges = can(volumeCondition)
	d.health = can(spec.NodeServiceCapability_RPC_GET_VOLUME_HEALTH)
	return nil
}

// answers says that the driver still listens at its socket.
func (d *Driver) answers(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	info, err := spec.NewIdentityClient(d.conn).GetPluginInfo(ctx, &spec.GetPluginInfoRequest{})
	return err == nil && info.GetName() == d.Name
}

// Close ends the connection.
func (d *Driver) Close() error { return d.conn.Close() }

// Stages says whether volumes are staged before they are published.
func (d *Driver) Stages() bool { return d.stages }

// AppliesGroup says that the driver makes the volume belong to the FSGroup itself.
func (d *Driver) AppliesGroup() bool { return d.fsGroup }

// Stage prepares a volume on the node; nothing to do for drivers that do not stage. Idempotent.
func (d *Driver) Stage(ctx context.Context, v Volume) error {
	if !d.stages {
		return nil
	}
	return d.call(ctx, v.ID, "NodeStageVolume", func(ctx context.Context) error {
		_, err := d.node.NodeStageVolume(ctx, &spec.NodeStageVolumeRequest{VolumeId: v.ID, StagingTargetPath: v.StagingPath, VolumeCapability: d.capability(v),
			VolumeContext: v.VolumeContext, PublishContext: v.PublishContext, Secrets: v.StageSecrets})
		return err
	})
}

// Publish mounts a staged volume at TargetPath. Idempotent.
func (d *Driver) Publish(ctx context.Context, v Volume) error {
	return d.call(ctx, v.ID, "NodePublishVolume", func(ctx context.Context) error {
		q := &spec.NodePublishVolumeRequest{VolumeId: v.ID, TargetPath: v.TargetPath, VolumeCapability: d.capability(v), Readonly: v.ReadOnly,
			VolumeContext: v.VolumeContext, PublishContext: v.PublishContext, Secrets: v.PublishSecrets}
		if d.stages {
			q.StagingTargetPath = v.StagingPath // "" for a volume that a pod has for itself
		}
		_, err := d.node.NodePublishVolume(ctx, q)
		return err
	})
}

// Unpublish unmounts what Publish mounted. Idempotent.
func (d *Driver) Unpublish(ctx context.Context, id, target string) error {
	return d.call(ctx, id, "NodeUnpublishVolume", func(ctx context.Context) error {
		_, err := d.node.NodeUnpublishVolume(ctx, &spec.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: target})
		return err
	})
}

// Unstage undoes Stage. Idempotent.
func (d *Driver) Unstage(ctx context.Context, id, staging string) error {
	if !d.stages {
		return nil
	}
	return d.call(ctx, id, "NodeUnstageVolume", func(ctx context.Context) error {
		_, err := d.node.NodeUnstageVolume(ctx, &spec.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging})
		return err
	})
}

// IsUnknownVolume says of an error that the driver does not know the volume (any more).
func IsUnknownVolume(err error) bool { return status.Code(err) == codes.NotFound }

func (d *Driver) capability(v Volume) *spec.VolumeCapability {
	mode := spec.VolumeCapability_AccessMode_SINGLE_NODE_WRITER
	switch v.AccessMode {
	case "ReadOnlyMany":
		mode = spec.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY
	case "ReadWriteMany":
		mode = spec.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER
	case "ReadWriteOncePod":
		if d.shares {
			mode = spec.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER
		}
	default:
		if d.shares {
			mode = spec.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
		}
	}
	out := &spec.VolumeCapability{AccessMode: &spec.VolumeCapability_AccessMode{Mode: mode}}
	if v.Block {
		out.AccessType = &spec.VolumeCapability_Block{Block: &spec.VolumeCapability_BlockVolume{}}
		return out
	}
	m := &spec.VolumeCapability_MountVolume{FsType: v.FSType, MountFlags: v.MountFlags}
	if d.fsGroup && v.FSGroup != nil {
		m.VolumeMountGroup = fmt.Sprint(*v.FSGroup)
	}
	out.AccessType = &spec.VolumeCapability_Mount{Mount: m}
	return out
}

// call runs one verb of a volume; the specification asks callers for one at a time for each volume.
func (d *Driver) call(ctx context.Context, volume, verb string, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	unlock, err := d.lock(ctx, volume)
	if err != nil {
		return fmt.Errorf("CSI driver %s: %s of volume %s: waiting for an earlier call: %w", d.Name, verb, volume, err)
	}
	defer unlock()
	if err := f(ctx); err != nil {
		return fmt.Errorf("CSI driver %s: %s of volume %s: %w", d.Name, verb, volume, err)
	}
	return nil
}

func (d *Driver) lock(ctx context.Context, volume string) (unlock func(), err error) {
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
