// Inlinedriver is a CSI driver for tests. It serves ephemeral inline volumes: each is a tmpfs with
// a file that names the pod for which it was published.
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net"
	"os"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

type driver struct {
	csi.UnimplementedIdentityServer
	csi.UnimplementedNodeServer
	name, node string
}

func (d driver) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: d.name, VendorVersion: "1"}, nil
}

func (d driver) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return &csi.NodeGetInfoResponse{NodeId: d.node}, nil
}

func (driver) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (
	*csi.NodeGetCapabilitiesResponse, error,
) {
	return &csi.NodeGetCapabilitiesResponse{}, nil
}

func (driver) NodePublishVolume(_ context.Context, q *csi.NodePublishVolumeRequest) (
	*csi.NodePublishVolumeResponse, error,
) {
	about := q.GetVolumeContext()
	if about["csi.storage.k8s.io/ephemeral"] != "true" {
		return nil, status.Error(codes.InvalidArgument, "only ephemeral volumes are supported")
	}
	if err := os.MkdirAll(q.GetTargetPath(), 0o750); err != nil {
		return nil, err
	}
	if err := unix.Mount("tmpfs", q.GetTargetPath(), "tmpfs", 0, "size=1m,mode=0755"); err != nil {
		return nil, err
	}
	text := fmt.Sprintf("%s/%s %s %s", about["csi.storage.k8s.io/pod.namespace"], about["csi.storage.k8s.io/pod.name"],
		about["word"], q.GetSecrets()["key"])
	return &csi.NodePublishVolumeResponse{}, os.WriteFile(filepath.Join(q.GetTargetPath(), "pod"), []byte(text), 0o644)
}

func (driver) NodeUnpublishVolume(_ context.Context, q *csi.NodeUnpublishVolumeRequest) (
	*csi.NodeUnpublishVolumeResponse, error,
) {
	if err := unix.Unmount(q.GetTargetPath(), 0); err != nil && !errors.Is(err, unix.EINVAL) &&
		!errors.Is(err, unix.ENOENT) {
		return nil, err
	}
	return &csi.NodeUnpublishVolumeResponse{}, nil
}

func main() {
	if len(os.Args) != 4 {
		log.Fatal("usage: inlinedriver NAME NODE SOCKET")
	}
	if err := os.Remove(os.Args[3]); err != nil && !errors.Is(err, os.ErrNotExist) {
		log.Fatal(err)
	}
	l, err := net.Listen("unix", os.Args[3])
	if err != nil {
		log.Fatal(err)
	}
	s := grpc.NewServer()
	d := driver{name: os.Args[1], node: os.Args[2]}
	csi.RegisterIdentityServer(s, d)
	csi.RegisterNodeServer(s, d)
	log.Fatal(s.Serve(l))
}
