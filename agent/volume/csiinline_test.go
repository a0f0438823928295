package volume

import (
	"errors"
	"os"
	"strings"
	"testing"

	spec "github.com/container-storage-interface/spec/lib/go/csi"
	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

func newObjectMeta(name, uid string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID(uid)}
}

// newCSIDriver returns the CSIDriver object of the driver of withDriver.
func newCSIDriver(change func(*storagev1.CSIDriverSpec)) *storagev1.CSIDriver {
	d := &storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: "odd.example"},
		Spec: storagev1.CSIDriverSpec{AttachRequired: new(bool)}}
	change(&d.Spec)
	return d
}

// F110: an inline volume is published without staging, with the pod's name, secret and attributes,
// if the driver supports such volumes. Otherwise the error names the driver and its modes. The
// volume is deleted with the pod. It is not attached, even if other volumes of the driver are.
func TestInlineVolumes(t *testing.T) {
	v, c, d, _ := withDriver(t)
	c.Delete(newCSIDriver(func(*storagev1.CSIDriverSpec) {}))
	yes, ext4 := true, "ext4"
	vol := newVolume("scratch",
		v1.VolumeSource{CSI: &v1.CSIVolumeSource{Driver: "odd.example", FSType: &ext4, ReadOnly: &yes,
			VolumeAttributes:     map[string]string{"size": "1Gi", "csi.storage.k8s.io/pod.name": "a lie"},
			NodePublishSecretRef: &v1.LocalObjectReference{Name: "key"}}})
	for _, x := range []struct {
		modes []storagev1.VolumeLifecycleMode
		want  string
	}{
		{nil, "there is no CSIDriver object with its name and with Ephemeral in spec.volumeLifecycleModes"},
		{[]storagev1.VolumeLifecycleMode{storagev1.VolumeLifecyclePersistent},
			`its CSIDriver object has ["Persistent"] in spec.volumeLifecycleModes, but the volume needs Ephemeral`},
	} {
		if x.modes != nil {
			c.Put(newCSIDriver(func(s *storagev1.CSIDriverSpec) { s.VolumeLifecycleModes = x.modes }))
		}
		if _, err := v.MountAll(t.Context(), newPod("u1", vol)); err == nil || !strings.Contains(err.Error(), x.want) ||
			!strings.Contains(err.Error(), "odd.example") {
			t.Errorf("%v: %v", x.modes, err)
		}
	}
	c.Put(newCSIDriver(func(s *storagev1.CSIDriverSpec) {
		s.VolumeLifecycleModes = []storagev1.VolumeLifecycleMode{storagev1.VolumeLifecycleEphemeral}
		s.PodInfoOnMount, s.AttachRequired = &yes, &yes
	}))
	if _, err := v.MountAll(t.Context(), newPod("u1", vol)); err == nil ||
		!strings.Contains(err.Error(), `secret "default/key" not found`) {
		t.Errorf("without its secret: %v", err)
	}
	c.Put(&v1.Secret{ObjectMeta: newObjectMeta("key", ""), Data: map[string][]byte{"k": []byte("v")}})
	m, err := v.MountAll(t.Context(), newPod("u1", vol))
	requireNoError(t, err)
	q, _ := d.lastPublish()
	target := v.cfg.Paths.Kubelet + "/pods/u1/volumes/kubernetes.io~csi/scratch/mount"
	if m["scratch"].HostPath != target || !m["scratch"].ReadOnly || q.TargetPath != target ||
		q.StagingTargetPath != "" || !q.Readonly || q.Secrets["k"] != "v" ||
		!strings.HasPrefix(q.VolumeId, "csi-") || len(q.VolumeId) != 68 ||
		q.VolumeCapability.GetMount().GetFsType() != "ext4" ||
		q.VolumeCapability.AccessMode.Mode != spec.VolumeCapability_AccessMode_SINGLE_NODE_WRITER {
		t.Errorf("mount %+v, asked %v", m["scratch"], q)
	}
	for k, want := range map[string]string{"size": "1Gi", "csi.storage.k8s.io/pod.name": "web",
		"csi.storage.k8s.io/pod.namespace": "default",
		"csi.storage.k8s.io/pod.uid":       "u1", "csi.storage.k8s.io/serviceAccount.name": "sa",
		"csi.storage.k8s.io/ephemeral": "true"} {
		if got := q.VolumeContext[k]; got != want {
			t.Errorf("%s is %q, want %q", k, got, want)
		}
	}
	other, err := v.MountAll(t.Context(), newPod("u2", vol))
	requireNoError(t, err)
	if next, _ := d.lastPublish(); next.VolumeId == q.VolumeId || other["scratch"].HostPath == target {
		t.Error("two pods share a volume of their own")
	}
	v = New(*v.cfg)
	requireNoError(t, v.UnmountAll(t.Context(), "u1"))
	requireNoError(t, v.UnmountAll(t.Context(), "u2"))
	if len(d.staged)+len(d.unstaged) != 0 {
		t.Errorf("staged %v, unstaged %v", d.staged, d.unstaged)
	}
	for _, p := range []string{v.cfg.Paths.Kubelet + "/pods/u1", v.podDir("u1"),
		v.cfg.Paths.Kubelet + "/plugins/kubernetes.io"} {
		if _, err := os.Lstat(p); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is left", p)
		}
	}
}

