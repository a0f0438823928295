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

// loopDevice is a block device of 32 MiB with nothing on it.
func loopDevice(t *testing.T) (path string) {
	privatemounts.SkipUnlessPrivate(t)
	file := filepath.Join(t.TempDir(), "disk")
	must(t, os.WriteFile(file, nil, 0o600))
	must(t, os.Truncate(file, 32<<20))
	out, err := exec.Command("losetup", "--find", "--show", file).Output()
	must(t, err)
	path = strings.TrimSpace(string(out))
	t.Cleanup(func() {
		if out, err := exec.Command("losetup", "--detach", path).CombinedOutput(); err != nil {
			t.Errorf("%v %s", err, out)
		}
	})
	return path
}

// onDisk puts a claim on a local volume.
func onDisk(c *fake.Cluster, local v1.LocalVolumeSource) v1.Volume {
	c.Put(&v1.PersistentVolumeClaim{ObjectMeta: named("disk", "c1"), Spec: v1.PersistentVolumeClaimSpec{VolumeName: "pv"}, Status: v1.PersistentVolumeClaimStatus{Phase: v1.ClaimBound}},
		&v1.PersistentVolume{ObjectMeta: named("pv", ""), Spec: v1.PersistentVolumeSpec{PersistentVolumeSource: v1.PersistentVolumeSource{Local: &local}, MountOptions: []string{"noatime"},
			ClaimRef: &v1.ObjectReference{Namespace: "default", Name: "disk", UID: "c1"}}})
	return volume("data", v1.VolumeSource{PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{ClaimName: "disk"}})
}

// F110: a local volume whose path is a block device is a file system on it, as in Kubernetes: made where the device is blank,
// mounted for each pod of the node with the volume's options, for its fsGroup, and unmounted before anything is removed.
func TestLocalDisks(t *testing.T) {
	v, c, _ := newVolumes(t)
	device := loopDevice(t)
	claim := onDisk(c, v1.LocalVolumeSource{Path: device})
	group := int64(4711)
	mount := func(uid types.UID, readonly bool) string {
		t.Helper()
		p := pod(string(uid), *claim.DeepCopy())
		p.Spec.SecurityContext = &v1.PodSecurityContext{FSGroup: &group}
		p.Spec.Volumes[0].PersistentVolumeClaim.ReadOnly = readonly
		m, err := v.MountAll(t.Context(), p)
		must(t, err)
		if m["data"].ReadOnly != readonly || m["data"].Block || m["data"].IsFile {
			t.Errorf("%s: %+v", uid, m["data"])
		}
		return m["data"].HostPath
	}
	first := mount("u1", false)
	must(t, os.WriteFile(filepath.Join(first, "file"), []byte("kept"), 0o600))
	if st, err := os.Stat(first); err != nil || groupOf(st) != group {
		t.Errorf("%s: %v, %v", first, st, err)
	}
	var fs unix.Statfs_t
	if must(t, unix.Statfs(first, &fs)); fs.Flags&unix.ST_NOATIME == 0 {
		t.Errorf("its flags are %#x", fs.Flags)
	}
	second := mount("u2", true)
	if got := read(t, filepath.Join(second, "file")); got != "kept" {
		t.Errorf("the second pod reads %q", got)
	}
	v = New(v.cfg) // the agent ends, and finds what it did
	if again := mount("u1", false); again != first {
		t.Errorf("%s, and then %s", first, again)
	}
	must(t, v.UnmountAll(t.Context(), "u1"))
	if got := read(t, filepath.Join(second, "file")); got != "kept" {
		t.Errorf("when the first is gone, the second pod reads %q", got)
	}
	must(t, v.UnmountAll(t.Context(), "u2"))
	f, err := os.OpenFile(device, os.O_RDONLY|unix.O_EXCL, 0) // nobody has it mounted
	must(t, errors.Join(err, f.Close()))
	if pods, err := v.Pods(); err != nil || len(pods) > 0 {
		t.Errorf("left: %v, %v", pods, err)
	}
	if got := read(t, filepath.Join(mount("u3", false), "file")); got != "kept" {
		t.Errorf("the next pod reads %q", got)
	}
	must(t, v.UnmountAll(t.Context(), "u3"))
}

// What is on a device and is not what was asked for is said to the pod, and stays as it is; nothing is mounted. F110
func TestLocalDisksThatAreNotBlank(t *testing.T) {
	v, c, _ := newVolumes(t)
	device := loopDevice(t)
	must(t, exec.Command("mkswap", device).Run())
	before, err := os.ReadFile(device)
	must(t, err)
	ext4 := "ext4"
	_, err = v.MountAll(t.Context(), pod("u1", onDisk(c, v1.LocalVolumeSource{Path: device, FSType: &ext4})))
	want := `MountVolume.SetUp failed for volume "data" : local persistentvolume "pv": block device ` + device + " has swap on it, and is left as it is: fsType says ext4"
	if err == nil || !strings.HasPrefix(err.Error(), want) {
		t.Errorf("%v, want %s", err, want)
	}
	if after, err := os.ReadFile(device); err != nil || !bytes.Equal(before, after) {
		t.Errorf("the device was written to (%v)", err)
	}
	must(t, v.UnmountAll(t.Context(), "u1"))
}

