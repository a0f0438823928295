// Package local is a small CSI driver for volumes on a node's own disk.
//
// A volume is a file with a file system, allocated in full from the start and attached to a loop
// device while it is staged. Its size is enforced, and other volumes cannot use its space. A
// StorageClass can request folders instead. A project quota enforces their size (directory.go).
// Behind a PersistentVolume that was written by hand, a volume is a folder without a size. Data
// stay on the node, which the topology reports.
//
// Every call is idempotent. All state is in a record for each volume and in the kernel, so the
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
	"sync"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"keelson.dev/keelson/internal/keylock"
	"keelson.dev/keelson/internal/reservedspace"
)

// DriverName is the default name of the driver in PersistentVolumes and StorageClasses.
const DriverName = "local.csi.keelson.dev"

// TopologyKey is the topology segment of the default driver that binds a volume to its node.
const TopologyKey = "topology." + DriverName + "/node"

func (d *Driver) topologyKey() string { return "topology." + d.cfg.Name + "/node" }

// Config is the configuration of a Driver.
type Config struct {
	Name  string // default DriverName; the drivers of a node need different names
	Root  string // folder of volumes, created if missing
	Limit int64  // bytes of all volumes together; 0: the size of the disk
	// KeepFree is the space that volumes must leave free, so that the node has no disk pressure.
	KeepFree reservedspace.Amount
	Socket   string // Unix socket to listen on
	NodeID   string
	// Listening is called in a goroutine when the driver accepts calls; may be nil.
	Listening func()
	Log       *slog.Logger // may be nil
}

// Driver implements the Identity, Controller, GroupController, and Node services.
type Driver struct {
	csi.UnimplementedIdentityServer
	csi.UnimplementedControllerServer
	csi.UnimplementedGroupControllerServer
	csi.UnimplementedNodeServer
	cfg          Config
	locks        keylock.Locks   // by volume
	allocMu      sync.Mutex      // serializes the allocation of disk space
	jobs         jobSet          // copies in progress
	quotas       quotaBackend    // enforce the size of folders
	trashChanged chan struct{}   // signals that the trash is not empty
	runCtx       context.Context // the context of Run; nil before
}

// jobContext returns the context of jobs that outlive their call.
func (d *Driver) jobContext() context.Context {
	if d.runCtx == nil {
		return context.Background()
	}
	return d.runCtx
}

// New returns a driver. It starts nothing.
func New(cfg Config) *Driver {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Name == "" {
		cfg.Name = DriverName
	}
	return &Driver{cfg: cfg, quotas: kernelQuotas{}, trashChanged: make(chan struct{}, 1)}
}

// Run serves the socket until ctx is canceled. Mounts stay.
func (d *Driver) Run(ctx context.Context) error {
	if err := os.MkdirAll(d.cfg.Root, 0o711); err != nil {
		return fmt.Errorf("CSI driver: %w", err)
	}
	d.runCtx = ctx
	defer d.jobs.running.Wait()
	ctx, end := context.WithCancel(ctx)
	defer end()
	d.jobs.running.Go(func() { d.runTrashCollector(ctx) })
	if err := d.thawAll(); err != nil {
		d.cfg.Log.Error("looking for volumes that were left frozen", "err", err)
	}
	if err := os.MkdirAll(filepath.Dir(d.cfg.Socket), 0o750); err != nil {
		return fmt.Errorf("CSI driver: %w", err)
	}
	// A socket that a killed driver has left would block the address.
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
	csi.RegisterGroupControllerServer(s, d)
	csi.RegisterNodeServer(s, d)
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

func (d *Driver) logFailures(ctx context.Context, q any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	res, err := next(ctx, q)
	if err != nil {
		d.cfg.Log.Warn("call failed", "method", filepath.Base(info.FullMethod), "err", err)
	}
	return res, err
}

// volumeFolder returns the folder of a volume. It refuses an ID that is not a plain file name,
// which could lead out of the root.
func (d *Driver) volumeFolder(id string) (string, error) {
	if id == "" {
		return "", status.Error(codes.InvalidArgument, "volume id is missing")
	}
	if len(id) > 128 || strings.HasPrefix(id, ".") || strings.ContainsAny(id, "/\x00") {
		return "", status.Errorf(codes.InvalidArgument, "volume id %q is not a plain name", id)
	}
	return filepath.Join(d.cfg.Root, id), nil
}

// GetPluginInfo implements the Identity service.
func (d *Driver) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: d.cfg.Name, VendorVersion: "1"}, nil
}

// GetPluginCapabilities implements the Identity service.
func (d *Driver) GetPluginCapabilities(context.Context, *csi.GetPluginCapabilitiesRequest) (*csi.GetPluginCapabilitiesResponse, error) {
	can := func(t csi.PluginCapability_Service_Type) *csi.PluginCapability {
		return &csi.PluginCapability{Type: &csi.PluginCapability_Service_{Service: &csi.PluginCapability_Service{Type: t}}}
	}
	return &csi.GetPluginCapabilitiesResponse{Capabilities: []*csi.PluginCapability{
		can(csi.PluginCapability_Service_CONTROLLER_SERVICE), can(csi.PluginCapability_Service_GROUP_CONTROLLER_SERVICE),
		can(csi.PluginCapability_Service_VOLUME_ACCESSIBILITY_CONSTRAINTS),
		{Type: &csi.PluginCapability_VolumeExpansion_{VolumeExpansion: &csi.PluginCapability_VolumeExpansion{Type: csi.PluginCapability_VolumeExpansion_ONLINE}}}}}, nil
}

// Probe implements the Identity service.
func (d *Driver) Probe(context.Context, *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	return &csi.ProbeResponse{}, nil
}

// checkCapabilities returns an error for unsupported volume capabilities, such as access from
// several nodes.
func checkCapabilities(caps ...*csi.VolumeCapability) error {
	if len(caps) == 0 {
		return status.Error(codes.InvalidArgument, "volume capability is missing")
	}
	for _, c := range caps {
		if c == nil {
			return status.Error(codes.InvalidArgument, "volume capability is missing")
		}
		if t := c.GetMount().GetFsType(); t != "" && t != "ext4" {
			return status.Errorf(codes.InvalidArgument, "file system %q is not offered by this driver: its volumes have ext4", t)
		}
		switch m := c.GetAccessMode().GetMode(); m {
		case csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER, csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY,
			csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER, csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER:
		default:
			return status.Errorf(codes.InvalidArgument, "access mode %s is not offered: a volume is on one node", m)
		}
	}
	return nil
}
