// Attachdriver is a CSI driver for tests, whose volumes are attached to one node at a time as a cloud's disks are: folders
// that all nodes of a lab share, of which it gives each to one node and mounts them there alone. Each of its processes
// serves the Controller service and that of its node; what happens to volumes they write into one journal.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/test/fault/attachdriver/journal"
)

type driver struct {
	csi.UnimplementedIdentityServer
	csi.UnimplementedControllerServer
	csi.UnimplementedNodeServer
	name, node, shared string
}

func (d driver) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: d.name, VendorVersion: "1"}, nil
}

func (driver) GetPluginCapabilities(context.Context, *csi.GetPluginCapabilitiesRequest) (*csi.GetPluginCapabilitiesResponse, error) {
	return &csi.GetPluginCapabilitiesResponse{Capabilities: []*csi.PluginCapability{
		{Type: &csi.PluginCapability_Service_{Service: &csi.PluginCapability_Service{Type: csi.PluginCapability_Service_CONTROLLER_SERVICE}}},
		{Type: &csi.PluginCapability_VolumeExpansion_{VolumeExpansion: &csi.PluginCapability_VolumeExpansion{Type: csi.PluginCapability_VolumeExpansion_ONLINE}}}}}, nil
}

func (driver) ControllerGetCapabilities(context.Context, *csi.ControllerGetCapabilitiesRequest) (*csi.ControllerGetCapabilitiesResponse, error) {
	out := &csi.ControllerGetCapabilitiesResponse{}
	for _, t := range []csi.ControllerServiceCapability_RPC_Type{csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME,
		csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME, csi.ControllerServiceCapability_RPC_EXPAND_VOLUME,
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_SNAPSHOT} {
		out.Capabilities = append(out.Capabilities, &csi.ControllerServiceCapability{Type: &csi.ControllerServiceCapability_Rpc{
			Rpc: &csi.ControllerServiceCapability_RPC{Type: t}}})
	}
	return out, nil
}

