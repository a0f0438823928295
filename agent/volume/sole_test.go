package volume

import (
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// A claim of ReadWriteOncePod is one pod's until its volumes are unmounted, also for an agent that begins anew; two pods
// that come at once do not both get it.
func TestOnePodPerClaim(t *testing.T) {
	v, c, _ := newVolumes(t)
	pvc, pv := bound("sole", v1.PersistentVolumeSource{HostPath: &v1.HostPathVolumeSource{Path: t.TempDir()}})
	pvc.UID, pvc.Spec.AccessModes = "c1", []v1.PersistentVolumeAccessMode{v1.ReadWriteOncePod}
	pv.Spec.ClaimRef.UID = "c1"
	c.Put(pvc, pv)
	mount := func(v *Volumes, uid string) error {
		_, err := v.MountAll(t.Context(), pod(uid, claimed("sole"), volume("again", claimed("sole").VolumeSource)))
		return err
	}
	const taken = `persistentvolumeclaim "default/sole" uses the ReadWriteOncePod access mode and is already in use by another pod`
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
	again := New(v.cfg)
	must(t, mount(again, holder))
	if err := mount(again, other); err == nil || !strings.Contains(err.Error(), taken) {
		t.Errorf("after the agent began anew: %v", err)
	}
	must(t, again.UnmountAll(t.Context(), pod(holder).UID))
	must(t, mount(again, other))
	must(t, again.UnmountAll(t.Context(), pod(other).UID))
}

// The claim of an ephemeral volume is mounted for the pod that it was made for, and for no other of its name.
func TestEphemeralVolumeIsThePodsOwn(t *testing.T) {
	v, c, _ := newVolumes(t)
	pvc, pv := bound("web-tmp", v1.PersistentVolumeSource{HostPath: &v1.HostPathVolumeSource{Path: t.TempDir()}})
	tmp := volume("tmp", v1.VolumeSource{Ephemeral: &v1.EphemeralVolumeSource{}})
	pvc.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(pod("u1"), v1.SchemeGroupVersion.WithKind("Pod"))}
	c.Put(pvc, pv)
	if _, err := v.MountAll(t.Context(), pod("u1", tmp)); err != nil {
		t.Error(err)
	}
	if _, err := v.MountAll(t.Context(), pod("u2", tmp)); err == nil || !strings.Contains(err.Error(), "PVC default/web-tmp was not created for pod default/web (pod is not owner)") {
		t.Errorf("for another pod of the name: %v", err)
	}
}
