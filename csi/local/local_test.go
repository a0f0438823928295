package local

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	spec "github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"keelson.dev/keelson/csi"
	"keelson.dev/keelson/csi/privatemounts"
	"keelson.dev/keelson/internal/await"
	"keelson.dev/keelson/internal/reservedspace"
	"keelson.dev/keelson/internal/wait"
)

func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == GuardCommand {
		if err := RunThawGuard(); err != nil {
			os.Exit(1)
		}
		os.Exit(0)
	}
	privatemounts.Main(m)
}

// serve runs a driver until the test ends or stop is called.
func serve(t *testing.T, root, socket string) (stop func()) {
	d := New(Config{Root: root, Socket: socket, NodeID: "w1", KeepFree: reservedspace.Bytes(mib)})
	if os.Getenv(sanityBacking) != "" && os.Getenv(sanityRoot) == "" {
		d.folders.quotas = newPaper(root)
	}
	return serveOn(t, d)
}

func serveOn(t *testing.T, d *Driver) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	if d.cfg.Socket == "" {
		d.cfg.Socket = filepath.Join(t.TempDir(), "csi.sock")
	}
	go func() { done <- d.Run(ctx) }()
	await.Until(t.Context(), t, await.Patience, time.Millisecond, "the driver's socket", func() error {
		c, err := net.Dial("unix", d.cfg.Socket)
		if err != nil {
			return err
		}
		return c.Close()
	})
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("Run returned %v", err)
		}
	}
	t.Cleanup(stop)
	return stop
}

// waitGone waits until a file no longer exists.
func waitGone(t *testing.T, path string) error {
	return wait.For(t.Context(), time.Millisecond, func() error {
		if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("%s is still there (%v)", path, err)
		}
		return nil
	})
}

func mounted(t *testing.T, path string) bool {
	t.Helper()
	ok, err := mountinfo.Mounted(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	return ok
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// F110: NodeStage and NodePublish are called through the socket, each twice. Data outlive the pod
// and the driver.
func TestStagePublish(t *testing.T) {
	privatemounts.SkipUnlessPrivate(t)
	dir := t.TempDir()
	socket := filepath.Join(dir, "plugins", DriverName, "csi.sock")
	stop := serve(t, filepath.Join(dir, "volumes"), socket)
	reg := csi.NewRegistry(csi.RegistryConfig{Plugins: filepath.Join(dir, "plugins")})
	d, err := reg.Driver(t.Context(), DriverName)
	must(t, err)
	if d.NodeID != "w1" || d.Topology[TopologyKey] != "w1" || !d.Stages() {
		t.Errorf("driver: %+v", d)
	}
	v := csi.Volume{ID: "vol-1", StagingPath: filepath.Join(dir, "staging"), TargetPath: filepath.Join(dir, "pod1"),
		AccessMode: "ReadWriteOnce"}
	if err := d.Publish(t.Context(), v); status.Code(errors.Unwrap(err)) != codes.FailedPrecondition {
		t.Errorf("publishing what is not staged: %v", err)
	}
	for range 2 {
		must(t, d.Stage(t.Context(), v))
		must(t, d.Publish(t.Context(), v))
	}
	must(t, os.WriteFile(filepath.Join(v.TargetPath, "data"), []byte("kept"), 0o600))
	ro := v
	ro.TargetPath, ro.ReadOnly = filepath.Join(dir, "pod2"), true
	must(t, d.Publish(t.Context(), ro))
	if err := os.WriteFile(filepath.Join(ro.TargetPath, "x"), nil, 0o600); !errors.Is(err, unix.EROFS) {
		t.Errorf("writing to a read-only volume: %v", err)
	}
	// The driver is killed and restarted: it finds its earlier state.
	stop()
	serve(t, filepath.Join(dir, "volumes"), socket)
	reg.Scan(t.Context())
	d, err = reg.Driver(t.Context(), DriverName)
	must(t, err)
	for range 2 {
		must(t, d.Unpublish(t.Context(), v.ID, v.TargetPath))
		must(t, d.Unpublish(t.Context(), v.ID, ro.TargetPath))
		must(t, d.Unstage(t.Context(), v.ID, v.StagingPath))
	}
	for _, p := range []string{v.TargetPath, ro.TargetPath, v.StagingPath} {
		if mounted(t, p) {
			t.Errorf("%s is still mounted", p)
		}
	}
	v.TargetPath = filepath.Join(dir, "pod3")
	must(t, d.Stage(t.Context(), v))
	must(t, d.Publish(t.Context(), v))
	if b, err := os.ReadFile(filepath.Join(v.TargetPath, "data")); err != nil || string(b) != "kept" {
		t.Errorf("data after the pod: %q, %v", b, err)
	}
	must(t, d.Unpublish(t.Context(), v.ID, v.TargetPath))
	must(t, d.Unstage(t.Context(), v.ID, v.StagingPath))
}

func TestCreateDelete(t *testing.T) {
	privatemounts.SkipUnlessPrivate(t)
	dir := t.TempDir()
	socket := filepath.Join(dir, "csi.sock")
	root := filepath.Join(dir, "volumes")
	serve(t, root, socket)
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	must(t, err)
	defer conn.Close()
	c := spec.NewControllerClient(conn)
	caps := []*spec.VolumeCapability{{AccessType: &spec.VolumeCapability_Mount{},
		AccessMode: &spec.VolumeCapability_AccessMode{Mode: spec.VolumeCapability_AccessMode_SINGLE_NODE_WRITER}}}
	for range 2 {
		res, err := c.CreateVolume(t.Context(), &spec.CreateVolumeRequest{Name: "pvc-1", VolumeCapabilities: caps})
		must(t, err)
		if res.Volume.VolumeId != "pvc-1" || res.Volume.AccessibleTopology[0].Segments[TopologyKey] != "w1" {
			t.Errorf("volume: %v", res.Volume)
		}
	}
	for name, want := range map[string]codes.Code{"../x": codes.InvalidArgument, "": codes.InvalidArgument,
		"..": codes.InvalidArgument} {
		if _, err := c.CreateVolume(t.Context(),
			&spec.CreateVolumeRequest{Name: name, VolumeCapabilities: caps}); status.Code(err) != want {
			t.Errorf("name %q: %v", name, err)
		}
	}
	elsewhere :=
		&spec.TopologyRequirement{Requisite: []*spec.Topology{{Segments: map[string]string{TopologyKey: "w2"}}}}
	if _, err := c.CreateVolume(t.Context(), &spec.CreateVolumeRequest{Name: "pvc-2", VolumeCapabilities: caps,
		AccessibilityRequirements: elsewhere}); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("a volume for another node: %v", err)
	}
	d, err := csi.Dial(t.Context(), socket)
	must(t, err)
	defer d.Close()
	v := csi.Volume{ID: "pvc-1", StagingPath: filepath.Join(dir, "staging"), AccessMode: "ReadWriteOnce"}
	must(t, d.Stage(t.Context(), v))
	if _, err := c.DeleteVolume(t.Context(), &spec.DeleteVolumeRequest{VolumeId: "pvc-1"}); status.Code(err) !=
		codes.FailedPrecondition {
		t.Errorf("deleting a volume in use: %v", err)
	}
	must(t, d.Unstage(t.Context(), "pvc-1", v.StagingPath))
	for range 2 {
		_, err = c.DeleteVolume(t.Context(), &spec.DeleteVolumeRequest{VolumeId: "pvc-1"})
		must(t, err)
	}
	nothingLeft(t, root)
	many := csi.Volume{ID: "pvc-3", StagingPath: filepath.Join(dir, "s3"), AccessMode: "ReadWriteMany"}
	if err := d.Stage(t.Context(), many); err == nil || !strings.Contains(err.Error(), "a volume is on one node") {
		t.Errorf("a volume for writers on many nodes: %v", err)
	}
}

// registrar is the registration sidecar of a third-party driver.
type registrar struct {
	registration.UnimplementedRegistrationServer
	endpoint string
	told     chan bool
}

func (r *registrar) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return &registration.PluginInfo{Type: registration.CSIPlugin, Name: DriverName, Endpoint: r.endpoint,
		SupportedVersions: []string{"1.0.0"}}, nil
}

