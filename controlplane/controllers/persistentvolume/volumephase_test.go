package persistentvolume_test

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
)

// A volume with reclaim policy Recycle has no recycler: when its claim is deleted it fails, with an
// event, and its data stays. Kubernetes reports a volume without a recycler in the same words. F110
func TestVolumeWithPolicyRecycleFails(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{NoMutationGuard: true})
		none := ""
		w.CreateObject(&corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "disk"},
			Spec: corev1.PersistentVolumeSpec{
				Capacity:                      corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")},
				AccessModes:                   []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
				PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRecycle,
				PersistentVolumeSource: corev1.PersistentVolumeSource{NFS: &corev1.NFSVolumeSource{
					Server: "192.0.2.1", Path: "/export"}},
			}})
		c := testcluster.NewClassClaim("data", "", "1Gi")
		c.Spec.StorageClassName = &none
		w.CreateObject(c)
		if v := w.BoundVolume("data"); v.Name != "disk" {
			t.Fatalf("claim data is bound to %s", v.Name)
		}
		w.DeleteClaim("data")
		w.Eventually("the volume has failed", func() error {
			v, err := client.Get[*corev1.PersistentVolume](w.Ctx, w.Admin, "", "disk")
			if err != nil {
				return err
			}
			if s := v.Status; s.Phase != corev1.VolumeFailed || s.Reason != "VolumeFailedRecycle" ||
				s.Message != "No recycler plugin found for the volume!" {
				return fmt.Errorf("%+v", s)
			}
			return nil
		})
		w.AwaitEvent("VolumeFailedRecycle", "No recycler plugin found for the volume!")
	})
}

// F110: a volume has the time of its last phase transition, which changes only with the phase.
func TestVolumePhasesHaveATime(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{NoMutationGuard: true})
		w.AddDriver("w1")
		w.CreateClass("kept", storagev1.VolumeBindingImmediate, corev1.PersistentVolumeReclaimRetain)
		w.CreateObject(testcluster.NewClassClaim("data", "kept", "1Gi"))
		name := w.BoundVolume("data").Name
		since := func(phase corev1.PersistentVolumePhase) (at time.Time) {
			t.Helper()
			w.Eventually("volume is "+string(phase), func() error {
				v, err := client.Get[*corev1.PersistentVolume](w.Ctx, w.Admin, "", name)
				if err == nil && (v.Status.Phase != phase || v.Status.LastPhaseTransitionTime == nil) {
					err = fmt.Errorf("volume is %+v", v.Status)
				}
				if err == nil {
					at = v.Status.LastPhaseTransitionTime.Time
				}
				return err
			})
			return at
		}
		bound := since(corev1.VolumeBound)
		time.Sleep(time.Hour)
		testcluster.Update(w, name, func(v *corev1.PersistentVolume) { v.Labels = map[string]string{"changed": "yes"} })
		time.Sleep(time.Hour)
		if again := since(corev1.VolumeBound); !again.Equal(bound) {
			t.Errorf("it is bound since %s, and then since %s", bound, again)
		}
		w.DeleteClaim("data")
		if released := since(corev1.VolumeReleased); released.Sub(bound) < 2*time.Hour {
			t.Errorf("it is bound since %s and released since %s", bound, released)
		}
	})
}