// A local volume that is a folder, or a file, has the mount options that a part of a file system can have of its own, also below
// what is mounted in it, for its pods and nobody else; what is mounted in the folder stays when a pod goes. F110
func TestLocalFoldersWithMountOptions(t *testing.T) {
	v, c, _ := newVolumes(t)
	privatemounts.SkipUnlessPrivate(t)
	dir := t.TempDir()
	below := filepath.Join(dir, "below")
	must(t, os.Mkdir(below, 0o755))
	must(t, unix.Mount(dir, dir, "", unix.MS_BIND, ""))
	must(t, unix.Mount("", dir, "", unix.MS_SHARED, "")) // as systemd has it
	must(t, unix.Mount("tmpfs", below, "tmpfs", 0, ""))
	t.Cleanup(func() { must(t, errors.Join(unix.Unmount(below, 0), unix.Unmount(dir, 0))) })
	must(t, os.WriteFile(filepath.Join(below, "program"), []byte("#!/bin/sh\n"), 0o755))
	claim := onDisk(c, v1.LocalVolumeSource{Path: dir})
	with := func(path string, options ...string) {
		pv, _ := c.PersistentVolume("pv")
		pv = pv.DeepCopy()
		pv.Spec.Local.Path, pv.Spec.MountOptions = path, options
		c.Put(pv)
	}
	with(dir, "noexec,nosuid", "nodev")
	one := pod("u1", claim)
	group := int64(4711)
	one.Spec.SecurityContext = &v1.PodSecurityContext{FSGroup: &group}
	m, err := v.MountAll(t.Context(), one)
	must(t, err)
	at := m["data"].HostPath
	if at == dir || m["data"].ReadOnly || m["data"].IsFile {
		t.Fatalf("%+v", m)
	}
	for path, want := range map[string]int64{at: unix.ST_NOEXEC | unix.ST_NOSUID | unix.ST_NODEV, filepath.Join(at, "below"): unix.ST_NOEXEC | unix.ST_NOSUID | unix.ST_NODEV, dir: 0, below: 0} {
		var fs unix.Statfs_t
		must(t, unix.Statfs(path, &fs))
		if got := fs.Flags & (unix.ST_NOEXEC | unix.ST_NOSUID | unix.ST_NODEV); got != want {
			t.Errorf("%s has the flags %#x, want %#x", path, got, want)
		}
	}
	must(t, os.WriteFile(filepath.Join(at, "file"), []byte("kept"), 0o600))
	if st, err := os.Stat(at); err != nil || groupOf(st) != group {
		t.Errorf("%s: %v, %v", at, st, err)
	}
	if err := exec.Command(filepath.Join(at, "below", "program")).Run(); !errors.Is(err, os.ErrPermission) {
		t.Errorf("running a program: %v", err)
	}
	must(t, exec.Command(filepath.Join(below, "program")).Run())

	with(dir, "ro")
	two, err := v.MountAll(t.Context(), pod("u2", claim))
	must(t, err)
	if err := os.WriteFile(filepath.Join(two["data"].HostPath, "new"), nil, 0o600); !errors.Is(err, unix.EROFS) || !two["data"].ReadOnly {
		t.Errorf("writing to a volume that is mounted read-only: %v, %+v", err, two)
	}
	v = New(v.cfg) // the agent ends, and finds what it did
	if again, err := v.MountAll(t.Context(), pod("u2", claim)); err != nil || again["data"] != two["data"] {
		t.Errorf("%+v, %v; and before %+v", again, err, two)
	}
	with(filepath.Join(dir, "file"), "ro")
	three, err := v.MountAll(t.Context(), pod("u3", claim))
	must(t, err)
	if got := read(t, three["data"].HostPath); got != "kept" || !three["data"].IsFile {
		t.Errorf("a file has %q, %+v", got, three)
	}
	for _, uid := range []types.UID{"u1", "u2", "u3"} {
		must(t, v.UnmountAll(t.Context(), uid))
	}
	if got := read(t, filepath.Join(dir, "file")) + read(t, filepath.Join(below, "program")); got != "kept#!/bin/sh\n" {
		t.Errorf("when the pods are gone the node has %q", got)
	}
	with(dir, "noatime", "data=journal,sync")
	_, err = v.MountAll(t.Context(), pod("u4", claim))
	if want := `which cannot have the mount options "data=journal,sync": take them out of mountOptions`; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%v, want %s", err, want)
	}
	if is, err := mounted(filepath.Join(v.podDir("u4"), "disk", "data")); is || err != nil {
		t.Errorf("it is mounted all the same (%v)", err)
	}
}
