package volume

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/fake"
	"keelson.dev/keelson/csi/local"
)

// A ReadWriteOncePod claim belongs to one pod until its volumes are unmounted, also across restarts
// of the agent. Of two concurrent pods, only one gets it.
func TestOnePodPerClaim(t *testing.T) {
	v, c, _ := newVolumes(t)
	pvc, pv := newBoundClaim("sole", v1.PersistentVolumeSource{HostPath: &v1.HostPathVolumeSource{Path: t.TempDir()}})
	pvc.UID, pvc.Spec.AccessModes = "c1", []v1.PersistentVolumeAccessMode{v1.ReadWriteOncePod}
	pv.Spec.ClaimRef.UID = "c1"
	c.Put(pvc, pv)
	mount := func(v *Volumes, uid string) error {
		_, err := v.MountAll(t.Context(), newPod(uid, newClaimVolume("sole"),
			newVolume("again", newClaimVolume("sole").VolumeSource)))
		return err
	}
	const taken = `persistentvolumeclaim "default/sole" uses the ReadWriteOncePod access mode and is already in ` +
		`use by another pod`
	results := make(chan error, 2)
	for _, uid := range []string{"u1", "u2"} {
		go func() { results <- mount(v, uid) }()
	}
	won, lost := <-results, <-results
	if won != nil {
		won, lost = lost, won
	}
	if won != nil || lost == nil || !strings.Contains(lost.Error(), taken) {
		t.Fatalf("two at once: %v, %v", won, lost)
	}
	holder, other := "u1", "u2"
	if mount(v, "u1") != nil {
		holder, other = other, holder
	}
	again := New(*v.cfg)
	requireNoError(t, mount(again, holder))
	if err := mount(again, other); err == nil || !strings.Contains(err.Error(), taken) {
		t.Errorf("after the restart of the agent: %v", err)
	}
	requireNoError(t, again.UnmountAll(t.Context(), newPod(holder).UID))
	requireNoError(t, mount(again, other))
	requireNoError(t, again.UnmountAll(t.Context(), newPod(other).UID))
}

// A volume belongs to one pod even if another ReadWriteOncePod claim is bound to it, as after the
// restore of a backup. Marks of an agent that did not record the volume are sufficient once this
// agent has mounted again.
func TestOnePodPerVolume(t *testing.T) {
	v, c, dir := newVolumes(t)
	pvc, pv := newBoundClaim("sole", v1.PersistentVolumeSource{HostPath: &v1.HostPathVolumeSource{Path: t.TempDir()}})
	pvc.UID, pvc.Spec.AccessModes = "c1", []v1.PersistentVolumeAccessMode{v1.ReadWriteOncePod}
	pv.Spec.ClaimRef.UID = "c1"
	c.Put(pvc, pv)
	mount := func(uid string) error {
		_, err := v.MountAll(t.Context(), newPod(uid, newClaimVolume("sole")))
		return err
	}
	mark := filepath.Join(dir, "state", "volumes", "u1", "alone", "c1")
	requireNoError(t, os.MkdirAll(filepath.Dir(mark), 0o750))
	requireNoError(t, os.WriteFile(mark, nil, 0o600))
	requireNoError(t, mount("u1"))
	if held, err := v.ExclusiveClaims(); err != nil ||
		!slices.Equal(held, []agent.HeldClaim{{Pod: "u1", Claim: "c1", Volume: pv.Name}}) {
		t.Errorf("held %+v, %v", held, err)
	}
	pvc, pv = pvc.DeepCopy(), pv.DeepCopy()
	pvc.UID, pv.Spec.ClaimRef.UID = "c2", "c2"
	c.Put(pvc, pv)
	if err := mount("u2"); err == nil || !strings.Contains(err.Error(),
		fmt.Sprintf("its volume %q is already in use by another pod with uid u1, through a previous claim", pv.Name)) {
		t.Errorf("by another claim: %v", err)
	}
	requireNoError(t, v.UnmountAll(t.Context(), "u1"))
	requireNoError(t, mount("u2"))
	requireNoError(t, v.UnmountAll(t.Context(), "u2"))
	if held, err := v.ExclusiveClaims(); err != nil || len(held) > 0 {
		t.Errorf("held %+v, %v", held, err)
	}
}

