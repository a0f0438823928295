// Attachdriver is a CSI driver for tests. Like a cloud's disk, a volume is attached to one node at
// a time. Volumes are folders that all nodes of a lab share; the driver mounts each only on the
// node to which it is attached. Each process of the driver serves the Controller service and its
// node's Node service. All processes write the events of volumes into one journal.
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

	"keelson.dev/keelson/internal/durable"
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

func (driver) GetPluginCapabilities(context.Context, *csi.GetPluginCapabilitiesRequest) (
	*csi.GetPluginCapabilitiesResponse, error,
) {
	return &csi.GetPluginCapabilitiesResponse{Capabilities: []*csi.PluginCapability{
		{
			Type: &csi.PluginCapability_Service_{
				Service: &csi.PluginCapability_Service{Type: csi.PluginCapability_Service_CONTROLLER_SERVICE}}},
		{
			Type: &csi.PluginCapability_VolumeExpansion_{
				VolumeExpansion: &csi.PluginCapability_VolumeExpansion{
					Type: csi.PluginCapability_VolumeExpansion_ONLINE}}}}}, nil
}

func (driver) ControllerGetCapabilities(context.Context, *csi.ControllerGetCapabilitiesRequest) (
	*csi.ControllerGetCapabilitiesResponse, error,
) {
	out := &csi.ControllerGetCapabilitiesResponse{}
	for _, t := range []csi.ControllerServiceCapability_RPC_Type{
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME,
		csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME, csi.ControllerServiceCapability_RPC_EXPAND_VOLUME,
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_SNAPSHOT} {
		out.Capabilities = append(out.Capabilities,
			&csi.ControllerServiceCapability{Type: &csi.ControllerServiceCapability_Rpc{
				Rpc: &csi.ControllerServiceCapability_RPC{Type: t}}})
	}
	return out, nil
}

