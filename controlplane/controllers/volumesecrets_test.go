package controllers_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers"
	"keelson.dev/keelson/internal/virtual"
)

// locked returns an error for a call without the required secret.
func (d *drivers) locked(method string, request []byte) error {
	call := method[strings.LastIndex(method, "/")+1:]
	want, ok := d.keys[call]
	if !ok {
		return nil
	}
	q, ok := map[string]interface {
		proto.Message
		GetSecrets() map[string]string
	}{"CreateVolume": &csi.CreateVolumeRequest{}, "DeleteVolume": &csi.DeleteVolumeRequest{}, "ControllerExpandVolume": &csi.ControllerExpandVolumeRequest{},
		"ControllerModifyVolume": &csi.ControllerModifyVolumeRequest{}}[call]
	if !ok {
		return status.Errorf(codes.Internal, "%s has no lock", call)
	}
	if err := proto.Unmarshal(request, q); err != nil {
		return err
	}
	if got := q.GetSecrets()["key"]; got != want {
		return status.Errorf(codes.Unauthenticated, "%s with key %q", call, got)
	}
	return nil
}

// F110: each kind of driver call gets the Secret that the class of a volume names for it. A claim
// whose Secret does not exist yet waits, with an event. A volume is deleted with the data of its
// Secret; a missing Secret does not prevent that if the driver does not need it.
func TestSecretsOfVolumes(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{engine: controllers.Options{OwnIdentity: true, Resync: time.Minute}, quiet: true})
		w.driverOn("w1")
		w.drivers.set(func() {
			w.drivers.keys = map[string]string{"CreateVolume": "make", "DeleteVolume": "make", "ControllerExpandVolume": "grow", "ControllerModifyVolume": "change"}
		})
		params := map[string]string{"csi.storage.k8s.io/secret-name": "make", "csi.storage.k8s.io/secret-namespace": "${pvc.namespace}",
			"csi.storage.k8s.io/controller-expand-secret-name": "${pvc.name}-grow", "csi.storage.k8s.io/controller-expand-secret-namespace": "default",
			"csi.storage.k8s.io/controller-modify-secret-name": "change", "csi.storage.k8s.io/controller-modify-secret-namespace": "default"}
		yes := true
		w.create(&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "now"}, Provisioner: ownDriver, Parameters: params, AllowVolumeExpansion: &yes})
		w.create(&storagev1.VolumeAttributesClass{ObjectMeta: metav1.ObjectMeta{Name: "fast"}, DriverName: ownDriver, Parameters: map[string]string{"kind": "fast"}})
		secret := func(name, key string) {
			w.create(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}, Data: map[string][]byte{"key": []byte(key)}})
		}
		w.create(classed("data", "now", "1Gi"))
		w.event("ProvisioningFailed", `failed to provision volume: StorageClass "now": Secret default/make for the CSI driver: secrets "make" not found`)
		secret("make", "make")
		v := w.volumeOf("data")
		own := &corev1.SecretReference{Namespace: "default", Name: "make"}
		for name, ref := range map[string]*corev1.SecretReference{"attaching": v.Spec.CSI.ControllerPublishSecretRef, "staging": v.Spec.CSI.NodeStageSecretRef,
			"publishing": v.Spec.CSI.NodePublishSecretRef, "growing on nodes": v.Spec.CSI.NodeExpandSecretRef} {
			if ref == nil || *ref != *own {
				t.Errorf("the Secret for %s is %v", name, ref)
			}
		}
		w.wants("data", "2Gi")
		w.eventWith("VolumeResizeFailed", `Secret default/data-grow for the CSI driver: secrets "data-grow" not found`)
		secret("data-grow", "grow")
		w.claimIs("data", has("2Gi"))
		secret("change", "change")
		update(w, "data", func(c *corev1.PersistentVolumeClaim) {
			name := "fast"
			c.Spec.VolumeAttributesClassName = &name
		})
		w.claimIs("data", func(c *corev1.PersistentVolumeClaim) bool {
			return c.Status.CurrentVolumeAttributesClassName != nil && *c.Status.CurrentVolumeAttributesClassName == "fast"
		})
		w.create(classed("other", "now", "1Gi"))
		w.volumeOf("other")
		w.deleteClaim("data")
		w.eventually("one volume", func() error {
			if n := w.drivers.count(); n != 1 {
				return fmt.Errorf("there are %d", n)
			}
			return nil
		})
		if err := client.Delete[*corev1.Secret](w.ctx, w.admin, "default", "make", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.deleteClaim("other")
		w.eventWith("VolumeFailedDelete", `DeleteVolume with key ""`)
		w.drivers.set(func() { w.drivers.keys = nil })
		w.eventually("nothing is left", w.noVolumes)
	})
}

// A volume is created with the parameters with which it was started: the Secret by the annotations
// at that time, and the attributes, even if the first node has no capacity.
func TestWhatWasBegunIsKept(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{engine: controllers.Options{OwnIdentity: true, Resync: time.Minute}, quiet: true})
		w.driverOn("w1", "w2")
		w.drivers.set(func() { w.drivers.keys = map[string]string{"CreateVolume": "make"} })
		w.create(&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "now"}, Provisioner: ownDriver, Parameters: map[string]string{
			"csi.storage.k8s.io/provisioner-secret-name": "${pvc.annotations['key']}", "csi.storage.k8s.io/provisioner-secret-namespace": "default"}})
		w.create(&storagev1.VolumeAttributesClass{ObjectMeta: metav1.ObjectMeta{Name: "fast"}, DriverName: ownDriver, Parameters: map[string]string{"kind": "fast"}})
		c, fast := classed("data", "now", "1Gi"), "fast"
		c.Annotations, c.Spec.VolumeAttributesClassName = map[string]string{"key": "first"}, &fast
		w.create(c)
		w.event("ProvisioningFailed", `failed to provision volume: StorageClass "now": Secret default/first for the CSI driver: secrets "first" not found`)
		first, other := "w1", "w2"
		update(w, "data", func(c *corev1.PersistentVolumeClaim) {
			c.Annotations["key"] = "second"
			if strings.Contains(c.Annotations["keelson.dev/provisioning"], `"node":"w2"`) { // its capacity has been read
				first, other = other, first
			}
		})
		w.drivers.set(func() { w.drivers.full = map[string]bool{first: true} })
		w.create(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "first"}, Data: map[string][]byte{"key": []byte("make")}})
		w.event("ProvisioningFailed", `failed to provision volume: StorageClass "now": ResourceExhausted: node `+first+` is full`)
		time.Sleep(5 * time.Minute) // virtual time: until the nodes have reported their capacity
		v := w.volumeOf("data")
		if got := v.Annotations["volume.kubernetes.io/provisioner-deletion-secret-name"]; got != "first" {
			t.Errorf("it is deleted with Secret %q", got)
		}
		changed := 0
		w.drivers.set(func() { changed = w.drivers.asked })
		if m := w.drivers.get(v.Name); m == nil || m.node != other || m.kind != "fast" || changed > 0 {
			t.Errorf("the driver has %+v, changed %d times", m, changed)
		}
	})
}
