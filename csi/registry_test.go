package csi

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	spec "github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
)

// driver responds to the calls of a registry.
type driver struct {
	spec.UnimplementedIdentityServer
	spec.UnimplementedNodeServer
	name string
}

func (d driver) GetPluginInfo(context.Context, *spec.GetPluginInfoRequest) (*spec.GetPluginInfoResponse, error) {
	return &spec.GetPluginInfoResponse{Name: d.name}, nil
}

func (d driver) NodeGetInfo(context.Context, *spec.NodeGetInfoRequest) (*spec.NodeGetInfoResponse, error) {
	return &spec.NodeGetInfoResponse{NodeId: "here"}, nil
}

func (d driver) NodeGetCapabilities(context.Context, *spec.NodeGetCapabilitiesRequest) (
	*spec.NodeGetCapabilitiesResponse, error,
) {
	return &spec.NodeGetCapabilitiesResponse{}, nil
}

func serve(t *testing.T, dir, name string) (socket string, stop func()) {
	t.Helper()
	socket = filepath.Join(dir, name, "csi.sock")
	if err := os.MkdirAll(filepath.Dir(socket), 0o755); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	g := grpc.NewServer()
	spec.RegisterIdentityServer(g, driver{name: name})
	spec.RegisterNodeServer(g, driver{name: name})
	ended := make(chan struct{})
	go func() { defer close(ended); _ = g.Serve(l) }()
	stop = func() { g.Stop(); <-ended }
	t.Cleanup(stop)
	return socket, stop
}

// A driver stays the same while its socket is used, touched, or made accessible to others. A
// recreated socket is another driver, and a removed socket is none.
func TestRegistry(t *testing.T) {
	dir := t.TempDir()
	r := NewRegistry(RegistryConfig{Plugins: dir})
	if r.Drivers() != nil {
		t.Error("drivers known before the first look")
	}
	note := func() bool {
		select {
		case <-r.Changed():
			return true
		default:
			return false
		}
	}
	r.Scan(t.Context())
	if d := r.Drivers(); d == nil || len(d) != 0 || !note() {
		t.Errorf("after a look at nothing: %v, and a note is due", d)
	}
	socket, stop := serve(t, dir, "a.example.com")
	r.Scan(t.Context())
	first := r.driverByName("a.example.com")
	if first == nil || first.NodeID != "here" || !note() {
		t.Fatalf("found %+v, and a note is due", first)
	}
	st, err := os.Stat(socket)
	if err != nil {
		t.Fatal(err)
	}
	for what, use := range map[string]func() error{
		"a connection": func() error {
			c, err := net.Dial("unix", socket)
			if err == nil {
				err = c.Close()
			}
			return err
		},
		"an access":  func() error { return os.Chtimes(socket, time.Now().Add(time.Hour), st.ModTime()) },
		"a new mode": func() error { return os.Chmod(socket, 0o600) },
	} {
		if err := use(); err != nil {
			t.Fatal(what, err)
		}
		r.Scan(t.Context())
		if r.driverByName("a.example.com") != first || note() {
			t.Errorf("after %s the driver is another one", what)
		}
	}
	stop() // stop removes the socket
	serve(t, dir, "a.example.com")
	r.Scan(t.Context())
	if again := r.driverByName("a.example.com"); again == nil || again == first || !note() {
		t.Errorf("after a restart: %v, want a new connection and a note", again)
	}
	if err := os.Remove(socket); err != nil {
		t.Fatal(err)
	}
	r.Scan(t.Context())
	if len(r.Drivers()) != 0 || !note() {
		t.Error("a driver without a socket is still there")
	}
}
