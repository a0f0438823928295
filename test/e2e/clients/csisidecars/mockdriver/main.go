// Mockdriver serves the mock CSI driver of the Kubernetes project. Its volumes are entries of a
// list. They must be attached, staged and published, and they can be expanded. The only change is
// that its folders are mounts of tmpfs: an agent treats a volume as published only if its target
// path is a mount point.
package main

import (
	"errors"
	"flag"
	"io/fs"
	"log"
	"net"
	"os"
	"os/signal"
	"syscall"

	"k8s.io/klog/v2"
	"k8s.io/kubernetes/test/e2e/storage/drivers/csi-test/driver"
	"k8s.io/kubernetes/test/e2e/storage/drivers/csi-test/mock/service"
)

// tmpfsDirIO is the mock driver's access to folders, in which folders are mounts of tmpfs.
type tmpfsDirIO struct{ service.OSDirIO }

func (m tmpfsDirIO) Mkdir(path string) error {
	if err := m.OSDirIO.Mkdir(path); err != nil {
		return err
	}
	return syscall.Mount("mock", path, "tmpfs", 0, "size=1m")
}

func (m tmpfsDirIO) RemoveAll(path string) error {
	if err := syscall.Unmount(path, 0); err != nil && !errors.Is(err, syscall.EINVAL) &&
		!errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return m.OSDirIO.RemoveAll(path)
}

func main() {
	klog.InitFlags(nil)
	socket := flag.String("socket", "/csi/csi.sock", "socket to listen on")
	name := flag.String("name", service.Name, "name of the driver and of its only node")
	limit := flag.Int64("attach-limit", 0, "maximum number of attached volumes; 0 = unlimited")
	flag.Parse()
	if err := os.Remove(*socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
		log.Fatal(err)
	}
	l, err := net.Listen("unix", *socket)
	if err != nil {
		log.Fatal(err)
	}
	s := service.New(service.Config{DriverName: *name, AttachLimit: *limit, NodeExpansionRequired: true,
		EnableTopology: true, IO: tmpfsDirIO{}})
	d := driver.NewCSIDriver(&driver.CSIDriverServers{Controller: s, Identity: s, Node: s})
	if err := d.Start(l, nil); err != nil {
		log.Fatal(err)
	}
	end := make(chan os.Signal, 1)
	signal.Notify(end, syscall.SIGTERM, syscall.SIGINT)
	<-end
	d.Stop()
}
