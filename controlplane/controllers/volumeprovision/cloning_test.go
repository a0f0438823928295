package volumeprovision_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
)

const cloningProtection = "provisioner.storage.kubernetes.io/cloning-protection"

// copyOf creates a claim that clones another claim's volume.
func copyOf(w *testcluster.Cluster, name, class, source string) {
	w.T.Helper()
	c := testcluster.NewClassClaim(name, class, "1Gi")
	c.Spec.DataSource = &corev1.TypedLocalObjectReference{Kind: "PersistentVolumeClaim", Name: source}
	w.CreateObject(c)
}

func held(w *testcluster.Cluster, name, finalizer string, want bool) {
	w.T.Helper()
	w.EventuallyWithin(time.Minute, name+" with or without "+finalizer, func() error {
		c, err := client.Get[*corev1.PersistentVolumeClaim](w.Ctx, w.Admin, "default", name)
		if err == nil && slices.Contains(c.Finalizers, finalizer) != want {
			err = fmt.Errorf("it has %q", c.Finalizers)
		}
		return err
	})
}

// F110: a claim that is deleted while its volume is being cloned stays until the clone is created,
// even across a change of leader, and is deleted after that. A claim that is not deleted loses its
// protection.
func TestClaimsStayWhileTheyAreCopied(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w, replaced := testcluster.LeadWithDriver(t, testcluster.Options{NoMutationGuard: true},
			engine.Options{OwnIdentity: true, Resync: time.Minute}, "w1")
		w.CreateObject(testcluster.NewClassClaim("data", "now", "1Gi"))
		w.AwaitBound("data")
		copyOf(w, "first", "now", "data")
		w.AwaitBound("first")
		held(w, "data", cloningProtection, false)

		w.Drivers.Change(func() { w.Drivers.Faults.CloneError = status.Error(codes.Aborted, "it is being copied") })
		copyOf(w, "second", "now", "data")
		held(w, "second", "keelson.dev/provisioning", true)
		held(w, "data", cloningProtection, true)
		w.DeleteClaim("data")
		time.Sleep(2 * time.Minute)
		replaced()
		time.Sleep(5 * time.Minute)
		held(w, "data", cloningProtection, true)
		copyOf(w, "late", "now", "data")
		w.AwaitEvent("ProvisioningFailed", "failed to provision volume: PersistentVolumeClaim data is being deleted")
		w.Drivers.Change(func() { w.Drivers.Faults.CloneError = nil })
		w.EventuallyWithin(10*time.Minute, "the copy", func() error {
			c, err := client.Get[*corev1.PersistentVolumeClaim](w.Ctx, w.Admin, "default", "second")
			if err == nil && c.Status.Phase != corev1.ClaimBound {
				err = fmt.Errorf("it is %s", c.Status.Phase)
			}
			return err
		})
		w.EventuallyWithin(time.Minute, "what was copied goes", func() error {
			return testcluster.CheckGone[*corev1.PersistentVolumeClaim](w, "data")
		})
		if m := w.Drivers.Volume(w.BoundVolume("second").Name); m == nil || m.Source == "" {
			t.Errorf("the copy is %+v", m)
		}
	})
}

