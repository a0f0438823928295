package controllers_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers"
	"keelson.dev/keelson/internal/virtual"
)

// attributes creates a VolumeAttributesClass of a driver.
func (w *world) attributes(name, driver string) {
	w.t.Helper()
	w.create(&storagev1.VolumeAttributesClass{ObjectMeta: metav1.ObjectMeta{Name: name}, DriverName: driver, Parameters: map[string]string{"kind": name}})
}

func (w *world) names(claim string, class *string) {
	w.t.Helper()
	update(w, claim, func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeAttributesClassName = class })
}

// modified expects a claim, its volume and the driver to have the attributes of a class, and
// nothing else.
func (w *world) modified(claim, class string) {
	w.t.Helper()
	w.claimIs(claim, func(c *corev1.PersistentVolumeClaim) bool {
		return ptr.Deref(c.Status.CurrentVolumeAttributesClassName, "") == class && c.Status.ModifyVolumeStatus == nil && len(c.Status.Conditions) == 0
	})
	v := w.volumeOf(claim)
	if got := ptr.Deref(v.Spec.VolumeAttributesClassName, ""); got != class {
		w.t.Errorf("volume %s has class %q, not %q", v.Name, got, class)
	}
	if m := w.drivers.get(v.Name); m == nil || m.kind != class {
		w.t.Errorf("the driver has %+v, and not kind %q", m, class)
	}
}

// stands expects the status of a claim to have a state of modification.
func (w *world) stands(claim, class string, state corev1.PersistentVolumeClaimModifyVolumeStatus, words string) {
	w.t.Helper()
	w.claimIs(claim, func(c *corev1.PersistentVolumeClaim) bool {
		m := c.Status.ModifyVolumeStatus
		return m != nil && m.TargetVolumeAttributesClassName == class && m.Status == state &&
			(words == "" || slices.ContainsFunc(c.Status.Conditions, func(c corev1.PersistentVolumeClaimCondition) bool { return c.Message == words }))
	})
}

// F110: a claim's volume is created with the attributes of its class, and modified when the claim
// names another class. The claim's status reports problems, and the change can be reverted.
func TestVolumesGetAttributes(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{engine: controllers.Options{OwnIdentity: true, Resync: time.Minute}, quiet: true})
		w.driverOn("w1", "w2")
		w.class("now", storagev1.VolumeBindingImmediate, corev1.PersistentVolumeReclaimDelete)
		c := classed("data", "now", "1Gi")
		c.Spec.VolumeAttributesClassName = ptr.To("silver")
		w.create(c)
		w.event("ProvisioningFailed", `failed to provision volume: VolumeAttributesClass "silver" does not exist: make it, or have the claim name another`)
		w.attributes("silver", ownDriver)
		w.modified("data", "silver")
		w.attributes("gold", ownDriver)
		w.names("data", ptr.To("gold"))
		w.modified("data", "gold")
		w.event("VolumeModifySuccessful", fmt.Sprintf("volume %s has the attributes of VolumeAttributesClass gold", w.volumeOf("data").Name))

		w.names("data", ptr.To("bronze"))
		w.stands("data", "bronze", corev1.PersistentVolumeClaimModifyVolumePending, "")
		w.event("VolumeModifyFailed", `VolumeAttributesClass "bronze" does not exist: make it, or have the claim name another`)
		w.attributes("bronze", ownDriver)
		w.modified("data", "bronze")

		w.attributes("impossible", ownDriver)
		w.names("data", ptr.To("impossible"))
		w.stands("data", "impossible", corev1.PersistentVolumeClaimModifyVolumeInfeasible, "InvalidArgument: there is no such kind")
		before := 0
		w.drivers.set(func() { before = w.drivers.asked })
		time.Sleep(11 * time.Minute)
		w.drivers.set(func() {
			if n := w.drivers.asked - before; n < 1 || n > 3 {
				t.Errorf("in eleven minutes a driver that cannot was asked %d times", n)
			}
		})
		w.names("data", ptr.To("bronze"))
		w.modified("data", "bronze")

		w.attributes("theirs", "other.example.com")
		w.names("data", ptr.To("theirs"))
		w.stands("data", "theirs", corev1.PersistentVolumeClaimModifyVolumeInfeasible,
			"InvalidArgument: VolumeAttributesClass theirs is of CSI driver other.example.com, and the volume is of "+ownDriver+": name a class of that driver")
		w.names("data", ptr.To("gold"))
		w.modified("data", "gold")

		w.drivers.set(func() { w.drivers.rigid = true })
		w.names("data", ptr.To("silver"))
		w.stands("data", "silver", corev1.PersistentVolumeClaimModifyVolumeInfeasible, "Unimplemented: CSI driver "+ownDriver+
			" gives volumes no attributes of a VolumeAttributesClass: it does not have the capability MODIFY_VOLUME; name no class, or use a driver that has it")
		refused := classed("refused", "now", "1Gi")
		refused.Spec.VolumeAttributesClassName = ptr.To("gold")
		w.create(refused)
		w.event("ProvisioningFailed", "failed to provision volume: Unimplemented: CSI driver "+ownDriver+" gives volumes no attributes of a VolumeAttributesClass: it does not have the capability MODIFY_VOLUME; name no class, or use a driver that has it")
		w.deleteClaim("refused")
		w.drivers.set(func() { w.drivers.rigid = false })
		w.names("data", ptr.To("gold"))
		w.modified("data", "gold")
		w.deleteClaim("data")
		w.eventually("nothing is left", w.noVolumes)
	})
}

