package volumesnapshot_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	snap "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	extensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
)

func failedWith(words string) func(*snap.VolumeSnapshot) error {
	return func(s *snap.VolumeSnapshot) error {
		if s.Status == nil || s.Status.Error == nil || !strings.Contains(*s.Status.Error.Message, words) ||
			engine.IsSnapshotReady(s) {
			return fmt.Errorf("its status is %+v", s.Status)
		}
		return nil
	}
}

// F110: a snapshot of a claim is taken with the parameters of its class, becomes ready when its
// driver reports so, and is deleted with its object. A retained snapshot can be named again, and is
// found on its node.
func TestSnapshots(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{Engine: engine.Options{OwnIdentity: true,
			Resync: time.Minute}, NoMutationGuard: true})
		w.AddDriver("w1", "w2")
		w.CreateClass("now", storagev1.VolumeBindingImmediate, corev1.PersistentVolumeReclaimDelete)
		kinds := testcluster.AddSnapshotKinds(w)
		w.CreateObject(testcluster.NewClassClaim("data", "now", "1Gi"))
		w.AwaitBound("data")
		w.Drivers.Change(func() { w.Drivers.SnapshotDelay = 3 })
		testcluster.CreateSnapshot(w, kinds, "s", "data")
		testcluster.AwaitSnapshot(w, kinds, "s", testcluster.CheckSnapshotReady)
		w.Drivers.Change(func() {
			if w.Drivers.SnapshotSecrets["key"] != "open" {
				t.Errorf("the driver was given %v", w.Drivers.SnapshotSecrets)
			}
		})
		w.AwaitClaim("data", func(c *corev1.PersistentVolumeClaim) bool {
			return !strings.Contains(strings.Join(c.Finalizers, " "), "pvc-as-source")
		})
		if err := testcluster.CheckContents(w, kinds, 1, 1); err != nil {
			t.Error(err)
		}
		testcluster.DeleteCustom(w, kinds["VolumeSnapshot"], "s")
		testcluster.AwaitCustomDeleted(w, kinds["VolumeSnapshot"], "s")
		w.Eventually("nothing is left", func() error { return testcluster.CheckContents(w, kinds, 0, 0) })

		// A snapshot that existed before the cluster.
		w.Drivers.Change(func() {
			w.Drivers.Snapshots["old"] = &testcluster.StoredVolume{Node: "w2", Size: 1 << 30, Source: "x"}
		})
		given := "metadata: {name: %s}\nspec: {deletionPolicy: %s, driver: " + testcluster.OwnDriver +
			", source: {snapshotHandle: %s}, volumeSnapshotRef: {namespace: default, name: %s}}"
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w2"}}
		testcluster.Edit(w, node, client.Update, func(n *corev1.Node) { delete(n.Labels, testcluster.NodeSegment) })
		testcluster.CreateCustom(w, kinds["VolumeSnapshotContent"], fmt.Sprintf(given, "old", "Retain", "old", "old"))
		testcluster.CreateCustom(w, kinds["VolumeSnapshot"],
			"metadata: {name: old}\nspec: {source: {volumeSnapshotContentName: old}}")
		w.AwaitEvent("SnapshotCreationFailed", "snapshot is not taken: node w2 lacks topology label "+
			testcluster.NodeSegment+" of CSI driver "+testcluster.OwnDriver+
			": the driver's registration sets the label")
		testcluster.Edit(w, node, client.Update, func(n *corev1.Node) {
			metav1.SetMetaDataLabel(&n.ObjectMeta, testcluster.NodeSegment, "w2")
		})
		testcluster.AwaitSnapshot(w, kinds, "old", testcluster.CheckSnapshotReady)
		c, err := engine.GetTyped[snap.VolumeSnapshotContent](w.Ctx, w.Admin, kinds["VolumeSnapshotContent"], "", "old")
		if err != nil || !strings.Contains(c.Object.Annotations[engine.ReachedFromAnnotation], `"w2"`) {
			t.Errorf("where it is: %v, %v", c.Object, err)
		}
		testcluster.DeleteCustom(w, kinds["VolumeSnapshot"], "old")
		testcluster.AwaitCustomDeleted(w, kinds["VolumeSnapshot"], "old")
		testcluster.DeleteCustom(w, kinds["VolumeSnapshotContent"], "old")
		w.Eventually("its data are kept", func() error { return testcluster.CheckContents(w, kinds, 0, 1) })
	})
}

