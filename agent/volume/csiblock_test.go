package volume

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	spec "github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/agent/fake"
	"keelson.dev/keelson/csi"
	"keelson.dev/keelson/csi/local"
	"keelson.dev/keelson/internal/await"
	"keelson.dev/keelson/internal/reservedspace"
)

// setVolumeMode changes the volumeMode of the volume of withDriver.
func setVolumeMode(c *fake.Cluster, m v1.PersistentVolumeMode) {
	pv, _ := c.PersistentVolume("pv")
	pv = pv.DeepCopy()
	pv.Spec.VolumeMode = &m
	c.Put(pv)
}

// withDevices adds volumes to volumeDevices of a pod's container.
func withDevices(p *v1.Pod, names ...string) *v1.Pod {
	for _, n := range names {
		p.Spec.Containers[0].VolumeDevices = append(p.Spec.Containers[0].VolumeDevices,
			v1.VolumeDevice{Name: n, DevicePath: "/dev/" + n})
	}
	return p
}

// publishDevice publishes a block device as a device file that is never opened.
func publishDevice(target string) error {
	err := unix.Mknod(target, unix.S_IFBLK|0o600, int(unix.Mkdev(7, 4711)))
	if errors.Is(err, unix.EEXIST) {
		return nil
	}
	return err
}

// F110: block devices are staged and published at the kubelet's paths, as a file, a link or a mount
// of the device. The error names a driver that publishes something else. Nothing is left, and
// nothing with data is removed.
func TestBlockDevicesOfDrivers(t *testing.T) {
	v, c, d, claim := withDriver(t)
	setVolumeMode(c, v1.PersistentVolumeBlock)
	k := v.cfg.Paths.Kubelet
	target, staging := k+"/plugins/kubernetes.io/csi/volumeDevices/publish/pv/u1",
		k+"/plugins/kubernetes.io/csi/volumeDevices/staging/pv"
	real := filepath.Join(k, "disk")
	requireNoError(t, publishDevice(real))
	for name, publish := range map[string]func(string) error{
		"a file of the device": publishDevice,
		"a link to it":         func(target string) error { return os.Symlink(real, target) },
		"a mount of it": func(target string) error {
			return errors.Join(os.WriteFile(target, nil, 0o600), unix.Mount(real, target, "", unix.MS_BIND, ""))
		},
	} {
		t.Run(name, func(t *testing.T) {
			d.publish, d.unpublish = publish, unpublishTmpfs // other files there are left by the driver
			m, err := v.MountAll(t.Context(), withDevices(newPod("u1", claim), "data"))
			requireNoError(t, err)
			q, n := d.lastPublish()
			if m["data"].HostPath != target || !m["data"].Block || d.staged[len(d.staged)-1] != staging ||
				q.TargetPath != target ||
				q.StagingTargetPath != staging || q.VolumeCapability.GetBlock() == nil {
				t.Errorf("mount %+v, staged %v, asked %v", m["data"], d.staged, q)
			}
			v = New(*v.cfg) // the agent restarts and finds its work
			if _, err := v.MountAll(t.Context(), withDevices(newPod("u1", claim), "data")); err != nil {
				t.Error(err)
			}
			if _, again := d.lastPublish(); again != n {
				t.Error("the driver is asked again for what is there")
			}
			requireNoError(t, v.UnmountAll(t.Context(), "u1"))
			for _, p := range []string{target, filepath.Dir(target), staging, v.podDir("u1")} {
				if _, err := os.Lstat(p); !errors.Is(err, os.ErrNotExist) {
					t.Errorf("%s is left", p)
				}
			}
		})
	}
	d.publish = func(target string) error { return os.WriteFile(target, []byte("data"), 0o600) }
	_, err := v.MountAll(t.Context(), withDevices(newPod("u1", claim), "data"))
	for _, want := range []string{`persistentvolume "pv"`, "odd.example", "vol-1", "no block device at " + target,
		"Bidirectional"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not say %q", err, want)
		}
	}
	if err := v.UnmountAll(t.Context(), "u1"); err == nil || !strings.Contains(err.Error(), "is a file of 4 bytes") ||
		mustRead(t, target) != "data" {
		t.Errorf("a file with data at the place of a device: %v", err)
	}
	requireNoError(t, os.Remove(target))
	requireNoError(t, v.UnmountAll(t.Context(), "u1"))
}

// A volume is used in its own volumeMode. Otherwise the error names volume and container.
func TestVolumeModes(t *testing.T) {
	v, c, _, claim := withDriver(t)
	mounted := newPod("u1", claim)
	mounted.Spec.Containers[0].VolumeMounts = []v1.VolumeMount{{Name: "data", MountPath: "/data"}}
	_, err := v.MountAll(t.Context(), withDevices(newPod("u1", claim), "data"))
	if err == nil || !strings.Contains(err.Error(),
		`persistentvolume "pv" has volumeMode Filesystem, but container "app" has it in volumeDevices`) {
		t.Errorf("a file system as a device: %v", err)
	}
	setVolumeMode(c, v1.PersistentVolumeBlock)
	_, err = v.MountAll(t.Context(), mounted)
	if err == nil || !strings.Contains(err.Error(),
		`persistentvolume "pv" has volumeMode Block, but container "app" has it in volumeMounts`) {
		t.Errorf("a device mounted: %v", err)
	}
	requireNoError(t, v.UnmountAll(t.Context(), "u1"))
}

