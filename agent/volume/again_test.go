package volume

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/csi"
	"keelson.dev/keelson/csi/local"
)

// newBoundClaim returns a claim and the volume that it is bound to.
func newBoundClaim(name string, s v1.PersistentVolumeSource) (*v1.PersistentVolumeClaim, *v1.PersistentVolume) {
	return &v1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
			Spec:   v1.PersistentVolumeClaimSpec{VolumeName: name},
			Status: v1.PersistentVolumeClaimStatus{Phase: v1.ClaimBound}},
		&v1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v1.PersistentVolumeSpec{
			AccessModes: []v1.PersistentVolumeAccessMode{v1.ReadWriteOnce}, PersistentVolumeSource: s,
			ClaimRef: &v1.ObjectReference{Namespace: "default", Name: name}}}
}

func newClaimVolume(name string) v1.Volume {
	return newVolume(name,
		v1.VolumeSource{PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{ClaimName: name}})
}

// A restarted agent does not change the volumes of running pods, which their containers may have
// changed.
func TestVolumesOfARunningPodAreLeftAlone(t *testing.T) {
	v, c, dir := newVolumes(t)
	withLocalDriver(t, v, dir)
	place := filepath.Join(dir, "place")
	requireNoError(t, os.Mkdir(place, 0o755))
	for name, s := range map[string]v1.PersistentVolumeSource{
		"local": {Local: &v1.LocalVolumeSource{Path: place}},
		"csi":   {CSI: &v1.CSIPersistentVolumeSource{Driver: local.DriverName, VolumeHandle: "vol-1", FSType: "ext4"}},
	} {
		pvc, pv := newBoundClaim(name, s)
		c.Put(pvc, pv)
	}
	memory := v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{Medium: v1.StorageMediumMemory}}
	p := newPod("u1", newVolume("disk", v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{}}),
		newVolume("ram", memory), newClaimVolume("local"), newClaimVolume("csi"))
	g := int64(4711)
	p.Spec.SecurityContext = &v1.PodSecurityContext{FSGroup: &g}
	first, err := v.MountAll(t.Context(), p)
	requireNoError(t, err)
	for name, m := range first {
		st, err := os.Stat(m.HostPath)
		requireNoError(t, err)
		if fileGroup(st) != g || st.Mode()&os.ModeSetgid == 0 {
			t.Errorf("%s at first: group %d, %s", name, fileGroup(st), st.Mode())
		}
		requireNoError(t, os.WriteFile(m.HostPath+"/file", []byte(name), 0o600))
		requireNoError(t, os.Chown(m.HostPath, 1000, 1001))
		requireNoError(t, os.Chmod(m.HostPath, 0o700))
	}
	cfg := *v.cfg
	for _, driver := range []bool{true, false} {
		if !driver { // the driver starts after the agent
			cfg.CSI = csi.NewRegistry(csi.RegistryConfig{Plugins: filepath.Join(dir, "no plugins yet")})
		}
		v = New(cfg)
		again, err := v.MountAll(t.Context(), p)
		requireNoError(t, err)
		for name, m := range again {
			st, err := os.Stat(m.HostPath)
			requireNoError(t, err)
			if m != first[name] || fileGroup(st) != 1001 || st.Mode() != os.ModeDir|0o700 ||
				mustRead(t, m.HostPath+"/file") != name {
				t.Errorf("%s after a restart of the agent: %+v, group %d, %s", name, m, fileGroup(st), st.Mode())
			}
			st, err = os.Stat(m.HostPath + "/file")
			requireNoError(t, err)
			if fileGroup(st) == g && name != "ram" && name != "disk" && st.Mode().Perm() != 0o600 {
				t.Errorf("%s: its file has group %d, mode %s", name, fileGroup(st), st.Mode())
			}
		}
	}
	v.cfg.CSI = csi.NewRegistry(csi.RegistryConfig{Plugins: filepath.Join(dir, "plugins")})
	requireNoError(t, v.UnmountAll(t.Context(), "u1"))
	// The volumes of the next pod get its own group.
	g = 4712
	p.UID = "u2"
	next, err := v.MountAll(t.Context(), p)
	requireNoError(t, err)
	for name, m := range next {
		if st, err := os.Stat(m.HostPath); err != nil || fileGroup(st) != g {
			t.Errorf("%s of the next pod: %v, %v", name, st, err)
		}
	}
	requireNoError(t, v.UnmountAll(t.Context(), "u2"))
}

// A FIFO in place of a file does not block the agent.
func TestHostPathThatIsAFIFO(t *testing.T) {
	path := filepath.Join(t.TempDir(), "fifo")
	requireNoError(t, unix.Mkfifo(path, 0o600))
	kind := v1.HostPathFileOrCreate
	done := make(chan error, 1)
	go func() { _, err := hostPath(&v1.HostPathVolumeSource{Path: path, Type: &kind}); done <- err }()
	select {
	case err := <-done:
		if err == nil {
			t.Error("a FIFO passed as a file")
		}
	case <-time.After(time.Minute):
		f, _ := os.OpenFile(path, os.O_WRONLY|unix.O_NONBLOCK, 0) // release the blocked reader
		f.Close()
		t.Fatal("opening a FIFO waits for ever")
	}
}