// A driver with requiresRepublish is called again each minute, with current tokens and secrets.
// After a failure the pod keeps its content. Other drivers are not called again.
func TestRepublish(t *testing.T) {
	v, c, d, claim := withDriver(t)
	yes := true
	spec := func(again bool) *storagev1.CSIDriver {
		return newCSIDriver(func(s *storagev1.CSIDriverSpec) {
			s.RequiresRepublish, s.ServiceAccountTokenInSecrets, s.TokenRequests = &again, &yes,
				[]storagev1.TokenRequest{{Audience: "vault"}}
		})
	}
	c.Put(spec(true))
	requireNoError(t, v.Refresh(t.Context(), newPod("u1", claim)))
	if _, n := d.lastPublish(); n != 0 {
		t.Error("a volume that was not published is published again")
	}
	_, err := v.MountAll(t.Context(), newPod("u1", claim))
	requireNoError(t, err)
	requireNoError(t, v.Refresh(t.Context(), newPod("u1", claim)))
	if _, n := d.lastPublish(); n != 1 {
		t.Errorf("called %d times within a minute", n)
	}
	v = New(*v.cfg) // the restarted agent does not know the time of the last call
	requireNoError(t, v.Refresh(t.Context(), newPod("u1", claim)))
	q, n := d.lastPublish()
	const tokens = "csi.storage.k8s.io/serviceAccount.tokens"
	if n != 2 || !strings.Contains(q.Secrets[tokens], "token:default/web:vault") || q.VolumeContext[tokens] != "" {
		t.Errorf("call %d: %v", n, q)
	}
	v = New(*v.cfg)
	d.publish = func(string) error { return errors.New("no vault") }
	if err := v.Refresh(t.Context(), newPod("u1", claim)); err == nil || !strings.Contains(err.Error(), "no vault") ||
		!isMountedNow(q.TargetPath) {
		t.Errorf("a driver that fails: %v", err)
	}
	c.Put(spec(false))
	requireNoError(t, New(*v.cfg).Refresh(t.Context(), newPod("u1", claim)))
	requireNoError(t, v.UnmountAll(t.Context(), "u1"))
	requireNoError(t, v.Refresh(t.Context(), newPod("u1", claim)))
}

// F110: the application of fsGroup depends on the driver's policy, the file system and the access
// modes.
func TestGroupPolicies(t *testing.T) {
	none, file, once := storagev1.NoneFSGroupPolicy, storagev1.FileFSGroupPolicy,
		storagev1.ReadWriteOnceWithFSTypeFSGroupPolicy
	rwo, rwx := []v1.PersistentVolumeAccessMode{v1.ReadWriteOnce}, []v1.PersistentVolumeAccessMode{v1.ReadWriteMany}
	for _, x := range []struct {
		policy *storagev1.FSGroupPolicy
		fsType string
		modes  []v1.PersistentVolumeAccessMode
		want   bool
	}{
		{nil, "ext4", rwo, true}, {nil, "", rwo, false}, {nil, "ext4", rwx, false}, {nil, "ext4", nil, false},
		{&once, "ext4", rwo, true}, {&once, "", rwo, false}, {&once, "ext4", rwx, false},
		{&file, "", rwx, true}, {&file, "", nil, true}, {&none, "ext4", rwo, false},
	} {
		d := newCSIDriver(func(s *storagev1.CSIDriverSpec) { s.FSGroupPolicy = x.policy })
		if got := needsGroup(d, csiSource{fsType: x.fsType, accessModes: x.modes}); got != x.want {
			t.Errorf("%v: %v", x, got)
		}
	}
	if !needsGroup(nil, csiSource{fsType: "ext4", accessModes: rwo}) || needsGroup(nil, csiSource{}) {
		t.Error("without an object of the driver")
	}
	if s := inlineSource(newPod("u"), &v1.Volume{Name: "v",
		VolumeSource: v1.VolumeSource{CSI: &v1.CSIVolumeSource{FSType: new(string)}}}); needsGroup(nil, s) {
		t.Error("an inline volume without a file system type")
	}
}
