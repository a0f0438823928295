package controllers_test

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
	"keelson.dev/keelson/controlplane/controllers"
	"keelson.dev/keelson/internal/virtual"
)

const cloningProtection = "provisioner.storage.kubernetes.io/cloning-protection"

// copyOf creates a claim that clones another claim's volume.
func (w *world) copyOf(name, class, source string) {
	w.t.Helper()
	c := classed(name, class, "1Gi")
	c.Spec.DataSource = &corev1.TypedLocalObjectReference{Kind: "PersistentVolumeClaim", Name: source}
	w.create(c)
}

func (w *world) held(name, finalizer string, want bool) {
	w.t.Helper()
	w.within(time.Minute, name+" with or without "+finalizer, func() error {
		c, err := client.Get[*corev1.PersistentVolumeClaim](w.ctx, w.admin, "default", name)
		if err == nil && slices.Contains(c.Finalizers, finalizer) != want {
			err = fmt.Errorf("it has %q", c.Finalizers)
		}
		return err
	})
}

// led returns a world whose nodes have the driver, with class "now". The second result starts
// another leadership.
func led(t *testing.T, o options, engine controllers.Options, nodes ...string) (w *world, replaced func()) {
	t.Helper()
	w = newWorld(t, o)
	stop := w.lead(engine)
	t.Cleanup(func() { stop() })
	for _, n := range nodes {
		w.node(n)
	}
	w.driverOn(nodes...)
	w.class("now", storagev1.VolumeBindingImmediate, corev1.PersistentVolumeReclaimDelete)
	return w, func() { stop(); stop = w.lead(engine) }
}

// F110: a claim that is deleted while its volume is being cloned stays until the clone is created,
// even across a change of leader, and is deleted after that. A claim that is not deleted loses its
// protection.
func TestClaimsStayWhileTheyAreCopied(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w, replaced := led(t, options{quiet: true}, controllers.Options{OwnIdentity: true, Resync: time.Minute}, "w1")
		w.create(classed("data", "now", "1Gi"))
		w.boundTo("data")
		w.copyOf("first", "now", "data")
		w.boundTo("first")
		w.held("data", cloningProtection, false)

		w.drivers.set(func() { w.drivers.copies = status.Error(codes.Aborted, "it is being copied") })
		w.copyOf("second", "now", "data")
		w.held("second", "keelson.dev/provisioning", true)
		w.held("data", cloningProtection, true)
		w.deleteClaim("data")
		time.Sleep(2 * time.Minute)
		replaced()
		time.Sleep(5 * time.Minute)
		w.held("data", cloningProtection, true)
		w.copyOf("late", "now", "data")
		w.event("ProvisioningFailed", "failed to provision volume: PersistentVolumeClaim data is being deleted")
		w.drivers.set(func() { w.drivers.copies = nil })
		w.within(10*time.Minute, "the copy", func() error {
			c, err := client.Get[*corev1.PersistentVolumeClaim](w.ctx, w.admin, "default", "second")
			if err == nil && c.Status.Phase != corev1.ClaimBound {
				err = fmt.Errorf("it is %s", c.Status.Phase)
			}
			return err
		})
		w.within(time.Minute, "what was copied goes", func() error { return gone[*corev1.PersistentVolumeClaim](w, "data") })
		if m := w.drivers.get(w.volumeOf("second").Name); m == nil || m.of == "" {
			t.Errorf("the copy is %+v", m)
		}
	})
}

