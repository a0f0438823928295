package volumeattributes_test

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
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
)

// attributes creates a VolumeAttributesClass of a driver.
func attributes(w *testcluster.Cluster, name, driver string) {
	w.T.Helper()
	w.CreateObject(&storagev1.VolumeAttributesClass{ObjectMeta: metav1.ObjectMeta{Name: name}, DriverName: driver,
		Parameters: map[string]string{"kind": name}})
}

func names(w *testcluster.Cluster, claim string, class *string) {
	w.T.Helper()
	testcluster.Update(w, claim, func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeAttributesClassName = class })
}

// modified expects a claim, its volume and the driver to have the attributes of a class, and
// nothing else.
func modified(w *testcluster.Cluster, claim, class string) {
	w.T.Helper()
	w.AwaitClaim(claim, func(c *corev1.PersistentVolumeClaim) bool {
		return ptr.Deref(c.Status.CurrentVolumeAttributesClassName, "") == class &&
			c.Status.ModifyVolumeStatus == nil && len(c.Status.Conditions) == 0
	})
	v := w.BoundVolume(claim)
	if got := ptr.Deref(v.Spec.VolumeAttributesClassName, ""); got != class {
		w.T.Errorf("volume %s has class %q, not %q", v.Name, got, class)
	}
	if m := w.Drivers.Volume(v.Name); m == nil || m.Attribute != class {
		w.T.Errorf("the driver has %+v, and not kind %q", m, class)
	}
}

// stands expects the status of a claim to have a state of modification.
func stands(
	w *testcluster.Cluster, claim, class string, state corev1.PersistentVolumeClaimModifyVolumeStatus, words string,
) {
	w.T.Helper()
	w.AwaitClaim(claim, func(c *corev1.PersistentVolumeClaim) bool {
		m := c.Status.ModifyVolumeStatus
		return m != nil && m.TargetVolumeAttributesClassName == class && m.Status == state &&
			(words == "" || slices.ContainsFunc(c.Status.Conditions,
				func(c corev1.PersistentVolumeClaimCondition) bool { return c.Message == words }))
	})
}

// F110: a claim's volume is created with the attributes of its class, and modified when the claim
// names another class. The claim's status reports problems, and the change can be reverted.
func TestVolumesGetAttributes(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{Engine: engine.Options{OwnIdentity: true,
			Resync: time.Minute}, NoMutationGuard: true})
		w.AddDriver("w1", "w2")
		w.CreateClass("now", storagev1.VolumeBindingImmediate, corev1.PersistentVolumeReclaimDelete)
		c := testcluster.NewClassClaim("data", "now", "1Gi")
		c.Spec.VolumeAttributesClassName = ptr.To("silver")
		w.CreateObject(c)
		w.AwaitEvent("ProvisioningFailed", `failed to provision volume: VolumeAttributesClass "silver" does not `+
			`exist: create it, or set another class in the claim`)
		attributes(w, "silver", testcluster.OwnDriver)
		modified(w, "data", "silver")
		attributes(w, "gold", testcluster.OwnDriver)
		names(w, "data", ptr.To("gold"))
		modified(w, "data", "gold")
		w.AwaitEvent("VolumeModifySuccessful", fmt.Sprintf("volume %s has the attributes of VolumeAttributesClass gold",
			w.BoundVolume("data").Name))

		names(w, "data", ptr.To("bronze"))
		stands(w, "data", "bronze", corev1.PersistentVolumeClaimModifyVolumePending, "")
		w.AwaitEvent("VolumeModifyFailed", `VolumeAttributesClass "bronze" does not exist: create it, or set another `+
			`class in the claim`)
		attributes(w, "bronze", testcluster.OwnDriver)
		modified(w, "data", "bronze")

		attributes(w, "impossible", testcluster.OwnDriver)
		names(w, "data", ptr.To("impossible"))
		stands(w, "data", "impossible", corev1.PersistentVolumeClaimModifyVolumeInfeasible,
			"InvalidArgument: there is no such kind")
		before := 0
		w.Drivers.Change(func() { before = w.Drivers.ModifyCalls })
		time.Sleep(11 * time.Minute)
		w.Drivers.Change(func() {
			if n := w.Drivers.ModifyCalls - before; n < 1 || n > 3 {
				t.Errorf("in eleven minutes a driver that cannot was asked %d times", n)
			}
		})
		names(w, "data", ptr.To("bronze"))
		modified(w, "data", "bronze")

		attributes(w, "theirs", "other.example.com")
		names(w, "data", ptr.To("theirs"))
		stands(w, "data", "theirs", corev1.PersistentVolumeClaimModifyVolumeInfeasible,
			"InvalidArgument: VolumeAttributesClass theirs belongs to CSI driver other.example.com, and the volume to "+
				testcluster.OwnDriver+": choose a class of that driver")
		names(w, "data", ptr.To("gold"))
		modified(w, "data", "gold")

		w.Drivers.Change(func() { w.Drivers.NoModify = true })
		names(w, "data", ptr.To("silver"))
		stands(w, "data", "silver", corev1.PersistentVolumeClaimModifyVolumeInfeasible,
			"Unimplemented: CSI driver "+testcluster.OwnDriver+
				" cannot apply a VolumeAttributesClass: it lacks the capability MODIFY_VOLUME; remove "+
				"the class from the "+
				"claim, or use another driver")
		refused := testcluster.NewClassClaim("refused", "now", "1Gi")
		refused.Spec.VolumeAttributesClassName = ptr.To("gold")
		w.CreateObject(refused)
		w.AwaitEvent("ProvisioningFailed", "failed to provision volume: Unimplemented: CSI driver "+
			testcluster.OwnDriver+" cannot apply a VolumeAttributesClass: it lacks the capability MODIFY_VOLUME; "+
			"remove the class from the claim, or use another driver")
		w.DeleteClaim("refused")
		w.Drivers.Change(func() { w.Drivers.NoModify = false })
		names(w, "data", ptr.To("gold"))
		modified(w, "data", "gold")
		w.DeleteClaim("data")
		w.Eventually("nothing is left", w.CheckNoVolumes)
	})
}