// The status of a snapshot that cannot be taken has the reason, and it is taken once the cause is
// fixed.
func TestSnapshotsSayWhyTheyWait(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{Engine: engine.Options{OwnIdentity: true,
			Resync: time.Minute}, NoMutationGuard: true})
		w.AddDriver("w1")
		w.CreateClass("now", storagev1.VolumeBindingImmediate, corev1.PersistentVolumeReclaimDelete)
		kinds := testcluster.AddSnapshotKinds(w)
		testcluster.CreateSnapshot(w, kinds, "early", "data")
		testcluster.AwaitSnapshot(w, kinds, "early", failedWith(`"data" not found`))
		w.CreateObject(testcluster.NewClassClaim("data", "now", "1Gi"))
		testcluster.AwaitSnapshot(w, kinds, "early", testcluster.CheckSnapshotReady)
		testcluster.CreateCustom(w, kinds["VolumeSnapshotClass"],
			"metadata: {name: second, annotations: {snapshot.storage.kubernetes.io/is-default-class: "+
				"'true'}}\ndriver: "+testcluster.OwnDriver+"\ndeletionPolicy: Delete")
		testcluster.CreateSnapshot(w, kinds, "two", "data")
		testcluster.AwaitSnapshot(w, kinds, "two",
			failedWith("VolumeSnapshotClasses second, std are all the default of CSI driver "+testcluster.OwnDriver))
		testcluster.DeleteCustom(w, kinds["VolumeSnapshotClass"], "second")
		testcluster.AwaitSnapshot(w, kinds, "two", testcluster.CheckSnapshotReady)
		testcluster.CreateCustom(w, kinds["VolumeSnapshot"],
			"metadata: {name: nameless}\nspec: {source: {volumeSnapshotContentName: none}}")
		var since *metav1.Time
		testcluster.AwaitSnapshot(w, kinds, "nameless", func(s *snap.VolumeSnapshot) error {
			err := failedWith("VolumeSnapshotContent none does not exist")(s)
			if err == nil && (s.Status.ReadyToUse == nil || s.Status.Error.Time == nil) {
				err = fmt.Errorf("its status is %+v", s.Status)
			}
			if err == nil {
				since = s.Status.Error.Time
			}
			return err
		})
		time.Sleep(10 * time.Minute) // the problem is written once
		testcluster.AwaitSnapshot(w, kinds, "nameless", func(s *snap.VolumeSnapshot) error {
			if !s.Status.Error.Time.Equal(since) {
				return fmt.Errorf("it failed at %s, and says %s", since, s.Status.Error.Time)
			}
			return nil
		})
		testcluster.CreateCustom(w, kinds["VolumeSnapshot"],
			"metadata: {name: unclassed}\nspec: {volumeSnapshotClassName: none, source: "+
				"{persistentVolumeClaimName: data}}")
		testcluster.AwaitSnapshot(w, kinds, "unclassed", failedWith(`VolumeSnapshotClass "none" does not exist`))
		testcluster.CreateCustom(w, kinds["VolumeSnapshotClass"],
			"metadata: {name: others}\ndriver: other.example\ndeletionPolicy: Delete")
		testcluster.CreateCustom(w, kinds["VolumeSnapshot"],
			"metadata: {name: misclassed}\nspec: {volumeSnapshotClassName: others, source: "+
				"{persistentVolumeClaimName: data}}")
		testcluster.AwaitSnapshot(w, kinds, "misclassed",
			failedWith(`VolumeSnapshotClass "others" belongs to CSI driver other.example, and the volume of the claim `+
				`is of `+testcluster.OwnDriver))
		for _, name := range []string{"early", "two", "nameless", "unclassed", "misclassed"} {
			testcluster.DeleteCustom(w, kinds["VolumeSnapshot"], name)
			testcluster.AwaitCustomDeleted(w, kinds["VolumeSnapshot"], name)
		}
		w.Eventually("nothing is left", func() error { return testcluster.CheckContents(w, kinds, 0, 0) })
	})
}