// An abandoned clone releases its source. A source whose provisioner is another program keeps that
// program's finalizer.
func TestCopiesThatAreGivenUp(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{engine: controllers.Options{OwnIdentity: true, Resync: time.Minute}, quiet: true})
		w.driverOn("w1")
		w.class("now", storagev1.VolumeBindingImmediate, corev1.PersistentVolumeReclaimDelete)
		w.create(classed("data", "now", "1Gi"))
		w.boundTo("data")
		w.drivers.set(func() { w.drivers.copies = status.Error(codes.Internal, "not today") })
		w.copyOf("copy", "now", "data")
		w.held("copy", "keelson.dev/provisioning", true)
		w.held("data", cloningProtection, true)
		w.deleteClaim("data")
		w.drivers.set(func() { w.drivers.copies = status.Error(codes.FailedPrecondition, "never") })
		w.deleteClaim("copy")
		w.within(10*time.Minute, "both go", func() error {
			return errors.Join(gone[*corev1.PersistentVolumeClaim](w, "copy"), gone[*corev1.PersistentVolumeClaim](w, "data"))
		})
		w.within(10*time.Minute, "nothing is left", w.noVolumes)

		// The finalizer is removed by a user, and the source with it: the clone has not started
		// then.
		w.drivers.set(func() { w.drivers.copies = status.Error(codes.Aborted, "it is being copied") })
		w.create(classed("data", "now", "1Gi"))
		w.boundTo("data")
		w.copyOf("copy", "now", "data")
		w.held("copy", "keelson.dev/provisioning", true)
		from := w.volumeOf("data").Name
		w.deleteClaim("data")
		update(w, "data", func(c *corev1.PersistentVolumeClaim) { c.Finalizers = nil })
		w.within(10*time.Minute, "what was to be copied goes", func() error {
			if w.drivers.get(from) != nil {
				return fmt.Errorf("volume %s is there", from)
			}
			return nil
		})
		w.drivers.set(func() { w.drivers.copies = nil })
		w.held("copy", "keelson.dev/provisioning", false)
		w.event("ProvisioningFailed", `failed to provision volume: PersistentVolumeClaim data cannot be read: persistentvolumeclaims "data" not found`)
		w.deleteClaim("copy")
		w.within(10*time.Minute, "nothing is left", w.noVolumes)

		w.create(driven("theirs", "other.example.com"))
		theirs := claim("theirs", "1Gi")
		theirs.Spec.VolumeName = "theirs"
		theirs.Finalizers = []string{cloningProtection}
		w.create(theirs)
		w.boundTo("theirs")
		time.Sleep(10 * time.Minute)
		w.held("theirs", cloningProtection, true)
	})
}