// A driver call whose result is unknown is repeated until it has a result, whatever class the claim
// names by then. A claim without attributes whose class was refused stays without attributes.
func TestAttributesUnderWay(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{Engine: engine.Options{OwnIdentity: true,
			Resync: time.Minute}, NoMutationGuard: true})
		w.AddDriver("w1")
		w.CreateClass("now", storagev1.VolumeBindingImmediate, corev1.PersistentVolumeReclaimDelete)
		for _, name := range []string{"silver", "gold", "impossible"} {
			attributes(w, name, testcluster.OwnDriver)
		}
		w.CreateObject(testcluster.NewClassClaim("data", "now", "1Gi"))
		w.AwaitBound("data")
		w.Drivers.Change(func() { w.Drivers.Faults.ModifyError = status.Error(codes.Unavailable, "not now") })
		names(w, "data", ptr.To("silver"))
		stands(w, "data", "silver", corev1.PersistentVolumeClaimModifyVolumeInProgress,
			`Modifying volume to "silver" is still in progress.`)
		names(w, "data", ptr.To("gold"))
		time.Sleep(5 * time.Minute)
		stands(w, "data", "silver", corev1.PersistentVolumeClaimModifyVolumeInProgress, "Unavailable: not now")
		w.Drivers.Change(func() { w.Drivers.Faults.ModifyError = nil })
		w.EventuallyWithin(10*time.Minute, "both", func() error {
			c, err := client.Get[*corev1.PersistentVolumeClaim](w.Ctx, w.Admin, "default", "data")
			if err == nil && ptr.Deref(c.Status.CurrentVolumeAttributesClassName, "") != "gold" {
				err = fmt.Errorf("%+v", c.Status)
			}
			return err
		})
		modified(w, "data", "gold")
		w.AwaitEvent("VolumeModifySuccessful",
			fmt.Sprintf("volume %s has the attributes of VolumeAttributesClass silver", w.BoundVolume("data").Name))

		w.CreateObject(testcluster.NewClassClaim("plain", "now", "1Gi"))
		w.AwaitBound("plain")
		names(w, "plain", ptr.To("impossible"))
		stands(w, "plain", "impossible", corev1.PersistentVolumeClaimModifyVolumeInfeasible, "")
		names(w, "plain", nil)
		modified(w, "plain", "")
		w.AwaitEvent("VolumeModifyCanceled", fmt.Sprintf("the modification of volume %s is canceled",
			w.BoundVolume("plain").Name))
	})
}

