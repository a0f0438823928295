// Attachingdriver is a CSI driver for tests: the one for volumes on a node's own disk, whose volumes have to be attached
// before they are staged. What is attached is a file in a folder of the node, and staging wants to hear what attaching said.
// Volumes have a tier, slow or fast, which is a file too and can be changed. Pods' own volumes are folders.
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

// ticketKey is in what attaching says; its value is the volume and the node.
const ticketKey = "ticket"

// tierKey is the parameter of classes of attributes that this driver knows.
const tierKey = "tier"

type driver struct {
	*local.Driver
	csi.UnsafeControllerServer
	attached, tiers, inline, node string
}

func ticket(volume, node string) string { return volume + " at " + node }

// file is where it is kept that a volume is attached.
func (d driver) file(volume string) (string, error) { return within(d.attached, volume) }

// within is a volume's file in a folder. The id is no path.
func within(dir, volume string) (string, error) {
	if volume == "" || filepath.Base(volume) != volume || volume == "." || volume == ".." {
		return "", status.Errorf(codes.InvalidArgument, "volume id %q is none of this driver's", volume)
	}
	return filepath.Join(dir, volume), nil
}

// known judges what a volume is to be like.
func known(attributes map[string]string) error {
	for k, v := range attributes {
		if k != tierKey || v != "slow" && v != "fast" {
			return status.Errorf(codes.InvalidArgument, "there is no %s %q: volumes have a %s, slow or fast", k, v, tierKey)
		}
	}
	return nil
}

// become has a volume be like that.
func (d driver) become(volume string, attributes map[string]string) error {
	file, err := within(d.tiers, volume)
	if err != nil || attributes[tierKey] == "" {
		return err
	}
	if err := os.WriteFile(file, []byte(attributes[tierKey]), 0o600); err != nil {
		return status.Errorf(codes.Internal, "the tier of volume %s: %v", volume, err)
	}
	return nil
}

func (d driver) CreateVolume(ctx context.Context, q *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	if err := known(q.GetMutableParameters()); err != nil {
		return nil, err
	}
	out, err := d.Driver.CreateVolume(ctx, q)
	if err != nil {
		return nil, err
	}
	return out, d.become(out.GetVolume().GetVolumeId(), q.GetMutableParameters())
}

func (d driver) ControllerModifyVolume(_ context.Context, q *csi.ControllerModifyVolumeRequest) (*csi.ControllerModifyVolumeResponse, error) {
	if err := known(q.GetMutableParameters()); err != nil {
		return nil, err
	}
	return &csi.ControllerModifyVolumeResponse{}, d.become(q.GetVolumeId(), q.GetMutableParameters())
}

func (d driver) DeleteVolume(ctx context.Context, q *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	out, err := d.Driver.DeleteVolume(ctx, q)
	if err != nil {
		return nil, err
	}
	file, err := within(d.tiers, q.GetVolumeId())
	if err != nil {
		return nil, err
	}
	if err := os.Remove(file); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, status.Errorf(codes.Internal, "the tier of volume %s: %v", q.GetVolumeId(), err)
	}
	return out, nil
}

func (d driver) ControllerGetCapabilities(ctx context.Context, q *csi.ControllerGetCapabilitiesRequest) (*csi.ControllerGetCapabilitiesResponse, error) {
	out, err := d.Driver.ControllerGetCapabilities(ctx, q)
	if err != nil {
		return nil, err
	}
	for _, can := range []csi.ControllerServiceCapability_RPC_Type{csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME, csi.ControllerServiceCapability_RPC_MODIFY_VOLUME} {
		out.Capabilities = append(out.Capabilities, &csi.ControllerServiceCapability{Type: &csi.ControllerServiceCapability_Rpc{Rpc: &csi.ControllerServiceCapability_RPC{Type: can}}})
	}
	return out, nil
}