// Whoever brings definitions of his own has a snapshot controller of his own, and a driver with a snapshotter is left to that.
func TestOthersSnapshots(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{NoMutationGuard: true})
		w.AddDriver("w1")
		w.CreateClass("now", storagev1.VolumeBindingImmediate, corev1.PersistentVolumeReclaimDelete)
		kinds := testcluster.AddSnapshotKinds(w)
		w.CreateObject(testcluster.NewClassClaim("data", "now", "1Gi"))
		w.AwaitBound("data")
		testcluster.Update(w, testcluster.OwnDriver, func(d *storagev1.CSIDriver) { d.Annotations = nil })
		testcluster.CreateSnapshot(w, kinds, "bound", "data")
		time.Sleep(time.Minute)
		if err := testcluster.CheckContents(w, kinds, 1, 0); err != nil {
			t.Errorf("a driver with a snapshotter: %v", err)
		}
		testcluster.Update(w, "volumesnapshots."+snap.GroupName, func(d *extensionsv1.CustomResourceDefinition) {
			delete(d.Annotations, engine.ServedByAnnotation)
		})
		time.Sleep(time.Second) // virtual time: until the leader has observed it
		testcluster.CreateSnapshot(w, kinds, "theirs", "data")
		time.Sleep(time.Minute)
		if err := testcluster.CheckContents(w, kinds, 1, 0); err != nil {
			t.Errorf("definitions of somebody else: %v", err)
		}
	})
}

// taken waits until the driver has a snapshot.
func taken(w *testcluster.Cluster, kinds map[string]*api.Kind, name string) {
	w.T.Helper()
	s, err := engine.GetTyped[snap.VolumeSnapshot](w.Ctx, w.Admin, kinds["VolumeSnapshot"], "default", name)
	if err != nil {
		w.T.Fatal(err)
	}
	w.EventuallyWithin(10*time.Minute, name+" is taken", func() (err error) {
		w.Drivers.Change(func() {
			if w.Drivers.Snapshots["snapshot-"+string(s.Typed.UID)] == nil {
				err = fmt.Errorf("the driver has %d", len(w.Drivers.Snapshots))
			}
		})
		return err
	})
}

// Regardless of lost calls, crashes and leader changes: snapshots that stay become ready, and of
// deleted snapshots nothing is left, whenever they are deleted.
func TestSnapshotsUnderFailures(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w, replaced := testcluster.LeadWithDriver(t,
			testcluster.Options{NoMutationGuard: true,
				ChangeController: testcluster.FailReconciles("volume-snapshotter", 2, 2*time.Millisecond)},
			engine.Options{Resync: time.Second}, "w1", "w2")
		kinds := testcluster.AddSnapshotKinds(w)
		for _, c := range []string{"a", "b", "c"} {
			w.CreateObject(testcluster.NewClassClaim(c, "now", "1Gi"))
			w.AwaitBound(c)
		}
		r := rand.New(rand.NewPCG(7, 8))
		w.Drivers.Change(func() {
			w.Drivers.Faults.LossSource, w.Drivers.SnapshotDelay = rand.New(rand.NewPCG(5, 6)), 1
		})
		var live []string
		for i := range 30 {
			name := fmt.Sprint("s", i)
			testcluster.CreateSnapshot(w, kinds, name, []string{"a", "b", "c"}[i%3])
			live = append(live, name)
			time.Sleep(time.Duration(r.IntN(30)) * time.Millisecond)
			if r.IntN(2) == 0 {
				k := r.IntN(len(live))
				testcluster.DeleteCustom(w, kinds["VolumeSnapshot"], live[k])
				live = append(live[:k:k], live[k+1:]...)
			}
			if i%8 == 7 {
				replaced()
			}
			if i%6 == 5 { // taken, but the response was lost: it is deleted before the call is repeated
				unheard := fmt.Sprint("unheard", i)
				w.Drivers.Change(func() { w.Drivers.Faults.LoseResponses = true })
				testcluster.CreateSnapshot(w, kinds, unheard, "a")
				taken(w, kinds, unheard)
				testcluster.DeleteCustom(w, kinds["VolumeSnapshot"], unheard)
				w.Drivers.Change(func() { w.Drivers.Faults.LoseResponses = false })
			}
		}
		w.Drivers.Change(func() { w.Drivers.Faults.LossSource = nil })
		for _, name := range live {
			testcluster.AwaitSnapshot(w, kinds, name, testcluster.CheckSnapshotReady)
		}
		w.EventuallyWithin(5*time.Minute, "one for each", func() error {
			return testcluster.CheckContents(w, kinds, len(live), len(live))
		})
		for _, name := range live {
			testcluster.DeleteCustom(w, kinds["VolumeSnapshot"], name)
		}
		w.EventuallyWithin(5*time.Minute, "nothing is left", func() error {
			return testcluster.CheckContents(w, kinds, 0, 0)
		})
		for _, c := range []string{"a", "b", "c"} {
			w.AwaitClaim(c, func(c *corev1.PersistentVolumeClaim) bool {
				return !strings.Contains(strings.Join(c.Finalizers, " "), "pvc-as-source")
			})
		}
	})
}