// Volumes of a driver with its own resizer are left to the resizer, and an event of the claim
// reports that. A manually created volume is only bound to claims of its class, and a class that a
// claim names stays.
func TestAttributesOfOthers(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{Engine: engine.Options{OwnIdentity: true,
			Resync: time.Minute}, NoMutationGuard: true})
		w.AddDriver("w1")
		attributes(w, "gold", "other.example.com")
		attributes(w, "silver", "other.example.com")
		v, c := testcluster.NewDriverVolume("v", "other.example.com"), testcluster.NewClaim("data", "1Gi")
		v.Spec.VolumeAttributesClassName = ptr.To("gold")
		w.CreateObject(v)
		plain := testcluster.NewClaim("plain", "1Gi")
		plain.Spec.VolumeName = "v"
		w.CreateObject(plain)
		w.AwaitEvent("VolumeMismatch", `Cannot bind to requested volume "v": volumeAttributesClassName does not match`)
		c.Spec.VolumeAttributesClassName = ptr.To("gold")
		w.CreateObject(c)
		w.AwaitBound("data")
		w.AwaitClaim("data", func(c *corev1.PersistentVolumeClaim) bool {
			return ptr.Deref(c.Status.CurrentVolumeAttributesClassName, "") == "gold"
		})
		names(w, "data", ptr.To("silver"))
		w.AwaitEvent("ExternalModifying", `waiting for an external controller to apply to volume v `+
			`VolumeAttributesClass "silver": the controller of CSI driver other.example.com`)
		for _, name := range []string{"gold", "silver"} {
			if err := client.Delete[*storagev1.VolumeAttributesClass](w.Ctx, w.Admin, "", name,
				metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(5 * time.Minute)
		for _, name := range []string{"gold", "silver"} { // the volume has one class, and the claim names the other
			if err := testcluster.CheckGone[*storagev1.VolumeAttributesClass](w, name); err == nil {
				t.Errorf("class %s went though it is in use", name)
			}
		}
		w.DeleteClaim("data")
		w.Eventually("silver", func() error {
			return testcluster.CheckGone[*storagev1.VolumeAttributesClass](w, "silver")
		})
		if err := client.Delete[*corev1.PersistentVolume](w.Ctx, w.Admin, "", "v", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.Eventually("gold", func() error { return testcluster.CheckGone[*storagev1.VolumeAttributesClass](w, "gold") })
	})
}

// Regardless of lost calls, crashes and leader changes, at the end a volume has the attributes that
// its claim named last.
func TestAttributesUnderFailures(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w, replaced := testcluster.LeadWithDriver(t,
			testcluster.Options{NoMutationGuard: true,
				ChangeController: testcluster.FailReconciles("volume-attributes-controller", 2, time.Millisecond)},
			engine.Options{Resync: time.Second}, "w1")
		w.CreateObject(testcluster.NewClassClaim("data", "now", "1Gi"))
		w.AwaitBound("data")
		w.Drivers.Change(func() { w.Drivers.Faults.LossSource = rand.New(rand.NewPCG(7, 8)) })
		r := rand.New(rand.NewPCG(9, 10))
		for i := range 12 {
			name := fmt.Sprint("k", i)
			attributes(w, name, testcluster.OwnDriver)
			names(w, "data", &name)
			time.Sleep(time.Duration(r.IntN(20)) * time.Millisecond)
			if i%2 == 1 {
				replaced()
			}
			if i%4 == 3 {
				w.EventuallyWithin(5*time.Minute, name, func() error {
					c, err := client.Get[*corev1.PersistentVolumeClaim](w.Ctx, w.Admin, "default", "data")
					if err == nil && (ptr.Deref(c.Status.CurrentVolumeAttributesClassName, "") != name ||
						c.Status.ModifyVolumeStatus != nil) {
						err = fmt.Errorf("%+v", c.Status)
					}
					return err
				})
				modified(w, "data", name)
			}
		}
	})
}
