// Package local is a small CSI driver for volumes on the disk of a node.
//
// A volume is a backing file with an ext4 file system. While the volume is staged, the file is
// attached to a loop device. All blocks of the file are allocated at its creation, so its size is
// enforced, and other volumes cannot use its space. With a StorageClass for folders, a volume is a
// folder, and a project quota enforces its size (directory.go). For a PersistentVolume that was
// written by hand, a volume is a folder without a size limit. The topology of a volume binds it to
// its node.
//
// All calls are idempotent. The only state is in the kernel and in a record of each volume, so the
// driver can be killed at any time.
package local

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"keelson.dev/keelson/internal/keylock"
	"keelson.dev/keelson/internal/reservedspace"
	"keelson.dev/keelson/internal/wakeup"
)

// DriverName is the name of the driver in PersistentVolumes and StorageClasses, unless Config.Name
// is set.
const DriverName = "local.csi.keelson.dev"

// TopologyKey is the key of the topology segment that binds a volume to its node, for the driver
// with the name DriverName.
const TopologyKey = "topology." + DriverName + "/node"

func (d *Driver) topologyKey() string { return "topology." + d.cfg.Name + "/node" }

// Config is the configuration of a Driver, for New.
type Config struct {
	Name  string // default: DriverName; must be unique on a node
	Root  string // folder of all volumes and records; Run creates it
	Limit int64  // maximum bytes of all volumes together; 0: the disk's size
	// KeepFree is the space on the disk that volumes must not use, so that the node does not have
	// disk pressure.
	KeepFree reservedspace.Amount
	Socket   string // path of the Unix socket of the driver
	NodeID   string
	// Listening is called in a goroutine when the driver accepts calls. It may be nil.
	Listening func()
	Log       *slog.Logger // may be nil
}

// Driver is a CSI driver. It implements the Identity and Controller services. Its parts node and
// groups implement the Node and GroupController services.
type Driver struct {
	csi.UnimplementedIdentityServer
	csi.UnimplementedControllerServer
	cfg     Config
	locks   keylock.Locks   // by volume ID, groupLockName, or snapshotLockName
	jobs    jobSet          // running copies, and the trash collector
	runCtx  context.Context // context of Run; nil before Run
	store   volumeStore
	folders folderVolumes
	space   diskSpace
	node    nodeServer
	groups  groupServer
}

// jobContext returns the context of jobs that may outlast the call that started them: the context
// of Run.
func (d *Driver) jobContext() context.Context {
	if d.runCtx == nil {
		return context.Background()
	}
	return d.runCtx
}

// New returns a driver with the configuration cfg. It starts nothing.
func New(cfg Config) *Driver {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Name == "" {
		cfg.Name = DriverName
	}
	d := &Driver{cfg: cfg}
	d.store = volumeStore{cfg: &d.cfg}
	d.folders = folderVolumes{cfg: &d.cfg, store: &d.store, quotas: kernelQuotas{}, trashChanged: wakeup.New()}
	d.space = diskSpace{cfg: &d.cfg, store: &d.store, folders: &d.folders}
	d.node.driver, d.groups.driver = d, d
	return d
}

// Node returns the server of the Node service, for programs that extend the driver.
func (d *Driver) Node() csi.NodeServer { return &d.node }

// Groups returns the server of the GroupController service, for programs that extend the driver.
func (d *Driver) Groups() csi.GroupControllerServer { return &d.groups }

