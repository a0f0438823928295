package volume

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	spec "github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/agent/fake"
	"keelson.dev/keelson/csi"
)

// driver is a CSI driver in this process that stages, and publishes a tmpfs. It can do either
// incorrectly.
type driver struct {
	spec.UnimplementedIdentityServer
	spec.UnimplementedNodeServer
	publish, unpublish func(target string) error
	unstage            func(staging string) error
	can                []spec.NodeServiceCapability_RPC_Type // in addition to staging
	expand             func(*spec.NodeExpandVolumeRequest) (int64, error)
	stats              func(*spec.NodeGetVolumeStatsRequest) (*spec.NodeGetVolumeStatsResponse, error)
	health             func() *spec.VolumeHealth

	mu               sync.Mutex
	staged, unstaged []string
	targets          []string
	asked            []*spec.NodePublishVolumeRequest
	grown            []*spec.NodeExpandVolumeRequest
	context          map[string]string // publish context of the last staging
}

// lastPublish returns the last publish request and the number of publish requests.
func (d *driver) lastPublish() (*spec.NodePublishVolumeRequest, int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.asked) == 0 {
		return nil, 0
	}
	return d.asked[len(d.asked)-1], len(d.asked)
}

func (d *driver) GetPluginInfo(context.Context, *spec.GetPluginInfoRequest) (*spec.GetPluginInfoResponse, error) {
	return &spec.GetPluginInfoResponse{Name: "odd.example"}, nil
}

func (d *driver) NodeGetInfo(context.Context, *spec.NodeGetInfoRequest) (*spec.NodeGetInfoResponse, error) {
	return &spec.NodeGetInfoResponse{NodeId: "here"}, nil
}

func (d *driver) NodeGetCapabilities(context.Context, *spec.NodeGetCapabilitiesRequest) (
	*spec.NodeGetCapabilitiesResponse, error,
) {
	out := &spec.NodeGetCapabilitiesResponse{}
	for _, can := range append([]spec.NodeServiceCapability_RPC_Type{
		spec.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME}, d.can...) {
		out.Capabilities = append(out.Capabilities,
			&spec.NodeServiceCapability{
				Type: &spec.NodeServiceCapability_Rpc{Rpc: &spec.NodeServiceCapability_RPC{Type: can}}})
	}
	return out, nil
}

func (d *driver) NodeExpandVolume(_ context.Context, q *spec.NodeExpandVolumeRequest) (
	*spec.NodeExpandVolumeResponse, error,
) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.grown = append(d.grown, q)
	n, err := d.expand(q)
	return &spec.NodeExpandVolumeResponse{CapacityBytes: n}, err
}

func (d *driver) NodeGetVolumeStats(_ context.Context, q *spec.NodeGetVolumeStatsRequest) (
	*spec.NodeGetVolumeStatsResponse, error,
) {
	return d.stats(q)
}

func (d *driver) NodeStageVolume(_ context.Context, q *spec.NodeStageVolumeRequest) (
	*spec.NodeStageVolumeResponse, error,
) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.staged = append(d.staged, q.StagingTargetPath)
	d.context = q.PublishContext
	return &spec.NodeStageVolumeResponse{}, nil
}

func (d *driver) NodeUnstageVolume(_ context.Context, q *spec.NodeUnstageVolumeRequest) (
	*spec.NodeUnstageVolumeResponse, error,
) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.unstaged = append(d.unstaged, q.StagingTargetPath)
	if d.unstage != nil {
		return &spec.NodeUnstageVolumeResponse{}, d.unstage(q.StagingTargetPath)
	}
	for _, target := range d.targets {
		if isMountedNow(target) {
			return nil, fmt.Errorf("%s is still published", target)
		}
	}
	return &spec.NodeUnstageVolumeResponse{}, nil
}

func (d *driver) NodePublishVolume(_ context.Context, q *spec.NodePublishVolumeRequest) (
	*spec.NodePublishVolumeResponse, error,
) {
	d.mu.Lock()
	d.targets, d.asked = append(d.targets, q.TargetPath), append(d.asked, q)
	d.mu.Unlock()
	return &spec.NodePublishVolumeResponse{}, d.publish(q.TargetPath)
}

func (d *driver) NodeUnpublishVolume(_ context.Context, q *spec.NodeUnpublishVolumeRequest) (
	*spec.NodeUnpublishVolumeResponse, error,
) {
	return &spec.NodeUnpublishVolumeResponse{}, d.unpublish(q.TargetPath)
}

func (d *driver) NodeGetVolumeHealth(context.Context, *spec.NodeGetVolumeHealthRequest) (
	*spec.NodeGetVolumeHealthResponse, error,
) {
	return &spec.NodeGetVolumeHealthResponse{VolumeHealth: d.health()}, nil
}

// publishTmpfs publishes a volume by mounting a tmpfs.
func publishTmpfs(target string) error {
	if err := os.MkdirAll(target, 0o750); err != nil || isMountedNow(target) {
		return err
	}
	return unix.Mount("tmpfs", target, "tmpfs", 0, "")
}

