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
	privatemounts.Need(t)
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
