package volumeprovision_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
)

// F110: each kind of driver call gets the Secret that the class of a volume names for it. A claim
// whose Secret does not exist yet waits, with an event. A volume is deleted with the data of its
// Secret; a missing Secret does not prevent that if the driver does not need it.
func TestSecretsOfVolumes(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{Engine: engine.Options{OwnIdentity: true,
			Resync: time.Minute}, NoMutationGuard: true})
		w.AddDriver("w1")
		w.Drivers.Change(func() {
			w.Drivers.Secrets = map[string]string{"CreateVolume": "make", "DeleteVolume": "make",
				"ControllerExpandVolume": "grow", "ControllerModifyVolume": "change"}
		})
		params := map[string]string{"csi.storage.k8s.io/secret-name": "make",
			"csi.storage.k8s.io/secret-namespace":                   "${pvc.namespace}",
			"csi.storage.k8s.io/controller-expand-secret-name":      "${pvc.name}-grow",
			"csi.storage.k8s.io/controller-expand-secret-namespace": "default",
			"csi.storage.k8s.io/controller-modify-secret-name":      "change",
			"csi.storage.k8s.io/controller-modify-secret-namespace": "default"}
		yes := true
		w.CreateObject(&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "now"},
			Provisioner: testcluster.OwnDriver, Parameters: params, AllowVolumeExpansion: &yes})
		w.CreateObject(&storagev1.VolumeAttributesClass{ObjectMeta: metav1.ObjectMeta{Name: "fast"},
			DriverName: testcluster.OwnDriver, Parameters: map[string]string{"kind": "fast"}})
		secret := func(name, key string) {
			w.CreateObject(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
				Data: map[string][]byte{"key": []byte(key)}})
		}
		w.CreateObject(testcluster.NewClassClaim("data", "now", "1Gi"))
		w.AwaitEvent("ProvisioningFailed", `failed to provision volume: StorageClass "now": Secret default/make for `+
			`the CSI driver: secrets "make" not found`)
		secret("make", "make")
		v := w.BoundVolume("data")
		own := &corev1.SecretReference{Namespace: "default", Name: "make"}
		for name, ref := range map[string]*corev1.SecretReference{"attaching": v.Spec.CSI.ControllerPublishSecretRef,
			"staging":    v.Spec.CSI.NodeStageSecretRef,
			"publishing": v.Spec.CSI.NodePublishSecretRef, "growing on nodes": v.Spec.CSI.NodeExpandSecretRef} {
			if ref == nil || *ref != *own {
				t.Errorf("the Secret for %s is %v", name, ref)
			}
		}
		w.RequestSize("data", "2Gi")
		w.AwaitEventContaining("VolumeResizeFailed",
			`Secret default/data-grow for the CSI driver: secrets "data-grow" not found`)
		secret("data-grow", "grow")
		w.AwaitClaim("data", testcluster.HasCapacity("2Gi"))
		secret("change", "change")
		testcluster.Update(w, "data", func(c *corev1.PersistentVolumeClaim) {
			name := "fast"
			c.Spec.VolumeAttributesClassName = &name
		})
		w.AwaitClaim("data", func(c *corev1.PersistentVolumeClaim) bool {
			return c.Status.CurrentVolumeAttributesClassName != nil &&
				*c.Status.CurrentVolumeAttributesClassName == "fast"
		})
		w.CreateObject(testcluster.NewClassClaim("other", "now", "1Gi"))
		w.BoundVolume("other")
		w.DeleteClaim("data")
		w.Eventually("one volume", func() error {
			if n := w.Drivers.CountVolumes(); n != 1 {
				return fmt.Errorf("there are %d", n)
			}
			return nil
		})
		if err := client.Delete[*corev1.Secret](w.Ctx, w.Admin, "default", "make", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.DeleteClaim("other")
		w.AwaitEventContaining("VolumeFailedDelete", `DeleteVolume with key ""`)
		w.Drivers.Change(func() { w.Drivers.Secrets = nil })
		w.Eventually("nothing is left", w.CheckNoVolumes)
	})
}

// A volume is created with the parameters with which it was started: the Secret by the annotations
// at that time, and the attributes, even if the first node has no capacity.
func TestWhatWasBegunIsKept(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{Engine: engine.Options{OwnIdentity: true,
			Resync: time.Minute}, NoMutationGuard: true})
		w.AddDriver("w1", "w2")
		w.Drivers.Change(func() { w.Drivers.Secrets = map[string]string{"CreateVolume": "make"} })
		w.CreateObject(&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "now"},
			Provisioner: testcluster.OwnDriver, Parameters: map[string]string{
				"csi.storage.k8s.io/provisioner-secret-name":      "${pvc.annotations['key']}",
				"csi.storage.k8s.io/provisioner-secret-namespace": "default"}})
		w.CreateObject(&storagev1.VolumeAttributesClass{ObjectMeta: metav1.ObjectMeta{Name: "fast"},
			DriverName: testcluster.OwnDriver, Parameters: map[string]string{"kind": "fast"}})
		c, fast := testcluster.NewClassClaim("data", "now", "1Gi"), "fast"
		c.Annotations, c.Spec.VolumeAttributesClassName = map[string]string{"key": "first"}, &fast
		w.CreateObject(c)
		w.AwaitEvent("ProvisioningFailed", `failed to provision volume: StorageClass "now": Secret default/first for `+
			`the CSI driver: secrets "first" not found`)
		first, other := "w1", "w2"
		testcluster.Update(w, "data", func(c *corev1.PersistentVolumeClaim) {
			c.Annotations["key"] = "second"
			if strings.Contains(c.Annotations["keelson.dev/provisioning"], `"node":"w2"`) {
				// its capacity has been read
				first, other = other, first
			}
		})
		w.Drivers.Change(func() { w.Drivers.Faults.FullNodes = map[string]bool{first: true} })
		w.CreateObject(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "first"},
			Data: map[string][]byte{"key": []byte("make")}})
		w.AwaitEvent("ProvisioningFailed", `failed to provision volume: StorageClass "now": ResourceExhausted: node `+
			first+` is full`)
		time.Sleep(5 * time.Minute) // virtual time: until the nodes have reported their capacity
		v := w.BoundVolume("data")
		if got := v.Annotations["volume.kubernetes.io/provisioner-deletion-secret-name"]; got != "first" {
			t.Errorf("it is deleted with Secret %q", got)
		}
		changed := 0
		w.Drivers.Change(func() { changed = w.Drivers.ModifyCalls })
		if m := w.Drivers.Volume(v.Name); m == nil || m.Node != other || m.Attribute != "fast" || changed > 0 {
			t.Errorf("the driver has %+v, changed %d times", m, changed)
		}
	})
}