// names matches the valid IDs of volumes and snapshots, which are also folder names.
var names = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$`)

// withVolume runs f with the folder of a volume under the lock of the shared folder.
func (d driver) withVolume(volume string, f func(dir string) error) error {
	if !names.MatchString(volume) {
		return status.Errorf(codes.InvalidArgument, "volume ID %q is not a file name", volume)
	}
	return journal.WithLock(d.shared, func() error { return f(filepath.Join(d.shared, "volumes", volume)) })
}

func requireVolume(dir string) error {
	if _, err := os.Stat(dir); err != nil {
		return status.Errorf(codes.NotFound, "volume %s: %v", filepath.Base(dir), err)
	}
	return nil
}

// attachedNode returns the node to which the volume in dir is attached, or "" if it is not
// attached.
func attachedNode(dir string) (string, error) {
	b, err := os.ReadFile(filepath.Join(dir, "holder"))
	if errors.Is(err, os.ErrNotExist) {
		err = nil
	}
	return string(b), err
}

// CreateVolume makes a folder, named after the claim and the class' parameter prefix. The volume is
// empty or has the content of a snapshot.
func (d driver) CreateVolume(_ context.Context, q *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	id := q.GetParameters()["prefix"] + q.GetName()
	err := d.withVolume(id, func(dir string) error {
		if requireVolume(dir) == nil {
			return nil
		}
		from, err := d.sourceFolder(q)
		if err != nil {
			return err
		}
		return createFolder(dir, from)
	})
	return &csi.CreateVolumeResponse{Volume: &csi.Volume{VolumeId: id,
		CapacityBytes: q.GetCapacityRange().GetRequiredBytes(), ContentSource: q.GetVolumeContentSource()}}, err
}

func (d driver) DeleteVolume(_ context.Context, q *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	return &csi.DeleteVolumeResponse{}, d.withVolume(q.GetVolumeId(), func(dir string) error {
		has, err := attachedNode(dir)
		if err == nil && has != "" {
			err = status.Errorf(codes.FailedPrecondition, "node %s has volume %s", has, q.GetVolumeId())
		}
		if err == nil {
			err = os.RemoveAll(dir)
		}
		return err
	})
}

func (d driver) ControllerPublishVolume(_ context.Context, q *csi.ControllerPublishVolumeRequest) (
	*csi.ControllerPublishVolumeResponse, error,
) {
	out := &csi.ControllerPublishVolumeResponse{PublishContext: map[string]string{"path": "data of " + q.GetVolumeId() +
		" at " + q.GetNodeId()}}
	return out, d.withVolume(q.GetVolumeId(), func(dir string) error {
		if err := requireVolume(dir); err != nil {
			return err
		}
		switch has, err := attachedNode(dir); {
		case err != nil:
			return err
		case has == "":
			if err := os.WriteFile(filepath.Join(dir, "holder"), []byte(q.GetNodeId()), 0o600); err != nil {
				return err
			}
		case has != q.GetNodeId():
			return status.Errorf(codes.FailedPrecondition, "node %s has volume %s", has, q.GetVolumeId())
		}
		return journal.Record(d.shared, journal.Line{What: journal.Attached, Node: q.GetNodeId(),
			Volume: q.GetVolumeId()})
	})
}

func (d driver) ControllerUnpublishVolume(
	_ context.Context, q *csi.ControllerUnpublishVolumeRequest,
) (*csi.ControllerUnpublishVolumeResponse, error) {
	return &csi.ControllerUnpublishVolumeResponse{}, d.withVolume(q.GetVolumeId(), func(dir string) error {
		has, err := attachedNode(dir)
		if err == nil && has == q.GetNodeId() {
			err = os.Remove(filepath.Join(dir, "holder"))
		}
		if err != nil {
			return err
		}
		return journal.Record(d.shared, journal.Line{What: journal.Detached, Node: q.GetNodeId(),
			Volume: q.GetVolumeId()})
	})
}

func (d driver) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return &csi.NodeGetInfoResponse{NodeId: d.node}, nil
}

func (driver) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (
	*csi.NodeGetCapabilitiesResponse, error,
) {
	out := &csi.NodeGetCapabilitiesResponse{}
	for _, t := range []csi.NodeServiceCapability_RPC_Type{csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME,
		csi.NodeServiceCapability_RPC_EXPAND_VOLUME} {
		out.Capabilities = append(out.Capabilities,
			&csi.NodeServiceCapability{
				Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: t}}})
	}
	return out, nil
}

// ControllerExpandVolume returns the requested size without resizing the folder. It also requires
// NodeExpandVolume on the node.
func (d driver) ControllerExpandVolume(_ context.Context, q *csi.ControllerExpandVolumeRequest) (
	*csi.ControllerExpandVolumeResponse, error,
) {
	return &csi.ControllerExpandVolumeResponse{CapacityBytes: q.GetCapacityRange().GetRequiredBytes(),
		NodeExpansionRequired: true}, d.withVolume(q.GetVolumeId(), requireVolume)
}

func (d driver) NodeExpandVolume(_ context.Context, q *csi.NodeExpandVolumeRequest) (
	*csi.NodeExpandVolumeResponse, error,
) {
	return &csi.NodeExpandVolumeResponse{CapacityBytes: q.GetCapacityRange().GetRequiredBytes()},
		d.withVolume(q.GetVolumeId(), requireVolume)
}

// NodeStageVolume mounts the volume without checking to which node it is attached. The journal
// shows afterwards whether it was attached to this node.
func (d driver) NodeStageVolume(_ context.Context, q *csi.NodeStageVolumeRequest) (
	*csi.NodeStageVolumeResponse, error,
) {
	return &csi.NodeStageVolumeResponse{}, d.withVolume(q.GetVolumeId(), func(dir string) error {
		if want := "data of " + q.GetVolumeId() + " at " + d.node; q.GetPublishContext()["path"] != want {
			return status.Errorf(codes.InvalidArgument,
				"the publish context is %q, not %q of this node's attachment",
				q.GetPublishContext(), want)
		}
		if err := requireVolume(dir); err != nil {
			return err
		}
		return d.bindMount(q.GetVolumeId(), filepath.Join(dir, "data"), q.GetStagingTargetPath())
	})
}

func (d driver) NodePublishVolume(_ context.Context, q *csi.NodePublishVolumeRequest) (
	*csi.NodePublishVolumeResponse, error,
) {
	return &csi.NodePublishVolumeResponse{}, d.withVolume(q.GetVolumeId(), func(string) error {
		if mounted, err := isMounted(q.GetStagingTargetPath()); err != nil || !mounted {
			return status.Errorf(codes.FailedPrecondition, "nothing is staged at %s (%v)",
				q.GetStagingTargetPath(), err)
		}
		return d.bindMount(q.GetVolumeId(), q.GetStagingTargetPath(), q.GetTargetPath())
	})
}

// bindMount bind-mounts the folder source at target, unless something is mounted there already, and
// records the mount of the volume in the journal.
func (d driver) bindMount(volume, source, target string) error {
	mounted, err := isMounted(target)
	if err != nil {
		return err
	}
	if !mounted {
		if err := os.MkdirAll(target, 0o750); err != nil {
			return err
		}
		if err := unix.Mount(source, target, "", unix.MS_BIND, ""); err != nil {
			return err
		}
	}
	return journal.Record(d.shared, journal.Line{What: journal.Mounted, Node: d.node, Volume: volume, Path: target})
}

func isMounted(path string) (bool, error) {
	table, err := os.ReadFile("/proc/self/mountinfo")
	return bytes.Contains(table, []byte(" "+path+" ")), err
}

func (d driver) NodeUnpublishVolume(_ context.Context, q *csi.NodeUnpublishVolumeRequest) (
	*csi.NodeUnpublishVolumeResponse, error,
) {
	return &csi.NodeUnpublishVolumeResponse{}, d.unmountPath(q.GetVolumeId(), q.GetTargetPath())
}

func (d driver) NodeUnstageVolume(_ context.Context, q *csi.NodeUnstageVolumeRequest) (
	*csi.NodeUnstageVolumeResponse, error,
) {
	return &csi.NodeUnstageVolumeResponse{}, d.unmountPath(q.GetVolumeId(), q.GetStagingTargetPath())
}

func (d driver) unmountPath(volume, at string) error {
	return d.withVolume(volume, func(string) error {
		err := unix.Unmount(at, 0)
		if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) { // nothing is mounted there
			return err
		}
		return journal.Record(d.shared, journal.Line{What: journal.Unmount, Node: d.node, Volume: volume, Path: at})
	})
}

// delayCall is an interceptor that delays a call if the test has created the file hold/LIFE.METHOD.
// The content of the file is "before" or "after": the call is delayed before it is made, or before
// its response is sent. Meanwhile the file held/LIFE.METHOD has the name of this node. The call
// continues when the test has removed the held file, which it does after removing the hold file.
// LIFE is the prefix of the volume's class.
func (d driver) delayCall(ctx context.Context, q any, info *grpc.UnaryServerInfo, call grpc.UnaryHandler) (any, error) {
	step := classPrefix(q) + "." + filepath.Base(info.FullMethod)
	when, err := os.ReadFile(filepath.Join(d.shared, "hold", step))
	if err != nil || classPrefix(q) == "" {
		return call(ctx, q) // no hold is requested
	}
	var answer any
	if string(when) == "after" {
		if answer, err = call(ctx, q); err != nil {
			return nil, err
		}
	}
	held, first := filepath.Join(d.shared, "held", step), false
	if err := journal.WithLock(d.shared, func() (err error) {
		first, err = d.claimHold(filepath.Join(d.shared, "hold", step), held)
		return err
	}); err != nil {
		return nil, err
	}
	if first {
		err = wait.For(ctx, 5*time.Millisecond, func() error {
			if b, err := os.ReadFile(held); err == nil {
				return fmt.Errorf("the call is delayed on %s", b)
			}
			return nil
		})
	}
	if err != nil || answer != nil {
		return answer, err
	}
	return call(ctx, q)
}

// claimHold writes the held file atomically and returns true. It returns false if another call is
// or was delayed by the same hold file. The caller holds the journal's lock.
func (d driver) claimHold(hold, held string) (first bool, err error) {
	if _, err := os.Stat(held); err == nil {
		return false, nil
	}
	if _, err := os.Stat(hold); err != nil { // the hold was removed meanwhile
		return false, nil
	}
	if err := durable.Write(held, []byte(d.node), durable.Atomic); err != nil {
		return false, err
	}
	return true, nil
}

func main() {
	var d driver
	flag.StringVar(&d.name, "name", "attached.csi.example", "name of the driver")
	flag.StringVar(&d.node, "node", "", "name of the node")
	flag.StringVar(&d.shared, "shared", "/shared", "folder shared by all nodes")
	socket := flag.String("socket", "/csi/csi.sock", "socket to listen on")
	flag.Parse()
	if err := os.Remove(*socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		log.Fatal(err)
	}
	l, err := net.Listen("unix", *socket)
	if err != nil {
		log.Fatal(err)
	}
	s := grpc.NewServer(grpc.UnaryInterceptor(d.delayCall))
	csi.RegisterIdentityServer(s, d)
	csi.RegisterControllerServer(s, d)
	csi.RegisterNodeServer(s, d)
	log.Fatal(s.Serve(l))
}