// A snapshot that is deleted while it is unknown whether it was taken deletes the taken snapshot.
func TestSnapshotOfWhichNobodyHeard(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{Engine: engine.Options{Resync: time.Minute},
			NoMutationGuard: true})
		w.AddDriver("w1")
		w.CreateClass("now", storagev1.VolumeBindingImmediate, corev1.PersistentVolumeReclaimDelete)
		kinds := testcluster.AddSnapshotKinds(w)
		w.CreateObject(testcluster.NewClassClaim("data", "now", "1Gi"))
		w.AwaitBound("data")
		w.Drivers.Change(func() { w.Drivers.Faults.LoseResponses = true })
		testcluster.CreateSnapshot(w, kinds, "s", "data")
		w.Eventually("it is taken", func() error { return testcluster.CheckContents(w, kinds, 1, 1) })
		testcluster.DeleteCustom(w, kinds["VolumeSnapshot"], "s")
		time.Sleep(time.Minute)
		if err := testcluster.CheckContents(w, kinds, 1, 1); err != nil {
			t.Errorf("while nobody knows what became of it: %v", err)
		}
		w.Drivers.Change(func() { w.Drivers.Faults.LoseResponses = false })
		testcluster.AwaitCustomDeleted(w, kinds["VolumeSnapshot"], "s")
		w.EventuallyWithin(10*time.Minute, "nothing is left", func() error {
			return testcluster.CheckContents(w, kinds, 0, 0)
		})
	})
}

// F110: a claim gets a volume with the data of a snapshot or another claim, on a node that can
// reach the data, whichever node was selected before. A claim that cannot gets an event with the
// reason.
func TestVolumesOfSnapshots(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{Engine: engine.Options{OwnIdentity: true,
			Resync: time.Minute}, NoMutationGuard: true})
		w.AddDriver("w1", "w2")
		w.CreateClass("waits", storagev1.VolumeBindingWaitForFirstConsumer, corev1.PersistentVolumeReclaimDelete)
		kinds := testcluster.AddSnapshotKinds(w)
		w.CreateObject(testcluster.NewClassClaim("data", "waits", "1Gi"))
		w.SelectNode("data", "w2")
		w.AwaitBound("data")
		group := snap.GroupName
		from := func(name, size, kind, source string) {
			c := testcluster.NewClassClaim(name, "waits", size)
			c.Spec.DataSource = &corev1.TypedLocalObjectReference{Kind: kind, Name: source}
			if kind == "VolumeSnapshot" {
				c.Spec.DataSource.APIGroup = &group
			}
			w.CreateObject(c)
		}
		from("restored", "2Gi", "VolumeSnapshot", "s")
		w.AwaitEvent("ProvisioningFailed", `failed to provision volume: VolumeSnapshot s cannot be read: `+
			`volumesnapshots.snapshot.storage.k8s.io "s" not found`)
		testcluster.CreateSnapshot(w, kinds, "s", "data")
		testcluster.AwaitSnapshot(w, kinds, "s", testcluster.CheckSnapshotReady)
		from("clone", "1Gi", "PersistentVolumeClaim", "data")
		from("small", "512Mi", "VolumeSnapshot", "s")
		w.AwaitEvent("ProvisioningFailed", "failed to provision volume: the claim requests 512Mi, and VolumeSnapshot "+
			"s has 1Gi: request at least this size")
		for _, name := range []string{"restored", "clone"} {
			w.AwaitClaim(name, func(c *corev1.PersistentVolumeClaim) bool {
				return strings.Contains(c.Annotations[engine.ReachedFromAnnotation], `"w2"`)
			})
			w.SelectNode(name, "w1")
			w.AwaitClaim(name, func(c *corev1.PersistentVolumeClaim) bool {
				return c.Annotations["volume.kubernetes.io/selected-node"] == ""
			})
			w.SelectNode(name, "w2")
			if m := w.Drivers.Volume(w.BoundVolume(name).Name); m == nil || m.Node != "w2" || m.Source == "" {
				t.Errorf("the volume of claim %s is %+v", name, m)
			}
		}
		testcluster.DeleteCustom(w, kinds["VolumeSnapshot"], "s")
		time.Sleep(time.Minute)
		if err := testcluster.CheckContents(w, kinds, 1, 1); err != nil {
			t.Errorf("a snapshot of which a claim waits for its volume: %v", err)
		}
		w.DeleteClaim("small")
		testcluster.AwaitCustomDeleted(w, kinds["VolumeSnapshot"], "s")
	})
}