// An abandoned clone releases its source. A source whose provisioner is another program keeps that
// program's finalizer.
func TestCopiesThatAreGivenUp(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{Engine: engine.Options{OwnIdentity: true,
			Resync: time.Minute}, NoMutationGuard: true})
		w.AddDriver("w1")
		w.CreateClass("now", storagev1.VolumeBindingImmediate, corev1.PersistentVolumeReclaimDelete)
		w.CreateObject(testcluster.NewClassClaim("data", "now", "1Gi"))
		w.AwaitBound("data")
		w.Drivers.Change(func() { w.Drivers.Faults.CloneError = status.Error(codes.Internal, "not today") })
		copyOf(w, "copy", "now", "data")
		held(w, "copy", "keelson.dev/provisioning", true)
		held(w, "data", cloningProtection, true)
		w.DeleteClaim("data")
		w.Drivers.Change(func() { w.Drivers.Faults.CloneError = status.Error(codes.FailedPrecondition, "never") })
		w.DeleteClaim("copy")
		w.EventuallyWithin(10*time.Minute, "both go", func() error {
			return errors.Join(testcluster.CheckGone[*corev1.PersistentVolumeClaim](w, "copy"),
				testcluster.CheckGone[*corev1.PersistentVolumeClaim](w, "data"))
		})
		w.EventuallyWithin(10*time.Minute, "nothing is left", w.CheckNoVolumes)

		// The finalizer is removed by a user, and the source with it: the clone has not started
		// then.
		w.Drivers.Change(func() { w.Drivers.Faults.CloneError = status.Error(codes.Aborted, "it is being copied") })
		w.CreateObject(testcluster.NewClassClaim("data", "now", "1Gi"))
		w.AwaitBound("data")
		copyOf(w, "copy", "now", "data")
		held(w, "copy", "keelson.dev/provisioning", true)
		from := w.BoundVolume("data").Name
		w.DeleteClaim("data")
		testcluster.Update(w, "data", func(c *corev1.PersistentVolumeClaim) { c.Finalizers = nil })
		w.EventuallyWithin(10*time.Minute, "what was to be copied goes", func() error {
			if w.Drivers.Volume(from) != nil {
				return fmt.Errorf("volume %s is there", from)
			}
			return nil
		})
		w.Drivers.Change(func() { w.Drivers.Faults.CloneError = nil })
		held(w, "copy", "keelson.dev/provisioning", false)
		w.AwaitEvent("ProvisioningFailed", `failed to provision volume: PersistentVolumeClaim data cannot be read: `+
			`persistentvolumeclaims "data" not found`)
		w.DeleteClaim("copy")
		w.EventuallyWithin(10*time.Minute, "nothing is left", w.CheckNoVolumes)

		w.CreateObject(testcluster.NewDriverVolume("theirs", "other.example.com"))
		theirs := testcluster.NewClaim("theirs", "1Gi")
		theirs.Spec.VolumeName = "theirs"
		theirs.Finalizers = []string{cloningProtection}
		w.CreateObject(theirs)
		w.AwaitBound("theirs")
		time.Sleep(10 * time.Minute)
		held(w, "theirs", cloningProtection, true)
	})
}

// Regardless of lost calls, crashes and leader changes: no clone loses its source, and no source
// stays after its clones are created.
func TestCopiesUnderFailures(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w, replaced := testcluster.LeadWithDriver(t,
			testcluster.Options{NoMutationGuard: true,
				ChangeController: testcluster.FailReconciles("volume-provisioner", 2, 2*time.Millisecond)},
			engine.Options{Resync: time.Second}, "w1")
		r := rand.New(rand.NewPCG(11, 12))
		w.Drivers.Change(func() { w.Drivers.Faults.LossSource = rand.New(rand.NewPCG(13, 14)) })
		var live []string
		for i := range 16 {
			source, name := fmt.Sprint("s", i), fmt.Sprint("copy", i)
			w.CreateObject(testcluster.NewClassClaim(source, "now", "1Gi"))
			w.EventuallyWithin(5*time.Minute, source, func() error {
				c, err := client.Get[*corev1.PersistentVolumeClaim](w.Ctx, w.Admin, "default", source)
				if err == nil && c.Status.Phase != corev1.ClaimBound {
					err = errors.New("it is not bound")
				}
				return err
			})
			copyOf(w, name, "now", source)
			time.Sleep(time.Duration(r.IntN(60)) * time.Millisecond)
			if i%2 == 0 {
				w.DeleteClaim(source)
			} else {
				live = append(live, source)
			}
			if i%4 == 3 {
				replaced()
			}
		}
		w.Drivers.Change(func() { w.Drivers.Faults.LossSource = nil })
		w.EventuallyWithin(30*time.Minute, "copies are made, or say that there is nothing to copy", func() error {
			for i := range 16 {
				c, err := client.Get[*corev1.PersistentVolumeClaim](w.Ctx, w.Admin, "default", fmt.Sprint("copy", i))
				if err != nil {
					return err
				}
				begun := slices.Contains(c.Finalizers, "keelson.dev/provisioning")
				if begun || i%2 == 1 && c.Status.Phase != corev1.ClaimBound {
					return fmt.Errorf("%s: begun %v, %s", c.Name, begun, c.Status.Phase)
				}
				if err := testcluster.CheckGone[*corev1.PersistentVolumeClaim](w, fmt.Sprint("s", i)); i%2 == 0 &&
					err != nil {
					return fmt.Errorf("s%d: %w", i, err)
				}
			}
			return nil
		})
		for _, name := range live {
			held(w, name, cloningProtection, false)
		}
		w.Drivers.Change(func() {
			for name, v := range w.Drivers.Volumes {
				if strings.HasPrefix(v.Source, "pvc-") && name == v.Source {
					t.Errorf("volume %s is a copy of itself", name)
				}
			}
		})
	})
}