func (r *registrar) NotifyRegistrationStatus(
	_ context.Context, s *registration.RegistrationStatus,
) (*registration.RegistrationStatusResponse, error) {
	r.told <- s.PluginRegistered
	return &registration.RegistrationStatusResponse{}, nil
}

func TestRegistryFollowsDrivers(t *testing.T) {
	dir := t.TempDir()
	endpoint := filepath.Join(dir, "elsewhere", "csi.sock")
	stop := serve(t, filepath.Join(dir, "volumes"), endpoint)
	must(t, os.Mkdir(filepath.Join(dir, "registry"), 0o755))
	l, err := net.Listen("unix", filepath.Join(dir, "registry", "reg.sock"))
	must(t, err)
	s := grpc.NewServer()
	r := &registrar{endpoint: endpoint, told: make(chan bool, 9)}
	registration.RegisterRegistrationServer(s, r)
	go func() { _ = s.Serve(l) }()
	defer s.Stop()
	reg := csi.NewRegistry(csi.RegistryConfig{Plugins: filepath.Join(dir, "plugins"),
		Registration: filepath.Join(dir, "registry")})
	if _, err := reg.Driver(t.Context(), "other.example"); !errors.Is(err, csi.ErrNoDriver) ||
		!strings.Contains(err.Error(), "other.example") {
		t.Errorf("a driver that is not there: %v", err)
	}
	if d := reg.Drivers(); len(d) != 1 || d[0].Name != DriverName {
		t.Errorf("drivers: %v", d)
	}
	if !<-r.told {
		t.Error("the registrar was told no")
	}
	<-reg.Changed()
	stop()
	reg.Scan(t.Context())
	if d := reg.Drivers(); len(d) != 0 {
		t.Errorf("drivers after the driver ended: %v", d)
	}
	<-reg.Changed()
}
