package volume

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent/fake"
	"keelson.dev/keelson/csi/privatemounts"
)

// loopDevice returns a blank block device of 32 MiB.
func loopDevice(t *testing.T) (path string) {
	privatemounts.SkipUnlessPrivate(t)
	file := filepath.Join(t.TempDir(), "disk")
	requireNoError(t, os.WriteFile(file, nil, 0o600))
	requireNoError(t, os.Truncate(file, 32<<20))
	out, err := exec.Command("losetup", "--find", "--show", file).Output()
	requireNoError(t, err)
	path = strings.TrimSpace(string(out))
	t.Cleanup(func() {
		if out, err := exec.Command("losetup", "--detach", path).CombinedOutput(); err != nil {
			t.Errorf("%v %s", err, out)
		}
	})
	return path
}

// newLocalClaim stores a claim on a local volume.
func newLocalClaim(c *fake.Cluster, local v1.LocalVolumeSource) v1.Volume {
	c.Put(&v1.PersistentVolumeClaim{ObjectMeta: newObjectMeta("disk", "c1"),
		Spec:   v1.PersistentVolumeClaimSpec{VolumeName: "pv"},
		Status: v1.PersistentVolumeClaimStatus{Phase: v1.ClaimBound}},
		&v1.PersistentVolume{ObjectMeta: newObjectMeta("pv", ""),
			Spec: v1.PersistentVolumeSpec{PersistentVolumeSource: v1.PersistentVolumeSource{Local: &local},
				MountOptions: []string{"noatime"},
				ClaimRef:     &v1.ObjectReference{Namespace: "default", Name: "disk", UID: "c1"}}})
	return newVolume("data",
		v1.VolumeSource{PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{ClaimName: "disk"}})
}

// F110: as in Kubernetes, a local volume on a block device is its file system. It is created on a
// blank device, mounted for each pod of the node with the volume's options and the pod's fsGroup,
// and unmounted before anything is removed.
func TestLocalDisks(t *testing.T) {
	v, c, _ := newVolumes(t)
	device := loopDevice(t)
	claim := newLocalClaim(c, v1.LocalVolumeSource{Path: device})
	group := int64(4711)
	mount := func(uid types.UID, readonly bool) string {
		t.Helper()
		p := newPod(string(uid), *claim.DeepCopy())
		p.Spec.SecurityContext = &v1.PodSecurityContext{FSGroup: &group}
		p.Spec.Volumes[0].PersistentVolumeClaim.ReadOnly = readonly
		m, err := v.MountAll(t.Context(), p)
		requireNoError(t, err)
		if m["data"].ReadOnly != readonly || m["data"].Block || m["data"].IsFile {
			t.Errorf("%s: %+v", uid, m["data"])
		}
		return m["data"].HostPath
	}
	first := mount("u1", false)
	requireNoError(t, os.WriteFile(filepath.Join(first, "file"), []byte("kept"), 0o600))
	if st, err := os.Stat(first); err != nil || fileGroup(st) != group {
		t.Errorf("%s: %v, %v", first, st, err)
	}
	var fs unix.Statfs_t
	if requireNoError(t, unix.Statfs(first, &fs)); fs.Flags&unix.ST_NOATIME == 0 {
		t.Errorf("its flags are %#x", fs.Flags)
	}
	second := mount("u2", true)
	if got := mustRead(t, filepath.Join(second, "file")); got != "kept" {
		t.Errorf("the second pod reads %q", got)
	}
	v = New(*v.cfg) // the agent restarts and finds its work
	if again := mount("u1", false); again != first {
		t.Errorf("%s, and then %s", first, again)
	}
	requireNoError(t, v.UnmountAll(t.Context(), "u1"))
	if got := mustRead(t, filepath.Join(second, "file")); got != "kept" {
		t.Errorf("when the first is gone, the second pod reads %q", got)
	}
	requireNoError(t, v.UnmountAll(t.Context(), "u2"))
	f, err := os.OpenFile(device, os.O_RDONLY|unix.O_EXCL, 0) // fails while the device is mounted
	requireNoError(t, errors.Join(err, f.Close()))
	if pods, err := v.Pods(); err != nil || len(pods) > 0 {
		t.Errorf("left: %v, %v", pods, err)
	}
	if got := mustRead(t, filepath.Join(mount("u3", false), "file")); got != "kept" {
		t.Errorf("the next pod reads %q", got)
	}
	requireNoError(t, v.UnmountAll(t.Context(), "u3"))
}

// A device with unexpected content is reported and not changed; nothing is mounted. F110
func TestLocalDisksThatAreNotBlank(t *testing.T) {
	v, c, _ := newVolumes(t)
	device := loopDevice(t)
	requireNoError(t, exec.Command("mkswap", device).Run())
	before, err := os.ReadFile(device)
	requireNoError(t, err)
	ext4 := "ext4"
	_, err = v.MountAll(t.Context(), newPod("u1", newLocalClaim(c, v1.LocalVolumeSource{Path: device, FSType: &ext4})))
	want := `MountVolume.SetUp failed for volume "data" : local persistentvolume "pv": block device ` + device +
		" contains swap and is not changed, but fsType is ext4"
	if err == nil || !strings.HasPrefix(err.Error(), want) {
		t.Errorf("%v, want %s", err, want)
	}
	if after, err := os.ReadFile(device); err != nil || !bytes.Equal(before, after) {
		t.Errorf("the device was written to (%v)", err)
	}
	requireNoError(t, v.UnmountAll(t.Context(), "u1"))
}