// Regardless of lost calls, crashes and leader changes: no clone loses its source, and no source
// stays after its clones are created.
func TestCopiesUnderFailures(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w, replaced := led(t, options{quiet: true, change: failing("volume-provisioner", 2, 2*time.Millisecond)}, controllers.Options{Resync: time.Second}, "w1")
		r := rand.New(rand.NewPCG(11, 12))
		w.drivers.set(func() { w.drivers.flaky = rand.New(rand.NewPCG(13, 14)) })
		var live []string
		for i := range 16 {
			source, name := fmt.Sprint("s", i), fmt.Sprint("copy", i)
			w.create(classed(source, "now", "1Gi"))
			w.within(5*time.Minute, source, func() error {
				c, err := client.Get[*corev1.PersistentVolumeClaim](w.ctx, w.admin, "default", source)
				if err == nil && c.Status.Phase != corev1.ClaimBound {
					err = errors.New("it is not bound")
				}
				return err
			})
			w.copyOf(name, "now", source)
			time.Sleep(time.Duration(r.IntN(60)) * time.Millisecond)
			if i%2 == 0 {
				w.deleteClaim(source)
			} else {
				live = append(live, source)
			}
			if i%4 == 3 {
				replaced()
			}
		}
		w.drivers.set(func() { w.drivers.flaky = nil })
		w.within(30*time.Minute, "copies are made, or say that there is nothing to copy", func() error {
			for i := range 16 {
				c, err := client.Get[*corev1.PersistentVolumeClaim](w.ctx, w.admin, "default", fmt.Sprint("copy", i))
				if err != nil {
					return err
				}
				begun := slices.Contains(c.Finalizers, "keelson.dev/provisioning")
				if begun || i%2 == 1 && c.Status.Phase != corev1.ClaimBound {
					return fmt.Errorf("%s: begun %v, %s", c.Name, begun, c.Status.Phase)
				}
				if err := gone[*corev1.PersistentVolumeClaim](w, fmt.Sprint("s", i)); i%2 == 0 && err != nil {
					return fmt.Errorf("s%d: %w", i, err)
				}
			}
			return nil
		})
		for _, name := range live {
			w.held(name, cloningProtection, false)
		}
		w.drivers.set(func() {
			for name, v := range w.drivers.volumes {
				if strings.HasPrefix(v.of, "pvc-") && name == v.of {
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
		w, replaced := led(t, options{quiet: true}, controllers.Options{OwnIdentity: true, Resync: time.Minute}, "w1")
		kinds := w.snapshots()
		w.create(classed("data", "now", "1Gi"))
		w.boundTo("data")
		w.drivers.set(func() { w.drivers.mute = true })
		w.snapshotOf(kinds, "s", "data")
		w.held("data", "snapshot.storage.kubernetes.io/pvc-as-source-protection", true)
		w.deleteClaim("data")
		replaced()
		time.Sleep(5 * time.Minute)
		w.held("data", "snapshot.storage.kubernetes.io/pvc-as-source-protection", true)
		w.drivers.set(func() { w.drivers.mute = false })
		w.within(10*time.Minute, "the claim goes", func() error { return gone[*corev1.PersistentVolumeClaim](w, "data") })
		w.isSo(kinds, "s", ready)

		w.drivers.set(func() { w.drivers.copies = status.Error(codes.Aborted, "it is being copied") })
		c, group := classed("restored", "now", "1Gi"), "snapshot.storage.k8s.io"
		c.Spec.DataSource = &corev1.TypedLocalObjectReference{APIGroup: &group, Kind: "VolumeSnapshot", Name: "s"}
		w.create(c)
		w.held("restored", "keelson.dev/provisioning", true)
		w.remove(kinds["VolumeSnapshot"], "s")
		replaced()
		time.Sleep(5 * time.Minute)
		if err := w.contents(kinds, 1, 1); err != nil {
			t.Errorf("while a volume is being made of it: %v", err)
		}
		w.drivers.set(func() { w.drivers.copies = nil })
		w.within(10*time.Minute, "the volume", func() error {
			c, err := client.Get[*corev1.PersistentVolumeClaim](w.ctx, w.admin, "default", "restored")
			if err == nil && c.Status.Phase != corev1.ClaimBound {
				err = fmt.Errorf("it is %s", c.Status.Phase)
			}
			return err
		})
		w.goneOf(kinds["VolumeSnapshot"], "s")
	})
}

// A claim is deleted even if a user has removed the snapshot that was being taken from it by force.
func TestSnapshotsRemovedByForce(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{engine: controllers.Options{OwnIdentity: true, Resync: time.Minute}, quiet: true})
		w.driverOn("w1")
		w.class("now", storagev1.VolumeBindingImmediate, corev1.PersistentVolumeReclaimDelete)
		kinds := w.snapshots()
		w.create(classed("data", "now", "1Gi"))
		w.boundTo("data")
		w.drivers.set(func() { w.drivers.mute = true })
		w.snapshotOf(kinds, "s", "data")
		const protection = "snapshot.storage.kubernetes.io/pvc-as-source-protection"
		w.held("data", protection, true)
		w.remove(kinds["VolumeSnapshot"], "s")
		w.eventually("it goes by force", func() error {
			o, err := w.admin.Do(w.ctx, &api.Request{Verb: api.VerbGet, Kind: kinds["VolumeSnapshot"], Namespace: "default", Name: "s"})
			if err != nil {
				return err
			}
			next := o.DeepCopyObject().(api.Object)
			next.SetFinalizers(nil)
			_, err = w.admin.Do(w.ctx, &api.Request{Verb: api.VerbUpdate, Kind: kinds["VolumeSnapshot"], Namespace: "default", Name: "s", Object: next})
			return err
		})
		w.held("data", protection, false)
		w.drivers.set(func() { w.drivers.mute = false })
		w.within(10*time.Minute, "its content goes", func() error { return w.contents(kinds, 0, 0) })
	})
}
