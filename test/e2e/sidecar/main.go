// Sidecar does the work of the sidecars of CSI drivers that run as pods. "sidecar register" serves
// the registration socket in the folder of the kubelet for a driver with a shared socket, and exits
// when the registration is refused. "sidecar live" responds to a liveness probe with the result of
// the driver's Probe call.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	spec "github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

func main() {
	address := flag.String("csi-address", "/csi/csi.sock", "the driver's socket in this container")
	path := flag.String("kubelet-registration-path", "", "the driver's socket, on the node")
	port := flag.Int("health-port", 0, "port of the liveness probe")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	conn, err := grpc.NewClient("unix://"+*address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		log.Fatal(err)
	}
	driver := spec.NewIdentityClient(conn)
	switch {
	case *path != "":
		err = registerDriver(ctx, driver, *path)
	case *port != 0:
		err = serveLiveness(ctx, driver, *port)
	default:
		err = errors.New("nothing to do")
	}
	if err != nil {
		log.Fatal(err)
	}
}

func registerDriver(ctx context.Context, driver spec.IdentityClient, path string) error {
	info, err := driver.GetPluginInfo(ctx, &spec.GetPluginInfoRequest{}, grpc.WaitForReady(true))
	if err != nil {
		return fmt.Errorf("get the driver's name: %w", err)
	}
	socket := filepath.Join("/registration", info.GetName()+"-reg.sock")
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	old := syscall.Umask(0o077)
	l, err := net.Listen("unix", socket)
	syscall.Umask(old)
	if err != nil {
		return err
	}
	s := grpc.NewServer()
	registration.RegisterRegistrationServer(s, &registrar{name: info.GetName(), path: path})
	context.AfterFunc(ctx, s.Stop) // this removes the socket too
	return s.Serve(l)
}

type registrar struct {
	registration.UnimplementedRegistrationServer
	name, path string
}

func (r *registrar) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return &registration.PluginInfo{Type: registration.CSIPlugin, Name: r.name, Endpoint: r.path,
		SupportedVersions: []string{"1.0.0"}}, nil
}

func (r *registrar) NotifyRegistrationStatus(_ context.Context,
	s *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	if !s.GetPluginRegistered() {
		log.Fatalf("registration of %s was refused: %s", r.name, s.GetError())
	}
	log.Printf("%s is registered", r.name)
	return &registration.RegistrationStatusResponse{}, nil
}

func serveLiveness(ctx context.Context, driver spec.IdentityClient, port int) error {
	s := &http.Server{Addr: fmt.Sprintf(":%d", port), ReadHeaderTimeout: time.Second,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
			ctx, cancel := context.WithTimeout(q.Context(), time.Second)
			defer cancel()
			if _, err := driver.Probe(ctx, &spec.ProbeRequest{}); err != nil {
				http.Error(w, err.Error(), http.StatusInternalServerError)
			}
		})}
	context.AfterFunc(ctx, func() { s.Close() })
	if err := s.ListenAndServe(); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}