// A local volume that is a folder or a file has its own mount options, also for mounts below it,
// visible to its pods only. Mounts in the folder remain when a pod is removed. F110
func TestLocalFoldersWithMountOptions(t *testing.T) {
	v, c, _ := newVolumes(t)
	privatemounts.SkipUnlessPrivate(t)
	dir := t.TempDir()
	below := filepath.Join(dir, "below")
	requireNoError(t, os.Mkdir(below, 0o755))
	requireNoError(t, unix.Mount(dir, dir, "", unix.MS_BIND, ""))
	requireNoError(t, unix.Mount("", dir, "", unix.MS_SHARED, "")) // as under systemd
	requireNoError(t, unix.Mount("tmpfs", below, "tmpfs", 0, ""))
	t.Cleanup(func() { requireNoError(t, errors.Join(unix.Unmount(below, 0), unix.Unmount(dir, 0))) })
	requireNoError(t, os.WriteFile(filepath.Join(below, "program"), []byte("#!/bin/sh\n"), 0o755))
	claim := newLocalClaim(c, v1.LocalVolumeSource{Path: dir})
	with := func(path string, options ...string) {
		pv, _ := c.PersistentVolume("pv")
		pv = pv.DeepCopy()
		pv.Spec.Local.Path, pv.Spec.MountOptions = path, options
		c.Put(pv)
	}
	with(dir, "noexec,nosuid", "nodev")
	one := newPod("u1", claim)
	group := int64(4711)
	one.Spec.SecurityContext = &v1.PodSecurityContext{FSGroup: &group}
	m, err := v.MountAll(t.Context(), one)
	requireNoError(t, err)
	at := m["data"].HostPath
	if at == dir || m["data"].ReadOnly || m["data"].IsFile {
		t.Fatalf("%+v", m)
	}
	for path, want := range map[string]int64{at: unix.ST_NOEXEC | unix.ST_NOSUID | unix.ST_NODEV,
		filepath.Join(at, "below"): unix.ST_NOEXEC | unix.ST_NOSUID | unix.ST_NODEV, dir: 0, below: 0} {
		var fs unix.Statfs_t
		requireNoError(t, unix.Statfs(path, &fs))
		if got := fs.Flags & (unix.ST_NOEXEC | unix.ST_NOSUID | unix.ST_NODEV); got != want {
			t.Errorf("%s has the flags %#x, want %#x", path, got, want)
		}
	}
	requireNoError(t, os.WriteFile(filepath.Join(at, "file"), []byte("kept"), 0o600))
	if st, err := os.Stat(at); err != nil || fileGroup(st) != group {
		t.Errorf("%s: %v, %v", at, st, err)
	}
	if err := exec.Command(filepath.Join(at, "below", "program")).Run(); !errors.Is(err, os.ErrPermission) {
		t.Errorf("running a program: %v", err)
	}
	requireNoError(t, exec.Command(filepath.Join(below, "program")).Run())

	with(dir, "ro")
	two, err := v.MountAll(t.Context(), newPod("u2", claim))
	requireNoError(t, err)
	if err := os.WriteFile(filepath.Join(two["data"].HostPath, "new"), nil, 0o600); !errors.Is(err, unix.EROFS) ||
		!two["data"].ReadOnly {
		t.Errorf("writing to a volume that is mounted read-only: %v, %+v", err, two)
	}
	v = New(*v.cfg) // the agent restarts and finds its work
	if again, err := v.MountAll(t.Context(), newPod("u2", claim)); err != nil || again["data"] != two["data"] {
		t.Errorf("%+v, %v; and before %+v", again, err, two)
	}
	with(filepath.Join(dir, "file"), "ro")
	three, err := v.MountAll(t.Context(), newPod("u3", claim))
	requireNoError(t, err)
	if got := mustRead(t, three["data"].HostPath); got != "kept" || !three["data"].IsFile {
		t.Errorf("a file has %q, %+v", got, three)
	}
	for _, uid := range []types.UID{"u1", "u2", "u3"} {
		requireNoError(t, v.UnmountAll(t.Context(), uid))
	}
	if got := mustRead(t, filepath.Join(dir, "file")) + mustRead(t, filepath.Join(below, "program")); got !=
		"kept#!/bin/sh\n" {
		t.Errorf("when the pods are gone the node has %q", got)
	}
	with(dir, "noatime", "data=journal,sync")
	_, err = v.MountAll(t.Context(), newPod("u4", claim))
	if want := `which does not support the mount options "data=journal,sync": remove them from mountOptions`; err ==
		nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%v, want %s", err, want)
	}
	if is, err := isMountPoint(filepath.Join(v.podDir("u4"), "disk", "data")); is || err != nil {
		t.Errorf("it is mounted all the same (%v)", err)
	}
}
