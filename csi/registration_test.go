package csi

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// registrar is the registration sidecar of a driver.
type registrar struct {
	registration.UnimplementedRegistrationServer
	info *registration.PluginInfo
	told chan *registration.RegistrationStatus
}

func (r registrar) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return r.info, nil
}

func (r registrar) NotifyRegistrationStatus(
	_ context.Context, s *registration.RegistrationStatus,
) (*registration.RegistrationStatusResponse, error) {
	r.told <- s
	return &registration.RegistrationStatusResponse{}, nil
}

func (r registrar) serve(t *testing.T, dir, name string) (stop func()) {
	t.Helper()
	l, err := net.Listen("unix", filepath.Join(dir, name+"-reg.sock"))
	if err != nil {
		t.Fatal(err)
	}
	g := grpc.NewServer()
	registration.RegisterRegistrationServer(g, r)
	ended := make(chan struct{})
	go func() { defer close(ended); _ = g.Serve(l) }()
	stop = func() { g.Stop(); <-ended }
	t.Cleanup(stop)
	return stop
}

// A driver that a sidecar registers is found under the registered name. The sidecar is notified
// once per start, and the driver is removed with the sidecar's socket.
func TestRegistration(t *testing.T) {
	plugins, dir := t.TempDir(), t.TempDir()
	socket, stopDriver := serve(t, plugins, "a.example.com")
	r := NewRegistry(RegistryConfig{Plugins: t.TempDir(), Registration: dir})
	told := make(chan *registration.RegistrationStatus, 1)
	side := registrar{told: told, info: &registration.PluginInfo{Type: registration.CSIPlugin, Name: "a.example.com",
		Endpoint: plugins + "//a.example.com/csi.sock", SupportedVersions: []string{"1.0.0"}}}
	stop := side.serve(t, dir, "a.example.com")
	registered := func() {
		t.Helper()
		r.Scan(t.Context())
		r.Scan(t.Context())
		if s := <-told; !s.PluginRegistered || s.Error != "" {
			t.Errorf("told %+v", s)
		}
		if len(told) > 0 {
			t.Error("told twice")
		}
		if d := r.driverByName("a.example.com"); d == nil || d.socket != socket {
			t.Errorf("registered is %+v, want one at %s", d, socket)
		}
	}
	registered()
	stop()
	stop = side.serve(t, dir, "a.example.com")
	registered()
	stopDriver() // and it starts again, as after an upgrade, with its sidecar
	stop()
	serve(t, plugins, "a.example.com")
	stop = side.serve(t, dir, "a.example.com")
	registered()
	stop()
	r.Scan(t.Context())
	if len(r.Drivers()) != 0 {
		t.Error("a driver that nobody registers any more is still there")
	}
}

// An unusable registration is refused with the reason.
func TestRegistrationRefused(t *testing.T) {
	plugins := t.TempDir()
	socket, _ := serve(t, plugins, "a.example.com")
	for want, info := range map[string]*registration.PluginInfo{
		"none of which is 1.x": {Name: "a.example.com", Endpoint: socket,
			SupportedVersions: []string{"0.3.0", "2.0.0"}},
		"has to be the path": {Name: "a.example.com", Endpoint: "tcp:1.2.3.4",
			SupportedVersions: []string{"1.9.0"}},
		"has the name a.example.com": {Name: "b.example.com", Endpoint: socket,
			SupportedVersions: []string{"v1.1.0"}},
		"CSI driver at " + socket + "2": {Name: "a.example.com", Endpoint: socket + "2",
			SupportedVersions: []string{"1.0.0"}},
	} {
		dir := t.TempDir()
		info.Type = registration.CSIPlugin
		side := registrar{told: make(chan *registration.RegistrationStatus, 1), info: info}
		side.serve(t, dir, "x")
		r := NewRegistry(RegistryConfig{Plugins: t.TempDir(), Registration: dir})
		r.Scan(t.Context())
		if s := <-side.told; s.PluginRegistered || !strings.Contains(s.Error, want) {
			t.Errorf("told %+v, want %q", s, want)
		}
		if len(r.Drivers()) != 0 {
			t.Errorf("%s: registered all the same", want)
		}
	}
}

// If two sockets have drivers of the same name, the first one is used until it is removed or no
// longer responds.
func TestTwoDriversOfOneName(t *testing.T) {
	for _, end := range []string{"gone", "dead"} {
		t.Run(end, func(t *testing.T) {
			plugins := t.TempDir()
			first, stop := serve(t, plugins, "a.example.com")
			r := NewRegistry(RegistryConfig{Plugins: plugins})
			r.Scan(t.Context())
			d := r.driverByName("a.example.com")
			other, _ := serve(t, t.TempDir(), "a.example.com")
			// In a folder that sorts before the first one's.
			if err := os.Mkdir(filepath.Join(plugins, "0"), 0o755); err != nil {
				t.Fatal(err)
			}
			moved := filepath.Join(plugins, "0", "csi.sock")
			if err := os.Rename(other, moved); err != nil {
				t.Fatal(err)
			}
			for range 3 {
				r.Scan(t.Context())
				if r.driverByName("a.example.com") != d {
					t.Fatal("the driver in use was exchanged")
				}
			}
			stop()
			if end == "dead" { // its socket file stays, as after a kill
				l, err := net.ListenUnix("unix", &net.UnixAddr{Name: first})
				if err != nil {
					t.Fatal(err)
				}
				l.SetUnlinkOnClose(false)
				l.Close()
			}
			r.Scan(t.Context())
			r.Scan(t.Context())
			if got := r.driverByName("a.example.com"); got == nil || got.socket != moved {
				t.Errorf("in use is %+v, want the one at %s", got, moved)
			}
		})
	}
}