// Run serves the driver's socket until ctx is canceled. Mounted volumes stay mounted after that.
func (d *Driver) Run(ctx context.Context) error {
	if err := os.MkdirAll(d.cfg.Root, 0o711); err != nil {
		return fmt.Errorf("CSI driver: %w", err)
	}
	d.runCtx = ctx
	defer d.jobs.running.Wait()
	ctx, end := context.WithCancel(ctx)
	defer end()
	d.jobs.running.Go(func() { d.folders.runTrashCollector(ctx) })
	if err := d.thawAll(); err != nil {
		d.cfg.Log.Error("looking for volumes that were left frozen", "err", err)
	}
	if err := os.MkdirAll(filepath.Dir(d.cfg.Socket), 0o750); err != nil {
		return fmt.Errorf("CSI driver: %w", err)
	}
	// A killed driver leaves its socket, which would make Listen fail.
	if err := os.Remove(d.cfg.Socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("CSI driver: %w", err)
	}
	l, err := net.Listen("unix", d.cfg.Socket)
	if err != nil {
		return fmt.Errorf("CSI driver: %w", err)
	}
	s := grpc.NewServer(grpc.UnaryInterceptor(d.logFailures))
	csi.RegisterIdentityServer(s, d)
	csi.RegisterControllerServer(s, d)
	csi.RegisterGroupControllerServer(s, &d.groups)
	csi.RegisterNodeServer(s, &d.node)
	stop := context.AfterFunc(ctx, s.GracefulStop)
	defer stop()
	if d.cfg.Listening != nil {
		go d.cfg.Listening() // in a goroutine, because the callback may call the driver
	}
	d.cfg.Log.Info("serving", "socket", d.cfg.Socket, "root", d.cfg.Root, "node", d.cfg.NodeID)
	if err := s.Serve(l); err != nil {
		return fmt.Errorf("CSI driver: %w", err)
	}
	return ctx.Err()
}

func (d *Driver) logFailures(ctx context.Context, q any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (
	any, error,
) {
	res, err := next(ctx, q)
	if err != nil {
		d.cfg.Log.Warn("call failed", "method", filepath.Base(info.FullMethod), "err", err)
	}
	return res, err
}

// volumeFolder returns the path ROOT/ID of the folder of the volume with this ID, whether it exists
// or not. It returns an error if id is not a plain file name, because the path could then be
// outside the root folder.
func (s *volumeStore) volumeFolder(id string) (string, error) {
	if id == "" {
		return "", status.Error(codes.InvalidArgument, "volume id is missing")
	}
	if len(id) > 128 || strings.HasPrefix(id, ".") || strings.ContainsAny(id, "/\x00") {
		return "", status.Errorf(codes.InvalidArgument, "volume id %q is not a plain name", id)
	}
	return filepath.Join(s.cfg.Root, id), nil
}

// GetPluginInfo returns the name of the driver.
func (d *Driver) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: d.cfg.Name, VendorVersion: "1"}, nil
}

// GetPluginCapabilities returns the services and features of this driver.
func (d *Driver) GetPluginCapabilities(context.Context, *csi.GetPluginCapabilitiesRequest) (
	*csi.GetPluginCapabilitiesResponse, error,
) {
	can := func(t csi.PluginCapability_Service_Type) *csi.PluginCapability {
		return &csi.PluginCapability{
			Type: &csi.PluginCapability_Service_{Service: &csi.PluginCapability_Service{Type: t}}}
	}
	return &csi.GetPluginCapabilitiesResponse{Capabilities: []*csi.PluginCapability{
		can(csi.PluginCapability_Service_CONTROLLER_SERVICE),
		can(csi.PluginCapability_Service_GROUP_CONTROLLER_SERVICE),
		can(csi.PluginCapability_Service_VOLUME_ACCESSIBILITY_CONSTRAINTS),
		{
			Type: &csi.PluginCapability_VolumeExpansion_{
				VolumeExpansion: &csi.PluginCapability_VolumeExpansion{
					Type: csi.PluginCapability_VolumeExpansion_ONLINE}}}}}, nil
}

// Probe always reports that the driver is ready.
func (d *Driver) Probe(context.Context, *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	return &csi.ProbeResponse{}, nil
}

// checkCapabilities returns an error if the driver does not support one of the capabilities of a
// volume. It supports neither access from several nodes nor file systems other than ext4.
func checkCapabilities(caps ...*csi.VolumeCapability) error {
	if len(caps) == 0 {
		return status.Error(codes.InvalidArgument, "volume capability is missing")
	}
	for _, c := range caps {
		if c == nil {
			return status.Error(codes.InvalidArgument, "volume capability is missing")
		}
		if t := c.GetMount().GetFsType(); t != "" && t != "ext4" {
			return status.Errorf(codes.InvalidArgument,
				"file system %q is not offered by this driver: its volumes have ext4", t)
		}
		switch m := c.GetAccessMode().GetMode(); m {
		case csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER,
			csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY,
			csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER,
			csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER:
		default:
			return status.Errorf(codes.InvalidArgument, "access mode %s is not offered: a volume is on one node", m)
		}
	}
	return nil
}