func (d driver) ControllerPublishVolume(_ context.Context, q *csi.ControllerPublishVolumeRequest) (*csi.ControllerPublishVolumeResponse, error) {
	file, err := d.file(q.GetVolumeId())
	if err != nil {
		return nil, err
	}
	if q.GetNodeId() != d.node {
		return nil, status.Errorf(codes.NotFound, "volume %s cannot be attached to node %s: its data are on node %s", q.GetVolumeId(), q.GetNodeId(), d.node)
	}
	if err := os.WriteFile(file, []byte(d.node), 0o600); err != nil {
		return nil, status.Errorf(codes.Internal, "attaching volume %s: %v", q.GetVolumeId(), err)
	}
	return &csi.ControllerPublishVolumeResponse{PublishContext: map[string]string{ticketKey: ticket(q.GetVolumeId(), d.node)}}, nil
}

func (d driver) ControllerUnpublishVolume(_ context.Context, q *csi.ControllerUnpublishVolumeRequest) (*csi.ControllerUnpublishVolumeResponse, error) {
	file, err := d.file(q.GetVolumeId())
	if err != nil {
		return nil, err
	}
	if err := os.Remove(file); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, status.Errorf(codes.Internal, "detaching volume %s: %v", q.GetVolumeId(), err)
	}
	return &csi.ControllerUnpublishVolumeResponse{}, nil
}

func (d driver) NodeStageVolume(ctx context.Context, q *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	file, err := d.file(q.GetVolumeId())
	if err != nil {
		return nil, err
	}
	if _, err := os.Stat(file); err != nil || q.GetPublishContext()[ticketKey] != ticket(q.GetVolumeId(), d.node) {
		return nil, status.Errorf(codes.FailedPrecondition, "volume %s is not attached to node %s: told %q, %v", q.GetVolumeId(), d.node, q.GetPublishContext(), err)
	}
	return d.Driver.NodeStageVolume(ctx, q)
}

// said tells of each call that changes something, and of its failure.
func said(ctx context.Context, q any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	out, err := next(ctx, q)
	name := filepath.Base(info.FullMethod)
	if err != nil || slices.Contains([]string{"CreateVolume", "DeleteVolume", "ControllerPublishVolume", "ControllerUnpublishVolume",
		"ControllerExpandVolume", "ControllerModifyVolume", "CreateSnapshot", "DeleteSnapshot", "NodeStageVolume", "NodeUnstageVolume"}, name) {
		log.Printf("%s %v: %v", name, q, err)
	}
	return out, err
}

func main() {
	if len(os.Args) == 2 && os.Args[1] == local.GuardCommand { // the driver starts itself so while it takes a snapshot
		if err := local.RunThawGuard(); err != nil {
			log.Fatal(err)
		}
		return
	}
	// The machine of the lab may have less free than a tenth of its disk: the lab's agents keep as little free.
	cfg := local.Config{KeepFree: reservedspace.Percent(1), Log: slog.New(slog.NewTextHandler(os.Stderr, nil))}
	flag.StringVar(&cfg.Name, "name", "", "name of the driver")
	flag.StringVar(&cfg.NodeID, "node-id", "", "name of this node")
	flag.StringVar(&cfg.Socket, "socket", "/csi/csi.sock", "socket to listen on")
	flag.StringVar(&cfg.Root, "root", "/csi/data", "folder that holds the volumes")
	attached := flag.String("attached", "/csi/attached", "folder that says what is attached")
	tiers := flag.String("tiers", "/csi/tiers", "folder that says of which tier volumes are")
	inline := flag.String("inline", "/csi/inline", "folder that holds the volumes that pods have for themselves")
	flag.Parse()
	if cfg.Name == "" || cfg.NodeID == "" || flag.NArg() > 0 {
		log.Fatal("usage: attachingdriver --name NAME --node-id NODE [--socket PATH] [--root DIR] [--attached DIR] [--tiers DIR] [--inline DIR]")
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
	d := driver{Driver: local.New(cfg), attached: *attached, tiers: *tiers, inline: *inline, node: cfg.NodeID}
	s := grpc.NewServer(grpc.UnaryInterceptor(said))
	csi.RegisterIdentityServer(s, d)
	csi.RegisterControllerServer(s, d)
	csi.RegisterGroupControllerServer(s, d)
	csi.RegisterNodeServer(s, d)
	log.Fatal(s.Serve(l))
}