// Local volumes are block devices if their volumeMode requests it; hostPath volumes never are.
func TestLocalBlockDevices(t *testing.T) {
	v, c, dir := newVolumes(t)
	disk, folder := filepath.Join(dir, "disk"), filepath.Join(dir, "folder")
	requireNoError(t, publishDevice(disk))
	requireNoError(t, os.Mkdir(folder, 0o755))
	block, fs := v1.PersistentVolumeBlock, v1.PersistentVolumeFilesystem
	for _, x := range []struct {
		mode v1.PersistentVolumeMode
		src  v1.PersistentVolumeSource
		want string // substring of the error; "" = it is mounted
	}{
		{block, v1.PersistentVolumeSource{Local: &v1.LocalVolumeSource{Path: disk}}, ""},
		{block, v1.PersistentVolumeSource{Local: &v1.LocalVolumeSource{Path: folder}},
			folder + " is not a block device"},
		{fs, v1.PersistentVolumeSource{Local: &v1.LocalVolumeSource{Path: folder}}, ""},
		{block, v1.PersistentVolumeSource{HostPath: &v1.HostPathVolumeSource{Path: disk}},
			"use a local volume for a block device"},
	} {
		c.Put(&v1.PersistentVolumeClaim{ObjectMeta: newObjectMeta("disk", "c1"),
			Spec:   v1.PersistentVolumeClaimSpec{VolumeName: "pv"},
			Status: v1.PersistentVolumeClaimStatus{Phase: v1.ClaimBound}},
			&v1.PersistentVolume{ObjectMeta: newObjectMeta("pv", ""),
				Spec: v1.PersistentVolumeSpec{VolumeMode: &x.mode, PersistentVolumeSource: x.src,
					ClaimRef: &v1.ObjectReference{Namespace: "default", Name: "disk", UID: "c1"}}})
		m, err := v.MountAll(t.Context(), newPod("u1",
			newVolume("data",
				v1.VolumeSource{PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{ClaimName: "disk"}})))
		if x.want != "" {
			if err == nil || !strings.Contains(err.Error(), x.want) {
				t.Errorf("%v: %v does not say %q", x, err, x.want)
			}
			continue
		}
		if err != nil || m["data"].Block != (x.mode == block) {
			t.Errorf("%v: %+v, %v", x, m, err)
		}
	}
}

// F110: the local driver provides a loop device. After the first pod it is available to another pod
// with its data. After the last pod it is removed.
func TestOwnBlockDevice(t *testing.T) {
	v, c, _ := newVolumes(t)
	dir := filepath.Dir(v.cfg.Paths.State)
	socket := filepath.Join(dir, "plugins", local.DriverName, "csi.sock")
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	own := local.New(local.Config{Root: filepath.Join(dir, "data"), Socket: socket, NodeID: "w1",
		KeepFree: reservedspace.Bytes(1 << 20)})
	go func() { done <- own.Run(ctx) }()
	defer func() { cancel(); <-done }()
	v.cfg.CSI = csi.NewRegistry(csi.RegistryConfig{Plugins: filepath.Join(dir, "plugins")})
	await.Until(t.Context(), t, await.Patience, time.Millisecond, "the driver", func() error {
		_, err := v.cfg.CSI.Driver(t.Context(), local.DriverName)
		return err
	})
	block := v1.PersistentVolumeBlock
	made, err := own.CreateVolume(t.Context(),
		&spec.CreateVolumeRequest{Name: "vol-b", CapacityRange: &spec.CapacityRange{RequiredBytes: 16 << 20},
			VolumeCapabilities: []*spec.VolumeCapability{
				{AccessType: &spec.VolumeCapability_Block{Block: &spec.VolumeCapability_BlockVolume{}},
					AccessMode: &spec.VolumeCapability_AccessMode{
						Mode: spec.VolumeCapability_AccessMode_SINGLE_NODE_WRITER}}}})
	requireNoError(t, err)
	c.Put(&v1.PersistentVolumeClaim{ObjectMeta: newObjectMeta("disk", "c1"),
		Spec:   v1.PersistentVolumeClaimSpec{VolumeName: "pv"},
		Status: v1.PersistentVolumeClaimStatus{Phase: v1.ClaimBound}},
		&v1.PersistentVolume{ObjectMeta: newObjectMeta("pv", ""),
			Spec: v1.PersistentVolumeSpec{VolumeMode: &block,
				AccessModes: []v1.PersistentVolumeAccessMode{v1.ReadWriteOnce},
				ClaimRef:    &v1.ObjectReference{Namespace: "default", Name: "disk", UID: "c1"},
				PersistentVolumeSource: v1.PersistentVolumeSource{
					CSI: &v1.CSIPersistentVolumeSource{Driver: local.DriverName, VolumeHandle: "vol-b",
						VolumeAttributes: made.Volume.VolumeContext}}}})
	claim := newVolume("data",
		v1.VolumeSource{PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{ClaimName: "disk"}})
	for i, want := range []string{"\x00\x00\x00\x00", "kept"} {
		uid := fmt.Sprint("u", i)
		m, err := v.MountAll(t.Context(), withDevices(newPod(uid, claim), "data"))
		requireNoError(t, err)
		f, err := os.OpenFile(m["data"].HostPath, os.O_RDWR|unix.O_SYNC, 0)
		requireNoError(t, err)
		got := make([]byte, 4)
		if _, err := f.ReadAt(got, 1<<20); err != nil || string(got) != want {
			t.Errorf("pod %d reads %q, %v", i, got, err)
		}
		_, err = f.WriteAt([]byte("kept"), 1<<20)
		requireNoError(t, errors.Join(err, f.Close()))
		requireNoError(t, v.UnmountAll(t.Context(), newPod(uid).UID))
	}
	_, err = own.DeleteVolume(t.Context(), &spec.DeleteVolumeRequest{VolumeId: "vol-b"})
	requireNoError(t, err) // it refuses a file that a loop device uses
}