// A claim that is deleted while its snapshot is being taken stays until the snapshot is known. A
// snapshot stays while a volume is created from it. Both hold across a change of leader.
func TestSourcesStayWhileSnapshotsAreUsed(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w, replaced := testcluster.LeadWithDriver(t, testcluster.Options{NoMutationGuard: true},
			engine.Options{OwnIdentity: true, Resync: time.Minute}, "w1")
		kinds := testcluster.AddSnapshotKinds(w)
		w.CreateObject(testcluster.NewClassClaim("data", "now", "1Gi"))
		w.AwaitBound("data")
		w.Drivers.Change(func() { w.Drivers.Faults.LoseResponses = true })
		testcluster.CreateSnapshot(w, kinds, "s", "data")
		held(w, "data", "snapshot.storage.kubernetes.io/pvc-as-source-protection", true)
		w.DeleteClaim("data")
		replaced()
		time.Sleep(5 * time.Minute)
		held(w, "data", "snapshot.storage.kubernetes.io/pvc-as-source-protection", true)
		w.Drivers.Change(func() { w.Drivers.Faults.LoseResponses = false })
		w.EventuallyWithin(10*time.Minute, "the claim goes", func() error {
			return testcluster.CheckGone[*corev1.PersistentVolumeClaim](w, "data")
		})
		testcluster.AwaitSnapshot(w, kinds, "s", testcluster.CheckSnapshotReady)

		w.Drivers.Change(func() { w.Drivers.Faults.CloneError = status.Error(codes.Aborted, "it is being copied") })
		c, group := testcluster.NewClassClaim("restored", "now", "1Gi"), "snapshot.storage.k8s.io"
		c.Spec.DataSource = &corev1.TypedLocalObjectReference{APIGroup: &group, Kind: "VolumeSnapshot", Name: "s"}
		w.CreateObject(c)
		held(w, "restored", "keelson.dev/provisioning", true)
		testcluster.DeleteCustom(w, kinds["VolumeSnapshot"], "s")
		replaced()
		time.Sleep(5 * time.Minute)
		if err := testcluster.CheckContents(w, kinds, 1, 1); err != nil {
			t.Errorf("while a volume is being made of it: %v", err)
		}
		w.Drivers.Change(func() { w.Drivers.Faults.CloneError = nil })
		w.EventuallyWithin(10*time.Minute, "the volume", func() error {
			c, err := client.Get[*corev1.PersistentVolumeClaim](w.Ctx, w.Admin, "default", "restored")
			if err == nil && c.Status.Phase != corev1.ClaimBound {
				err = fmt.Errorf("it is %s", c.Status.Phase)
			}
			return err
		})
		testcluster.AwaitCustomDeleted(w, kinds["VolumeSnapshot"], "s")
	})
}

// A claim is deleted even if a user has removed the snapshot that was being taken from it by force.
func TestSnapshotsRemovedByForce(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{Engine: engine.Options{OwnIdentity: true,
			Resync: time.Minute}, NoMutationGuard: true})
		w.AddDriver("w1")
		w.CreateClass("now", storagev1.VolumeBindingImmediate, corev1.PersistentVolumeReclaimDelete)
		kinds := testcluster.AddSnapshotKinds(w)
		w.CreateObject(testcluster.NewClassClaim("data", "now", "1Gi"))
		w.AwaitBound("data")
		w.Drivers.Change(func() { w.Drivers.Faults.LoseResponses = true })
		testcluster.CreateSnapshot(w, kinds, "s", "data")
		const protection = "snapshot.storage.kubernetes.io/pvc-as-source-protection"
		held(w, "data", protection, true)
		testcluster.DeleteCustom(w, kinds["VolumeSnapshot"], "s")
		w.Eventually("it goes by force", func() error {
			o, err := w.Admin.Do(w.Ctx, &api.Request{Verb: api.VerbGet, Kind: kinds["VolumeSnapshot"],
				Namespace: "default", Name: "s"})
			if err != nil {
				return err
			}
			next := o.DeepCopyObject().(api.Object)
			next.SetFinalizers(nil)
			_, err = w.Admin.Do(w.Ctx, &api.Request{Verb: api.VerbUpdate, Kind: kinds["VolumeSnapshot"],
				Namespace: "default", Name: "s", Object: next})
			return err
		})
		held(w, "data", protection, false)
		w.Drivers.Change(func() { w.Drivers.Faults.LoseResponses = false })
		w.EventuallyWithin(10*time.Minute, "its content goes", func() error {
			return testcluster.CheckContents(w, kinds, 0, 0)
		})
	})
}
