// Mockdriver serves the CSI driver that Kubernetes' own tests have: its volumes are entries of a list, which have to be attached,
// staged and published, and grow. Nothing of it was written for this cluster but where its folders are: they are mounted, in
// memory, since an agent does not believe that a volume is published where nothing is mounted.
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

// mounted has folders that are mounted.
type mounted struct{ service.OSDirIO }

func (m mounted) Mkdir(path string) error {
	if err := m.OSDirIO.Mkdir(path); err != nil {
		return err
	}
	return syscall.Mount("mock", path, "tmpfs", 0, "size=1m")
}

func (m mounted) RemoveAll(path string) error {
	if err := syscall.Unmount(path, 0); err != nil && !errors.Is(err, syscall.EINVAL) && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return m.OSDirIO.RemoveAll(path)
}

func main() {
	klog.InitFlags(nil)
	socket := flag.String("socket", "/csi/csi.sock", "where it serves")
	name := flag.String("name", service.Name, "its name, and that of the only node it has")
	limit := flag.Int64("attach-limit", 0, "so many volumes are attached at once; 0: any number")
	flag.Parse()
	if err := os.Remove(*socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
		log.Fatal(err)
	}
	l, err := net.Listen("unix", *socket)
	if err != nil {
		log.Fatal(err)
	}
	s := service.New(service.Config{DriverName: *name, AttachLimit: *limit, NodeExpansionRequired: true, EnableTopology: true, IO: mounted{}})
	d := driver.NewCSIDriver(&driver.CSIDriverServers{Controller: s, Identity: s, Node: s})
	if err := d.Start(l, nil); err != nil {
		log.Fatal(err)
	}
	end := make(chan os.Signal, 1)
	signal.Notify(end, syscall.SIGTERM, syscall.SIGINT)
	<-end
	d.Stop()
}
