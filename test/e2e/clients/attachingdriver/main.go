// Attachingdriver is a CSI driver for tests. It is the driver for volumes on a node's own disk, but
// its volumes must be attached before they are staged. An attached volume is a file in a folder of
// the node, and staging requires the publish context that attaching returned. Volumes have a tier,
// slow or fast, stored in a file, which can be modified. Ephemeral volumes are folders.
package main

import (
	"context"
	"errors"
	"flag"
	"log"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"keelson.dev/keelson/csi/local"
	"keelson.dev/keelson/internal/reservedspace"
)

// ticketKey is a key of the publish context. Its value names the volume and the node.
const ticketKey = "ticket"

// tierKey is the only supported parameter of a VolumeAttributesClass.
const tierKey = "tier"

// driver adds attachment, tiers and ephemeral volumes to the services of the local driver.
type driver struct {
	csi.IdentityServer
	csi.ControllerServer
	csi.GroupControllerServer
	csi.NodeServer
	attached, tiers, inline, node string
}

// attachmentRecord returns the content of the file of a volume that is attached to a node.
func attachmentRecord(volume, node string) string { return volume + " at " + node }

// attachmentFile returns the path of the file that exists while a volume is attached.
func (d driver) attachmentFile(volume string) (string, error) { return volumeFile(d.attached, volume) }

// volumeFile returns the path of the file of a volume in a folder. It returns an error if the
// volume ID is not a file name.
func volumeFile(dir, volume string) (string, error) {
	if volume == "" || filepath.Base(volume) != volume || volume == "." || volume == ".." {
		return "", status.Errorf(codes.InvalidArgument, "volume ID %q is not a volume of this driver", volume)
	}
	return filepath.Join(dir, volume), nil
}

// validateAttributes returns an error if an attribute of a volume is not supported.
func validateAttributes(attributes map[string]string) error {
	for k, v := range attributes {
		if k != tierKey || v != "slow" && v != "fast" {
			return status.Errorf(codes.InvalidArgument,
				"unsupported attribute %s %q: the only attribute is %s, with the value slow or fast", k, v,
				tierKey)
		}
	}
	return nil
}

// storeAttributes stores the attributes of a volume in the volume's file.
func (d driver) storeAttributes(volume string, attributes map[string]string) error {
	file, err := volumeFile(d.tiers, volume)
	if err != nil || attributes[tierKey] == "" {
		return err
	}
	if err := os.WriteFile(file, []byte(attributes[tierKey]), 0o600); err != nil {
		return status.Errorf(codes.Internal, "tier of volume %s: %v", volume, err)
	}
	return nil
}

func (d driver) CreateVolume(ctx context.Context, q *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	if err := validateAttributes(q.GetMutableParameters()); err != nil {
		return nil, err
	}
	out, err := d.ControllerServer.CreateVolume(ctx, q)
	if err != nil {
		return nil, err
	}
	return out, d.storeAttributes(out.GetVolume().GetVolumeId(), q.GetMutableParameters())
}

func (d driver) ControllerModifyVolume(_ context.Context, q *csi.ControllerModifyVolumeRequest) (
	*csi.ControllerModifyVolumeResponse, error,
) {
	if err := validateAttributes(q.GetMutableParameters()); err != nil {
		return nil, err
	}
	return &csi.ControllerModifyVolumeResponse{}, d.storeAttributes(q.GetVolumeId(), q.GetMutableParameters())
}

func (d driver) DeleteVolume(ctx context.Context, q *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	out, err := d.ControllerServer.DeleteVolume(ctx, q)
	if err != nil {
		return nil, err
	}
	file, err := volumeFile(d.tiers, q.GetVolumeId())
	if err != nil {
		return nil, err
	}
	if err := os.Remove(file); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, status.Errorf(codes.Internal, "tier of volume %s: %v", q.GetVolumeId(), err)
	}
	return out, nil
}

func (d driver) ControllerGetCapabilities(
	ctx context.Context, q *csi.ControllerGetCapabilitiesRequest,
) (*csi.ControllerGetCapabilitiesResponse, error) {
	out, err := d.ControllerServer.ControllerGetCapabilities(ctx, q)
	if err != nil {
		return nil, err
	}
	for _, can := range []csi.ControllerServiceCapability_RPC_Type{
		csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME,
		csi.ControllerServiceCapability_RPC_MODIFY_VOLUME} {
		out.Capabilities = append(out.Capabilities,
			&csi.ControllerServiceCapability{
				Type: &csi.ControllerServiceCapability_Rpc{Rpc: &csi.ControllerServiceCapability_RPC{Type: can}}})
	}
	return out, nil
}

