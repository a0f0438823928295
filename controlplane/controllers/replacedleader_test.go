package controllers_test

import (
	"errors"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
)

// staysUncalled runs the engine for a while after another replica was elected, and fails if a
// driver is called.
func staysUncalled(w *testcluster.Cluster, change func()) {
	w.T.Helper()
	calls := func() (n int) {
		w.Drivers.Change(func() { n = w.Drivers.Calls })
		return n
	}
	w.Replaced.Store(true)
	before := calls()
	change()
	time.Sleep(5 * time.Minute) // virtual
	if n := calls() - before; n != 0 {
		w.T.Errorf("a leader that was replaced has made %d calls of drivers", n)
	}
	w.Replaced.Store(false)
}

// F110: an engine that continues although another replica leads creates, expands and deletes no
// volume, and reads no capacity. When its leadership is confirmed again it does all of that.
func TestReplacedLeaderChangesNoVolume(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{Engine: engine.Options{OwnIdentity: true,
			Resync: time.Minute}, NoMutationGuard: true})
		w.AddDriver("w1", "w2", "w3")
		w.CreateClass("now", storagev1.VolumeBindingImmediate, corev1.PersistentVolumeReclaimDelete)
		w.CreateObject(testcluster.NewClassClaim("grows", "now", "1Gi"))
		w.CreateObject(testcluster.NewClassClaim("goes", "now", "1Gi"))
		goes := w.BoundVolume("goes").Name
		w.AwaitBound("grows")
		staysUncalled(w, func() {
			w.CreateObject(testcluster.NewClassClaim("comes", "now", "1Gi"))
			w.RequestSize("grows", "2Gi")
			w.DeleteClaim("goes")
		})
		if w.Drivers.CountVolumes() != 2 || w.Drivers.Volume(goes) == nil {
			t.Errorf("the driver has %d volumes", w.Drivers.CountVolumes())
		}
		w.BoundVolume("comes")
		w.AwaitClaim("grows", testcluster.HasCapacity("2Gi"))
		w.EventuallyWithin(10*time.Minute, "the volume of the deleted claim to go", func() error {
			if w.Drivers.Volume(goes) != nil {
				return errors.New("it is there")
			}
			return nil
		})
	})
}

// F110: an engine that continues although another replica leads neither publishes nor unpublishes a
// volume.
func TestReplacedLeaderAttachesNothing(t *testing.T) {
	testcluster.RunAttached(t, testcluster.Options{}, func(w *testcluster.Cluster, d *testcluster.Disks, node string) {
		scale := func(n int32) {
			testcluster.Update(w, "db", func(s *appsv1.StatefulSet) { s.Spec.Replicas = &n })
		}
		staysUncalled(w, func() { scale(0) })
		testcluster.AwaitMounted(w, 10*time.Minute, "v", "")
		staysUncalled(w, func() { scale(1) })
		w.EventuallyWithin(10*time.Minute, "the pod to run", func() error {
			for _, p := range w.LivePods() {
				if api.IsPodReady(p) {
					return nil
				}
			}
			return errors.New("not yet")
		})
	})
}
