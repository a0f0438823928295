// Package local is a small CSI driver for volumes on a node's own disk. A volume that is asked for is a file with a file
// system in it, which is as large as the volume from the beginning and shown by a loop device while it is staged: its size
// is kept to, and no other volume's growth takes its room. A class can ask for folders instead, whose size a project quota
// of the disk holds (directory.go). A volume that nobody asked for, behind a PersistentVolume that somebody wrote by hand,
// is a folder of any size. Data stay on the node; topology says so.
//
// Every call is idempotent, and what is known lies in a record for each volume and in the kernel's tables: the driver may
// be killed at any moment.
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

// DriverName is the name by which PersistentVolumes and StorageClasses refer to the driver, unless it is given another.
const DriverName = "local.csi.keelson.dev"

// TopologyKey is the segment that ties a volume to its node; it has the driver's name in it.
const TopologyKey = "topology." + DriverName + "/node"

func (d *Driver) topologyKey() string { return "topology." + d.cfg.Name + "/node" }

// Config is what the driver needs.
type Config struct {
	Name  string // "" = DriverName; every driver of a node needs a name of its own
	Root  string // folder of volumes, made when missing
	Limit int64  // bytes that all volumes may have together; 0 = what the disk has
	// KeepFree is what volumes leave of the disk: with less the node counts as short of disk.
	KeepFree reservedspace.Amount
	Socket   string // listened on
	NodeID   string
	// Listening is called once the driver answers; may be nil.
	Listening func()
	Log       *slog.Logger // may be nil
}

// Driver implements the Identity, Controller, GroupController and Node services.
type Driver struct {
	csi.UnimplementedIdentityServer
	csi.UnimplementedControllerServer
	csi.UnimplementedGroupControllerServer
	csi.UnimplementedNodeServer
	cfg    Config
	locks  keylock.Locks   // by volume
	making sync.Mutex      // what takes room of the disk, one at a time
	jobs   jobs            // copies
	quotas quotas          // hold folders to their size
	thrown chan struct{}   // something is in the trash
	until  context.Context // the end of Run; nil before
}

// life is how long a copy may go on.
func (d *Driver) life() context.Context {
	if d.until == nil {
		return context.Background()
	}
	return d.until
}

// New starts nothing.
func New(cfg Config) *Driver {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Name == "" {
		cfg.Name = DriverName
	}
	return &Driver{cfg: cfg, quotas: kernelQuotas{}, thrown: make(chan struct{}, 1)}
}

// Run listens on the socket until ctx ends. Mounts stay.
func (d *Driver) Run(ctx context.Context) error {
	if err := os.MkdirAll(d.cfg.Root, 0o711); err != nil {
		return fmt.Errorf("CSI driver: %w", err)
	}
	d.until = ctx
	defer d.jobs.running.Wait()
	ctx, end := context.WithCancel(ctx)
	defer end()
	d.jobs.running.Go(func() { d.keepEmpty(ctx) })
	if err := d.thawAll(); err != nil {
		d.cfg.Log.Error("looking for volumes that were left frozen", "err", err)
	}
	if err := os.MkdirAll(filepath.Dir(d.cfg.Socket), 0o750); err != nil {
		return fmt.Errorf("CSI driver: %w", err)
	}
	// A socket left by a killed driver would refuse the address.
	if err := os.Remove(d.cfg.Socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("CSI driver: %w", err)
	}
	l, err := net.Listen("unix", d.cfg.Socket)
	if err != nil {
		return fmt.Errorf("CSI driver: %w", err)
	}
	s := grpc.NewServer(grpc.UnaryInterceptor(d.logged))
	csi.RegisterIdentityServer(s, d)
	csi.RegisterControllerServer(s, d)
	csi.RegisterGroupControllerServer(s, d)
	csi.RegisterNodeServer(s, d)
	stop := context.AfterFunc(ctx, s.GracefulStop)
	defer stop()
	if d.cfg.Listening != nil {
		go d.cfg.Listening() // it is asked back meanwhile
	}
	d.cfg.Log.Info("serving", "socket", d.cfg.Socket, "root", d.cfg.Root, "node", d.cfg.NodeID)
	if err := s.Serve(l); err != nil {
		return fmt.Errorf("CSI driver: %w", err)
	}
	return ctx.Err()
}

func (d *Driver) logged(ctx context.Context, q any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	res, err := next(ctx, q)
	if err != nil {
		d.cfg.Log.Warn("call failed", "method", filepath.Base(info.FullMethod), "err", err)
	}
	return res, err
}

// folder is where a volume's data are. An id that is no plain file name is refused: it would lead out of the root.
func (d *Driver) folder(id string) (string, error) {
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

// supported checks what a volume is asked to be. Writers on several nodes are beyond it.
func supported(caps ...*csi.VolumeCapability) error {
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
