package controllers_test

import (
	"errors"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"

	"keelson.dev/keelson/controlplane/controllers"
	"keelson.dev/keelson/internal/virtual"
)

// staysUncalled runs the engine for a while after another replica was elected, and fails if a
// driver is called.
func (w *world) staysUncalled(change func()) {
	w.t.Helper()
	calls := func() (n int) {
		w.drivers.set(func() { n = w.drivers.calls })
		return n
	}
	w.replaced.Store(true)
	before := calls()
	change()
	time.Sleep(5 * time.Minute) // virtual
	if n := calls() - before; n != 0 {
		w.t.Errorf("a leader that was replaced has made %d calls of drivers", n)
	}
	w.replaced.Store(false)
}

// F110: an engine that continues although another replica leads creates, expands and deletes no
// volume, and reads no capacity. When its leadership is confirmed again it does all of that.
func TestReplacedLeaderChangesNoVolume(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{engine: controllers.Options{OwnIdentity: true, Resync: time.Minute}, quiet: true})
		w.driverOn("w1", "w2", "w3")
		w.class("now", storagev1.VolumeBindingImmediate, corev1.PersistentVolumeReclaimDelete)
		w.create(classed("grows", "now", "1Gi"))
		w.create(classed("goes", "now", "1Gi"))
		goes := w.volumeOf("goes").Name
		w.boundTo("grows")
		w.staysUncalled(func() {
			w.create(classed("comes", "now", "1Gi"))
			w.wants("grows", "2Gi")
			w.deleteClaim("goes")
		})
		if w.drivers.count() != 2 || w.drivers.get(goes) == nil {
			t.Errorf("the driver has %d volumes", w.drivers.count())
		}
		w.volumeOf("comes")
		w.claimIs("grows", has("2Gi"))
		w.within(10*time.Minute, "the volume of the deleted claim to go", func() error {
			if w.drivers.get(goes) != nil {
				return errors.New("it is there")
			}
			return nil
		})
	})
}

// F110: an engine that continues although another replica leads neither publishes nor unpublishes a
// volume.
func TestReplacedLeaderAttachesNothing(t *testing.T) {
	attaching(t, options{}, func(w *world, d *disks, node string) {
		scale := func(n int32) {
			update(w, "db", func(s *appsv1.StatefulSet) { s.Spec.Replicas = &n })
		}
		w.staysUncalled(func() { scale(0) })
		w.mountedOn(10*time.Minute, "v", "")
		w.staysUncalled(func() { scale(1) })
		w.within(10*time.Minute, "the pod to run", func() error {
			for _, p := range w.pods() {
				if controllers.IsPodReady(p) {
					return nil
				}
			}
			return errors.New("not yet")
		})
	})
}