func unpublishTmpfs(target string) error {
	if isMountedNow(target) {
		return unix.Unmount(target, 0)
	}
	return nil
}

// withDriver returns a node with a running driver, and a pod's volume with a claim on a volume of
// the driver.
func withDriver(t *testing.T, can ...spec.NodeServiceCapability_RPC_Type) (
	*Volumes, *fake.Cluster, *driver, v1.Volume,
) {
	v, c, dir := newVolumes(t)
	v.cfg.Paths.Kubelet = filepath.Join(dir, "kubelet")
	requireNoError(t, ShareKubeletMounts(v.cfg.Paths.Kubelet))
	d := &driver{publish: publishTmpfs, unpublish: unpublishTmpfs, can: can}
	socket := filepath.Join(dir, "plugins", "odd.example", "csi.sock")
	requireNoError(t, os.MkdirAll(filepath.Dir(socket), 0o755))
	l, err := net.Listen("unix", socket)
	requireNoError(t, err)
	g := grpc.NewServer()
	spec.RegisterIdentityServer(g, d)
	spec.RegisterNodeServer(g, d)
	ended := make(chan struct{})
	go func() { defer close(ended); _ = g.Serve(l) }()
	t.Cleanup(func() { g.Stop(); <-ended })
	v.cfg.CSI = csi.NewRegistry(csi.RegistryConfig{Plugins: filepath.Join(dir, "plugins")})
	c.Put(&storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: "odd.example"},
		Spec: storagev1.CSIDriverSpec{AttachRequired: new(bool)}},
		&v1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "disk", UID: "c1"},
			Spec:   v1.PersistentVolumeClaimSpec{VolumeName: "pv"},
			Status: v1.PersistentVolumeClaimStatus{Phase: v1.ClaimBound}},
		&v1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pv"}, Spec: v1.PersistentVolumeSpec{
			AccessModes: []v1.PersistentVolumeAccessMode{v1.ReadWriteOnce},
			ClaimRef:    &v1.ObjectReference{Namespace: "default", Name: "disk", UID: "c1"},
			PersistentVolumeSource: v1.PersistentVolumeSource{CSI: &v1.CSIPersistentVolumeSource{Driver: "odd.example",
				VolumeHandle: "vol-1"}}}})
	return v, c, d,
		newVolume("data",
			v1.VolumeSource{PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{ClaimName: "disk"}})
}

// Drivers get the kubelet's paths, on shared mounts, and nothing of them is left afterwards.
func TestCSIPathsAreKubelets(t *testing.T) {
	v, _, d, claim := withDriver(t)
	k := v.cfg.Paths.Kubelet
	again := claim
	again.Name = "same"
	m, err := v.MountAll(t.Context(), newPod("u1", claim))
	requireNoError(t, err)
	both, err := v.MountAll(t.Context(), newPod("u1", claim, again))
	requireNoError(t, err)
	target := k + "/pods/u1/volumes/kubernetes.io~csi/pv/mount"
	staging := k +
		"/plugins/kubernetes.io/csi/odd.example/d2e8363faaac7ae76def3b14091d8eb5755f6b92e9531627aeec833a8731cc49/globalmount"
	if m["data"].HostPath != target || both["data"].HostPath != target || both["same"].HostPath == target ||
		d.staged[0] != staging {
		t.Errorf("published at %s and %s, staged at %s; want %s and %s", m["data"].HostPath, both["same"].HostPath,
			d.staged[0], target, staging)
	}
	for _, p := range []string{k, target} {
		info, err := mountinfo.GetMounts(mountinfo.SingleEntryFilter(p))
		if err != nil || len(info) != 1 || !strings.Contains(info[0].Optional, "shared:") {
			t.Errorf("%s is not on a shared mount: %+v, %v", p, info, err)
		}
	}
	requireNoError(t, ShareKubeletMounts(k)) // again: no mount is stacked
	if info, err := mountinfo.GetMounts(mountinfo.SingleEntryFilter(k)); err != nil || len(info) != 1 {
		t.Errorf("%d mounts at %s, %v", len(info), k, err)
	}
	requireNoError(t, v.UnmountAll(t.Context(), "u1"))
	if len(d.unstaged) != 1 {
		t.Errorf("unstaged: %v", d.unstaged)
	}
	for _, p := range []string{k + "/pods/u1", filepath.Dir(staging)} {
		if _, err := os.Lstat(p); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is left", p)
		}
	}
}

// The error names a driver that reports a volume as published without mounting it, and the remedy.
// The pod does not get an empty folder.
func TestPublishMustMount(t *testing.T) {
	v, _, d, claim := withDriver(t)
	d.publish = func(target string) error { return os.MkdirAll(target, 0o750) }
	_, err := v.MountAll(t.Context(), newPod("u1", claim))
	for _, want := range []string{"odd.example", "vol-1", "nothing is mounted", "Bidirectional"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not say %q", err, want)
		}
	}
	d.publish = publishTmpfs
	_, err = v.MountAll(t.Context(), newPod("u1", claim))
	requireNoError(t, err)
	requireNoError(t, v.UnmountAll(t.Context(), "u1"))
}