// A driver call whose result is unknown is repeated until it has a result, whatever class the claim
// names by then. A claim without attributes whose class was refused stays without attributes.
func TestAttributesUnderWay(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{engine: controllers.Options{OwnIdentity: true, Resync: time.Minute}, quiet: true})
		w.driverOn("w1")
		w.class("now", storagev1.VolumeBindingImmediate, corev1.PersistentVolumeReclaimDelete)
		for _, name := range []string{"silver", "gold", "impossible"} {
			w.attributes(name, ownDriver)
		}
		w.create(classed("data", "now", "1Gi"))
		w.boundTo("data")
		w.drivers.set(func() { w.drivers.modify = status.Error(codes.Unavailable, "not now") })
		w.names("data", ptr.To("silver"))
		w.stands("data", "silver", corev1.PersistentVolumeClaimModifyVolumeInProgress, `Modifying volume to "silver" is still in progress.`)
		w.names("data", ptr.To("gold"))
		time.Sleep(5 * time.Minute)
		w.stands("data", "silver", corev1.PersistentVolumeClaimModifyVolumeInProgress, "Unavailable: not now")
		w.drivers.set(func() { w.drivers.modify = nil })
		w.within(10*time.Minute, "both", func() error {
			c, err := client.Get[*corev1.PersistentVolumeClaim](w.ctx, w.admin, "default", "data")
			if err == nil && ptr.Deref(c.Status.CurrentVolumeAttributesClassName, "") != "gold" {
				err = fmt.Errorf("%+v", c.Status)
			}
			return err
		})
		w.modified("data", "gold")
		w.event("VolumeModifySuccessful", fmt.Sprintf("volume %s has the attributes of VolumeAttributesClass silver", w.volumeOf("data").Name))

		w.create(classed("plain", "now", "1Gi"))
		w.boundTo("plain")
		w.names("plain", ptr.To("impossible"))
		w.stands("plain", "impossible", corev1.PersistentVolumeClaimModifyVolumeInfeasible, "")
		w.names("plain", nil)
		w.modified("plain", "")
		w.event("VolumeModifyCanceled", fmt.Sprintf("volume %s stays as it is", w.volumeOf("plain").Name))
	})
}

// Volumes of a driver with its own resizer are left to the resizer, and an event of the claim
// reports that. A manually created volume is only bound to claims of its class, and a class that a
// claim names stays.
func TestAttributesOfOthers(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{engine: controllers.Options{OwnIdentity: true, Resync: time.Minute}, quiet: true})
		w.driverOn("w1")
		w.attributes("gold", "other.example.com")
		w.attributes("silver", "other.example.com")
		v, c := driven("v", "other.example.com"), claim("data", "1Gi")
		v.Spec.VolumeAttributesClassName = ptr.To("gold")
		w.create(v)
		plain := claim("plain", "1Gi")
		plain.Spec.VolumeName = "v"
		w.create(plain)
		w.event("VolumeMismatch", `Cannot bind to requested volume "v": volumeAttributesClassName does not match`)
		c.Spec.VolumeAttributesClassName = ptr.To("gold")
		w.create(c)
		w.boundTo("data")
		w.claimIs("data", func(c *corev1.PersistentVolumeClaim) bool {
			return ptr.Deref(c.Status.CurrentVolumeAttributesClassName, "") == "gold"
		})
		w.names("data", ptr.To("silver"))
		w.event("ExternalModifying", `waiting for an external controller to give volume v the attributes of VolumeAttributesClass "silver": that of CSI driver other.example.com`)
		for _, name := range []string{"gold", "silver"} {
			if err := client.Delete[*storagev1.VolumeAttributesClass](w.ctx, w.admin, "", name, metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(5 * time.Minute)
		for _, name := range []string{"gold", "silver"} { // the volume has one class, and the claim names the other
			if err := gone[*storagev1.VolumeAttributesClass](w, name); err == nil {
				t.Errorf("class %s went though it is in use", name)
			}
		}
		w.deleteClaim("data")
		w.eventually("silver", func() error { return gone[*storagev1.VolumeAttributesClass](w, "silver") })
		if err := client.Delete[*corev1.PersistentVolume](w.ctx, w.admin, "", "v", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.eventually("gold", func() error { return gone[*storagev1.VolumeAttributesClass](w, "gold") })
	})
}

// Regardless of lost calls, crashes and leader changes, at the end a volume has the attributes that
// its claim named last.
func TestAttributesUnderFailures(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w, replaced := led(t, options{quiet: true, change: failing("volume-attributes-controller", 2, time.Millisecond)}, controllers.Options{Resync: time.Second}, "w1")
		w.create(classed("data", "now", "1Gi"))
		w.boundTo("data")
		w.drivers.set(func() { w.drivers.flaky = rand.New(rand.NewPCG(7, 8)) })
		r := rand.New(rand.NewPCG(9, 10))
		for i := range 12 {
			name := fmt.Sprint("k", i)
			w.attributes(name, ownDriver)
			w.names("data", &name)
			time.Sleep(time.Duration(r.IntN(20)) * time.Millisecond)
			if i%2 == 1 {
				replaced()
			}
			if i%4 == 3 {
				w.within(5*time.Minute, name, func() error {
					c, err := client.Get[*corev1.PersistentVolumeClaim](w.ctx, w.admin, "default", "data")
					if err == nil && (ptr.Deref(c.Status.CurrentVolumeAttributesClassName, "") != name || c.Status.ModifyVolumeStatus != nil) {
						err = fmt.Errorf("%+v", c.Status)
					}
					return err
				})
				w.modified("data", name)
			}
		}
	})
}