// names are those of volumes, which are names of folders too.
var names = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$`)

// of runs f for a volume while nobody else does anything to any.
func (d driver) of(volume string, f func(dir string) error) error {
	if !names.MatchString(volume) {
		return status.Errorf(codes.InvalidArgument, "volume %q is no name of a folder", volume)
	}
	return journal.Locked(d.shared, func() error { return f(filepath.Join(d.shared, "volumes", volume)) })
}

func there(dir string) error {
	if _, err := os.Stat(dir); err != nil {
		return status.Errorf(codes.NotFound, "volume %s: %v", filepath.Base(dir), err)
	}
	return nil
}

// holder is the node that has a volume; "" when none has.
func holder(dir string) (string, error) {
	b, err := os.ReadFile(filepath.Join(dir, "holder"))
	if errors.Is(err, os.ErrNotExist) {
		err = nil
	}
	return string(b), err
}

// CreateVolume makes a folder, named after the claim and the class' parameter prefix. It has what a snapshot has, or nothing.
func (d driver) CreateVolume(_ context.Context, q *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	id := q.GetParameters()["prefix"] + q.GetName()
	err := d.of(id, func(dir string) error {
		if there(dir) == nil {
			return nil
		}
		from, err := d.contentOf(q)
		if err != nil {
			return err
		}
		return filled(dir, from)
	})
	return &csi.CreateVolumeResponse{Volume: &csi.Volume{VolumeId: id, CapacityBytes: q.GetCapacityRange().GetRequiredBytes(), ContentSource: q.GetVolumeContentSource()}}, err
}

func (d driver) DeleteVolume(_ context.Context, q *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	return &csi.DeleteVolumeResponse{}, d.of(q.GetVolumeId(), func(dir string) error {
		has, err := holder(dir)
		if err == nil && has != "" {
			err = status.Errorf(codes.FailedPrecondition, "node %s has volume %s", has, q.GetVolumeId())
		}
		if err == nil {
			err = os.RemoveAll(dir)
		}
		return err
	})
}

func (d driver) ControllerPublishVolume(_ context.Context, q *csi.ControllerPublishVolumeRequest) (*csi.ControllerPublishVolumeResponse, error) {
	out := &csi.ControllerPublishVolumeResponse{PublishContext: map[string]string{"path": "data of " + q.GetVolumeId() + " at " + q.GetNodeId()}}
	return out, d.of(q.GetVolumeId(), func(dir string) error {
		if err := there(dir); err != nil {
			return err
		}
		switch has, err := holder(dir); {
		case err != nil:
			return err
		case has == "":
			if err := os.WriteFile(filepath.Join(dir, "holder"), []byte(q.GetNodeId()), 0o600); err != nil {
				return err
			}
		case has != q.GetNodeId():
			return status.Errorf(codes.FailedPrecondition, "node %s has volume %s", has, q.GetVolumeId())
		}
		return journal.Record(d.shared, journal.Line{What: journal.Attached, Node: q.GetNodeId(), Volume: q.GetVolumeId()})
	})
}

func (d driver) ControllerUnpublishVolume(_ context.Context, q *csi.ControllerUnpublishVolumeRequest) (*csi.ControllerUnpublishVolumeResponse, error) {
	return &csi.ControllerUnpublishVolumeResponse{}, d.of(q.GetVolumeId(), func(dir string) error {
		has, err := holder(dir)
		if err == nil && has == q.GetNodeId() {
			err = os.Remove(filepath.Join(dir, "holder"))
		}
		if err != nil {
			return err
		}
		return journal.Record(d.shared, journal.Line{What: journal.Detached, Node: q.GetNodeId(), Volume: q.GetVolumeId()})
	})
}

func (d driver) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return &csi.NodeGetInfoResponse{NodeId: d.node}, nil
}

func (driver) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	out := &csi.NodeGetCapabilitiesResponse{}
	for _, t := range []csi.NodeServiceCapability_RPC_Type{csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME, csi.NodeServiceCapability_RPC_EXPAND_VOLUME} {
		out.Capabilities = append(out.Capabilities, &csi.NodeServiceCapability{Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: t}}})
	}
	return out, nil
}

// ControllerExpandVolume says that a folder is larger, which it is not; the node is to be told as well.
func (d driver) ControllerExpandVolume(_ context.Context, q *csi.ControllerExpandVolumeRequest) (*csi.ControllerExpandVolumeResponse, error) {
	return &csi.ControllerExpandVolumeResponse{CapacityBytes: q.GetCapacityRange().GetRequiredBytes(), NodeExpansionRequired: true}, d.of(q.GetVolumeId(), there)
}

func (d driver) NodeExpandVolume(_ context.Context, q *csi.NodeExpandVolumeRequest) (*csi.NodeExpandVolumeResponse, error) {
	return &csi.NodeExpandVolumeResponse{CapacityBytes: q.GetCapacityRange().GetRequiredBytes()}, d.of(q.GetVolumeId(), there)
}

// NodeStageVolume mounts what is asked for, as a node without sense would: the journal tells whether it was the node's.
func (d driver) NodeStageVolume(_ context.Context, q *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	return &csi.NodeStageVolumeResponse{}, d.of(q.GetVolumeId(), func(dir string) error {
		if want := "data of " + q.GetVolumeId() + " at " + d.node; q.GetPublishContext()["path"] != want {
			return status.Errorf(codes.InvalidArgument, "the publish context is %q, and what this node was told when it got the volume is %q", q.GetPublishContext(), want)
		}
		if err := there(dir); err != nil {
			return err
		}
		return d.mount(q.GetVolumeId(), filepath.Join(dir, "data"), q.GetStagingTargetPath())
	})
}

func (d driver) NodePublishVolume(_ context.Context, q *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	return &csi.NodePublishVolumeResponse{}, d.of(q.GetVolumeId(), func(string) error {
		if mounted, err := isMounted(q.GetStagingTargetPath()); err != nil || !mounted {
			return status.Errorf(codes.FailedPrecondition, "nothing is staged at %s (%v)", q.GetStagingTargetPath(), err)
		}
		return d.mount(q.GetVolumeId(), q.GetStagingTargetPath(), q.GetTargetPath())
	})
}

// mount has a folder at another path too, once.
func (d driver) mount(volume, from, at string) error {
	mounted, err := isMounted(at)
	if err != nil {
		return err
	}
	if !mounted {
		if err := os.MkdirAll(at, 0o750); err != nil {
			return err
		}
		if err := unix.Mount(from, at, "", unix.MS_BIND, ""); err != nil {
			return err
		}
	}
	return journal.Record(d.shared, journal.Line{What: journal.Mounted, Node: d.node, Volume: volume, Path: at})
}

func isMounted(path string) (bool, error) {
	table, err := os.ReadFile("/proc/self/mountinfo")
	return bytes.Contains(table, []byte(" "+path+" ")), err
}

func (d driver) NodeUnpublishVolume(_ context.Context, q *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	return &csi.NodeUnpublishVolumeResponse{}, d.unmount(q.GetVolumeId(), q.GetTargetPath())
}

func (d driver) NodeUnstageVolume(_ context.Context, q *csi.NodeUnstageVolumeRequest) (*csi.NodeUnstageVolumeResponse, error) {
	return &csi.NodeUnstageVolumeResponse{}, d.unmount(q.GetVolumeId(), q.GetStagingTargetPath())
}

func (d driver) unmount(volume, at string) error {
	return d.of(volume, func(string) error {
		err := unix.Unmount(at, 0)
		if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) { // those: nothing is mounted there
			return err
		}
		return journal.Record(d.shared, journal.Line{What: journal.Unmount, Node: d.node, Volume: volume, Path: at})
	})
}

// hold keeps a call back when somebody asks for it: by a file hold/LIFE.METHOD that says "before" the call is made or
// "after", when its answer is under way. A file held/LIFE.METHOD with the name of this node says that it is, and the call
// goes on when both are gone. LIFE is the prefix of the volume's class.
func (d driver) hold(ctx context.Context, q any, info *grpc.UnaryServerInfo, call grpc.UnaryHandler) (any, error) {
	step := lifeOf(q) + "." + filepath.Base(info.FullMethod)
	when, err := os.ReadFile(filepath.Join(d.shared, "hold", step))
	if err != nil || lifeOf(q) == "" {
		return call(ctx, q) // nobody has asked
	}
	var answer any
	if string(when) == "after" {
		if answer, err = call(ctx, q); err != nil {
			return nil, err
		}
	}
	held, first := filepath.Join(d.shared, "held", step), false
	if err := journal.Locked(d.shared, func() (err error) {
		first, err = d.take(filepath.Join(d.shared, "hold", step), held)
		return err
	}); err != nil {
		return nil, err
	}
	if first {
		err = wait.For(ctx, 5*time.Millisecond, func() error {
			if b, err := os.ReadFile(held); err == nil {
				return fmt.Errorf("the call is held back on %s", b)
			}
			return nil
		})
	}
	if err != nil || answer != nil {
		return answer, err
	}
	return call(ctx, q)
}

// take writes down that a call is held here, unless one was already. It is seen with all that it says.
func (d driver) take(hold, held string) (first bool, err error) {
	if _, err := os.Stat(held); err == nil {
		return false, nil
	}
	if _, err := os.Stat(hold); err != nil { // nobody asks any more
		return false, nil
	}
	half := filepath.Join(filepath.Dir(held), ".half-"+filepath.Base(held))
	if err := os.WriteFile(half, []byte(d.node), 0o600); err != nil {
		return false, err
	}
	return true, os.Rename(half, held)
}

func main() {
	var d driver
	flag.StringVar(&d.name, "name", "attached.csi.example", "name of the driver")
	flag.StringVar(&d.node, "node", "", "name of the node")
	flag.StringVar(&d.shared, "shared", "/shared", "folder that all nodes share")
	socket := flag.String("socket", "/csi/csi.sock", "where it listens")
	flag.Parse()
	if err := os.Remove(*socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		log.Fatal(err)
	}
	l, err := net.Listen("unix", *socket)
	if err != nil {
		log.Fatal(err)
	}
	s := grpc.NewServer(grpc.UnaryInterceptor(d.hold))
	csi.RegisterIdentityServer(s, d)
	csi.RegisterControllerServer(s, d)
	csi.RegisterNodeServer(s, d)
	log.Fatal(s.Serve(l))
}