// A ReadWriteOncePod volume that other nodes can reach is mounted once the control plane has
// recorded its pod, also for pods that waited when the agent restarted. While the holders are
// unknown after a restore, only the pod that had it here before gets it.
func TestVolumesOfOnePodAreToldOf(t *testing.T) {
	cluster := fake.NewCluster()
	v := New(Config{Paths: agent.Paths{State: t.TempDir(), Run: t.TempDir()}, Objects: cluster})
	pvc, pv := newBoundClaim("sole",
		v1.PersistentVolumeSource{NFS: &v1.NFSVolumeSource{Server: "192.0.2.1", Path: "/a"}})
	pvc.UID, pvc.Spec.AccessModes = "c1", []v1.PersistentVolumeAccessMode{v1.ReadWriteOncePod}
	patience, cancel := context.WithCancel(t.Context())
	cancel() // without waiting
	says := func(v *Volumes, uid, want string) {
		t.Helper()
		err := v.claims.claimExclusively(patience, newPod(uid), pvc, pv)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v, want %q", uid, err, want)
		}
	}
	heard := func(list string) {
		n := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "here",
			Annotations: map[string]string{agent.ClaimsHeldAnnotation: list}}}
		cluster.Put(n)
	}
	waits := context.Canceled.Error()
	says(v, "u1", waits)
	select {
	case <-v.UsesChanged():
	default:
		t.Error("nobody is told")
	}
	heard("[]")
	says(v, "u1", waits)
	says(v, "u2", "already in use by another pod")
	heard(fmt.Sprintf(`[{"pod":"u1","claim":"c1","volume":%q}]`, pv.Name))
	says(v, "u1", "")
	heard("[]")
	says(v, "u1", "") // it is mounted

	pv.Annotations = map[string]string{unknownHoldersAnnotation: ""}
	says(v, "u1", "")
	again := New(*v.cfg)
	says(again, "u1", "")
	requireNoError(t, v.UnmountAll(t.Context(), "u1"))
	says(v, "u2", "after the restore of a backup it is not known yet")
	if held, err := v.ExclusiveClaims(); err != nil || len(held) > 0 {
		t.Errorf("a pod that waits holds %+v, %v", held, err)
	}
	pv.Annotations = nil
	says(v, "u2", waits)
	heard("all")
	says(v, "u2", "")

	for _, s := range []v1.PersistentVolumeSource{{HostPath: &v1.HostPathVolumeSource{Path: "/a"}},
		{Local: &v1.LocalVolumeSource{Path: "/a"}}, {ISCSI: &v1.ISCSIPersistentVolumeSource{}},
		{CSI: &v1.CSIPersistentVolumeSource{Driver: "odd.example"}},
		{CSI: &v1.CSIPersistentVolumeSource{Driver: local.DriverName}}} {
		if pv.Spec.PersistentVolumeSource = s; v.claims.isReachableElsewhere(pv) {
			t.Errorf("others reach %+v whenever they like", s)
		}
	}
	no := false
	cluster.Put(&storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: "odd.example"},
		Spec: storagev1.CSIDriverSpec{AttachRequired: &no}})
	if pv.Spec.PersistentVolumeSource = (v1.PersistentVolumeSource{
		CSI: &v1.CSIPersistentVolumeSource{Driver: "odd.example"}}); !v.claims.isReachableElsewhere(pv) {
		t.Error("others do not reach a volume that is not attached")
	}
}

// The claim of an ephemeral volume is mounted only for the pod that it was created for, not for
// another pod with the same name.
func TestEphemeralVolumeIsThePodsOwn(t *testing.T) {
	v, c, _ := newVolumes(t)
	pvc, pv := newBoundClaim("web-tmp",
		v1.PersistentVolumeSource{HostPath: &v1.HostPathVolumeSource{Path: t.TempDir()}})
	tmp := newVolume("tmp", v1.VolumeSource{Ephemeral: &v1.EphemeralVolumeSource{}})
	pvc.OwnerReferences = []metav1.OwnerReference{
		*metav1.NewControllerRef(newPod("u1"), v1.SchemeGroupVersion.WithKind("Pod"))}
	c.Put(pvc, pv)
	if _, err := v.MountAll(t.Context(), newPod("u1", tmp)); err != nil {
		t.Error(err)
	}
	if _, err := v.MountAll(t.Context(), newPod("u2", tmp)); err == nil ||
		!strings.Contains(err.Error(), "PVC default/web-tmp was not created for pod default/web (pod is not owner)") {
		t.Errorf("for another pod of the name: %v", err)
	}
}