func (d driver) ControllerPublishVolume(_ context.Context, q *csi.ControllerPublishVolumeRequest) (
	*csi.ControllerPublishVolumeResponse, error,
) {
	file, err := d.attachmentFile(q.GetVolumeId())
	if err != nil {
		return nil, err
	}
	if q.GetNodeId() != d.node {
		return nil, status.Errorf(codes.NotFound, "volume %s cannot be attached to node %s: its data are on node %s",
			q.GetVolumeId(), q.GetNodeId(), d.node)
	}
	if err := os.WriteFile(file, []byte(d.node), 0o600); err != nil {
		return nil, status.Errorf(codes.Internal, "attaching volume %s: %v", q.GetVolumeId(), err)
	}
	return &csi.ControllerPublishVolumeResponse{
		PublishContext: map[string]string{ticketKey: attachmentRecord(q.GetVolumeId(), d.node)}}, nil
}

func (d driver) ControllerUnpublishVolume(
	_ context.Context, q *csi.ControllerUnpublishVolumeRequest,
) (*csi.ControllerUnpublishVolumeResponse, error) {
	file, err := d.attachmentFile(q.GetVolumeId())
	if err != nil {
		return nil, err
	}
	if err := os.Remove(file); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, status.Errorf(codes.Internal, "detaching volume %s: %v", q.GetVolumeId(), err)
	}
	return &csi.ControllerUnpublishVolumeResponse{}, nil
}

func (d driver) NodeStageVolume(ctx context.Context, q *csi.NodeStageVolumeRequest) (
	*csi.NodeStageVolumeResponse, error,
) {
	file, err := d.attachmentFile(q.GetVolumeId())
	if err != nil {
		return nil, err
	}
	if _, err := os.Stat(file); err != nil ||
		q.GetPublishContext()[ticketKey] != attachmentRecord(q.GetVolumeId(), d.node) {
		return nil, status.Errorf(codes.FailedPrecondition,
			"volume %s is not attached to node %s: publish context %q, %v",
			q.GetVolumeId(), d.node, q.GetPublishContext(), err)
	}
	return d.NodeServer.NodeStageVolume(ctx, q)
}

// logCalls is an interceptor that logs each call that modifies a volume, and each failed call.
func logCalls(ctx context.Context, q any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	out, err := next(ctx, q)
	name := filepath.Base(info.FullMethod)
	if err != nil || slices.Contains([]string{"CreateVolume", "DeleteVolume", "ControllerPublishVolume",
		"ControllerUnpublishVolume",
		"ControllerExpandVolume", "ControllerModifyVolume", "CreateSnapshot", "DeleteSnapshot", "NodeStageVolume",
		"NodeUnstageVolume"}, name) {
		log.Printf("%s %v: %v", name, q, err)
	}
	return out, err
}

func main() {
	if len(os.Args) == 2 && os.Args[1] == local.GuardCommand {
		// the driver starts this process while it creates a snapshot
		if err := local.RunThawGuard(); err != nil {
			log.Fatal(err)
		}
		return
	}
	// The disk of the lab machine may have less than 10 % free space; the agents of the lab use the
	// same low limit.
	cfg := local.Config{KeepFree: reservedspace.Percent(1), Log: slog.New(slog.NewTextHandler(os.Stderr, nil))}
	flag.StringVar(&cfg.Name, "name", "", "name of the driver")
	flag.StringVar(&cfg.NodeID, "node-id", "", "name of this node")
	flag.StringVar(&cfg.Socket, "socket", "/csi/csi.sock", "socket to listen on")
	flag.StringVar(&cfg.Root, "root", "/csi/data", "folder that holds the volumes")
	attached := flag.String("attached", "/csi/attached", "folder with a file for each attached volume")
	tiers := flag.String("tiers", "/csi/tiers", "folder with a file for each volume's tier")
	inline := flag.String("inline", "/csi/inline", "folder that holds the ephemeral volumes of pods")
	flag.Parse()
	if cfg.Name == "" || cfg.NodeID == "" || flag.NArg() > 0 {
		log.Fatal("usage: attachingdriver --name NAME --node-id NODE [--socket PATH] [--root DIR] [--attached DIR] " +
			"[--tiers DIR] [--inline DIR]")
	}
	for _, dir := range []string{cfg.Root, *attached, *tiers, *inline} {
		if err := os.MkdirAll(dir, 0o711); err != nil {
			log.Fatal(err)
		}
	}
	if err := os.Remove(cfg.Socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		log.Fatal(err)
	}
	l, err := net.Listen("unix", cfg.Socket)
	if err != nil {
		log.Fatal(err)
	}
	base := local.New(cfg)
	d := driver{IdentityServer: base, ControllerServer: base, GroupControllerServer: base.Groups(),
		NodeServer: base.Node(),
		attached:   *attached, tiers: *tiers, inline: *inline, node: cfg.NodeID}
	s := grpc.NewServer(grpc.UnaryInterceptor(logCalls))
	csi.RegisterIdentityServer(s, d)
	csi.RegisterControllerServer(s, d)
	csi.RegisterGroupControllerServer(s, d)
	csi.RegisterNodeServer(s, d)
	log.Fatal(s.Serve(l))
}