// Data that a driver left in the folder of a volume is never removed, neither on the paths of this
// release nor of the previous one, because it may be user data. When it is moved away, the pod's
// removal continues.
func TestDataAtTargetStays(t *testing.T) {
	for _, layout := range []string{"kubelet's", "the earlier one"} {
		t.Run(layout, func(t *testing.T) {
			v, _, d, claim := withDriver(t)
			if layout != "kubelet's" {
				base := filepath.Join(v.podDir("u1"), "csi", "data")
				requireNoError(t, writeRecord(base+".json",
					csiRecord{Driver: "odd.example", Volume: "vol-1", Target: filepath.Join(base, "mount"),
						Staging: filepath.Join(v.cfg.Paths.State, "csi", "odd.example", "h", "mount")}))
			}
			m, err := v.MountAll(t.Context(), newPod("u1", claim))
			requireNoError(t, err)
			target := m["data"].HostPath
			if old := strings.HasPrefix(target, v.podDir("u1")); old != (layout != "kubelet's") {
				t.Errorf("published at %s", target)
			}
			file := filepath.Join(target, "precious")
			d.unpublish = func(target string) error {
				return errors.Join(unpublishTmpfs(target), os.WriteFile(file, []byte("kept"), 0o600))
			}
			for range 2 {
				if err := v.UnmountAll(t.Context(), "u1"); err == nil || !strings.Contains(err.Error(), target) {
					t.Errorf("with data left: %v", err)
				}
				if got := mustRead(t, file); got != "kept" {
					t.Errorf("data: %q", got)
				}
			}
			requireNoError(t, os.Remove(file))
			d.unpublish = unpublishTmpfs
			requireNoError(t, v.UnmountAll(t.Context(), "u1"))
		})
	}
}

// A pod that an earlier release started keeps its paths, and a second pod uses the same staged
// volume. Both are removed completely.
func TestEarlierPathsAreKept(t *testing.T) {
	v, _, d, claim := withDriver(t)
	base := filepath.Join(v.podDir("u1"), "csi", "data")
	old := csiRecord{Driver: "odd.example", Volume: "vol-1",
		Staging: filepath.Join(v.cfg.Paths.State, "csi", "odd.example", "h", "mount"),
		Target:  filepath.Join(base, "mount")}
	requireNoError(t, writeRecord(base+".json", old))
	requireNoError(t, publishTmpfs(old.Target))
	requireNoError(t, os.MkdirAll(old.Staging, 0o750))
	m, err := v.MountAll(t.Context(), newPod("u1", claim))
	requireNoError(t, err)
	if m["data"].HostPath != old.Target {
		t.Errorf("the running pod's volume is now at %s", m["data"].HostPath)
	}
	m, err = v.MountAll(t.Context(), newPod("u2", claim))
	requireNoError(t, err)
	if !strings.HasPrefix(m["data"].HostPath, v.cfg.Paths.Kubelet) || d.staged[len(d.staged)-1] != old.Staging {
		t.Errorf("the new pod's is at %s, staged at %s", m["data"].HostPath, d.staged[len(d.staged)-1])
	}
	requireNoError(t, v.UnmountAll(t.Context(), "u1"))
	if len(d.unstaged) > 0 {
		t.Error("unstaged under the other pod")
	}
	requireNoError(t, v.UnmountAll(t.Context(), "u2"))
	if len(d.unstaged) != 1 || d.unstaged[0] != old.Staging {
		t.Errorf("unstaged: %v", d.unstaged)
	}
	for _, p := range []string{v.podDir("u1"), v.podDir("u2"), filepath.Dir(old.Staging)} {
		if _, err := os.Lstat(p); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is left", p)
		}
	}
}

// A pod is removed although its driver does not know its volume, because the volume never existed
// or was deleted.
func TestVolumeTheDriverDoesNotKnow(t *testing.T) {
	v, _, d, claim := withDriver(t)
	unknown := func(string) error { return status.Error(codes.NotFound, "no such volume") }
	d.publish, d.unpublish = unknown, unknown
	if _, err := v.MountAll(t.Context(), newPod("u1", claim)); err == nil ||
		!strings.Contains(err.Error(), "no such volume") {
		t.Fatalf("a volume that is not there is mounted: %v", err)
	}
	requireNoError(t, v.UnmountAll(t.Context(), "u1"))
	if _, err := os.Lstat(v.podDir("u1")); !errors.Is(err, os.ErrNotExist) {
		t.Error("something of the pod is left")
	}
	d.publish = publishTmpfs
	_, err := v.MountAll(t.Context(), newPod("u2", claim))
	requireNoError(t, err)
	if err := v.UnmountAll(t.Context(), "u2"); err == nil || !strings.Contains(err.Error(), "no such volume") {
		t.Errorf("a volume that is mounted is forgotten: %v", err)
	}
	d.unpublish = unpublishTmpfs
	requireNoError(t, v.UnmountAll(t.Context(), "u2"))
}
