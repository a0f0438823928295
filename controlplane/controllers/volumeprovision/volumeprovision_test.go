package volumeprovision_test

import (
	"errors"
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

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
)

// F110: a claim of a class gets a volume on the right node, which is expanded and deleted with the
// claim unless it is retained.
func TestVolumesAreMade(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{Engine: engine.Options{OwnIdentity: true,
			Resync: time.Minute}, NoMutationGuard: true})
		w.AddDriver("w1", "w2", "w3")
		w.CreateClass("waits", storagev1.VolumeBindingWaitForFirstConsumer, corev1.PersistentVolumeReclaimDelete)
		w.CreateClass("kept", storagev1.VolumeBindingImmediate, corev1.PersistentVolumeReclaimRetain)
		w.Drivers.Change(func() { w.Drivers.Faults.FullNodes = map[string]bool{"w1": true, "w3": true} })
		time.Sleep(2 * time.Minute) // until the nodes have reported their capacity
		w.CreateObject(testcluster.NewClassClaim("data", "waits", "1Gi"))
		w.CreateObject(testcluster.NewClassClaim("kept", "kept", "1Gi"))
		w.AwaitEvent("WaitForFirstConsumer", "waiting for first consumer to be created before binding")
		w.SelectNode("data", "w2")
		for _, name := range []string{"data", "kept"} {
			v := w.BoundVolume(name)
			terms := v.Spec.NodeAffinity.Required.NodeSelectorTerms
			if len(terms) != 1 || terms[0].MatchExpressions[0].Key != testcluster.NodeSegment ||
				!slices.Equal(terms[0].MatchExpressions[0].Values, []string{"w2"}) {
				t.Errorf("volume of claim %s is for %+v", name, terms)
			}
		}
		w.AwaitEvent("ProvisioningSucceeded", "Successfully provisioned volume "+w.BoundVolume("data").Name)
		w.RequestSize("data", "2Gi")
		w.AwaitClaim("data", testcluster.HasCapacity("2Gi"))
		if m := w.Drivers.Volume(w.BoundVolume("data").Name); m == nil || m.Size != 2<<30 {
			t.Errorf("the driver has %+v", m)
		}
		keep := w.BoundVolume("kept").Name
		w.DeleteClaim("data")
		w.DeleteClaim("kept")
		w.Eventually("one volume", func() error {
			list, err := client.List[*corev1.PersistentVolume](w.Ctx, w.Admin, "", metav1.ListOptions{})
			if err == nil && (len(list) != 1 || list[0].Name != keep || list[0].Status.Phase != corev1.VolumeReleased ||
				w.Drivers.CountVolumes() != 1) {
				err = fmt.Errorf("%d objects, %d volumes", len(list), w.Drivers.CountVolumes())
			}
			return err
		})
		// The object may be deleted; retained data stay.
		if err := client.Delete[*corev1.PersistentVolume](w.Ctx, w.Admin, "", keep, metav1.DeleteOptions{}); err !=
			nil {
			t.Fatal(err)
		}
		w.Eventually("no object", func() error {
			list, err := client.List[*corev1.PersistentVolume](w.Ctx, w.Admin, "", metav1.ListOptions{})
			if err == nil && len(list) > 0 {
				err = errors.New("it is there")
			}
			return err
		})
		if w.Drivers.Volume(keep) == nil {
			t.Error("a volume of class Retain was deleted")
		}
	})
}

// An event of a claim without a volume has the reason; when the cause is fixed, the claim gets a
// volume.
func TestClaimsSayWhyTheyWait(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{Engine: engine.Options{OwnIdentity: true,
			Resync: time.Minute}, NoMutationGuard: true})
		w.AddDriver("w1")
		w.CreateClass("now", storagev1.VolumeBindingImmediate, corev1.PersistentVolumeReclaimDelete)
		w.CreateClass("waits", storagev1.VolumeBindingWaitForFirstConsumer, corev1.PersistentVolumeReclaimDelete)
		w.CreateObject(&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "secret"},
			Provisioner: testcluster.OwnDriver,
			Parameters:  map[string]string{"csi.storage.k8s.io/provisioner-secret-name": "s"}})
		w.CreateObject(&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "unheard"},
			Provisioner: testcluster.OwnDriver,
			Parameters:  map[string]string{"csi.storage.k8s.io/unheard-of": "s"}})
		w.CreateObject(testcluster.NewClassClaim("nowhere", "missing", "1Gi"))
		w.AwaitEvent("ProvisioningFailed", `storageclass.storage.k8s.io "missing" not found`)
		w.CreateObject(testcluster.NewClassClaim("secret", "secret", "1Gi"))
		w.AwaitEvent("ProvisioningFailed",
			`failed to provision volume: StorageClass "secret": only one of the parameters `+
				`csi.storage.k8s.io/provisioner-secret-name and csi.storage.k8s.io/provisioner-secret-namespace `+
				`is set: set both`)
		w.CreateObject(testcluster.NewClassClaim("unheard", "unheard", "1Gi"))
		w.AwaitEvent("ProvisioningFailed", "failed to provision volume: parameter csi.storage.k8s.io/unheard-of of "+
			"StorageClass unheard is not served for drivers that the agents serve: leave it out")
		w.CreateObject(testcluster.NewClassClaim("there", "waits", "1Gi"))
		w.SelectNode("there", "w2")
		w.AwaitEvent("ProvisioningFailed", "failed to provision volume: node w2, which was chosen for the pod, has no "+
			"CSI driver "+testcluster.OwnDriver+
			": a driver registers by a socket in its kubelet folder's plugins_registry (kubectl get csinode w2 -o "+
			"yaml lists the registered drivers)")
		w.AwaitClaim("there", func(c *corev1.PersistentVolumeClaim) bool {
			return c.Annotations["volume.kubernetes.io/selected-node"] == ""
		})
		w.Drivers.Change(func() { w.Drivers.Faults.FullNodes = map[string]bool{"w1": true} })
		w.CreateObject(testcluster.NewClassClaim("full", "now", "1Gi"))
		w.AwaitEvent("ProvisioningFailed",
			`failed to provision volume: StorageClass "now": ResourceExhausted: node w1 is full`)
		w.Drivers.Change(func() { w.Drivers.Faults.FullNodes = nil })
		w.AwaitBound("full")
		w.Drivers.Change(func() {
			w.Drivers.Faults.CallError = status.Error(codes.InvalidArgument, "no such file system")
		})
		w.CreateObject(testcluster.NewClassClaim("refused", "now", "1Gi"))
		w.AwaitEvent("ProvisioningFailed", `failed to provision volume: StorageClass "now": node w1: InvalidArgument: `+
			`no such file system`)
		w.DeleteClaim("refused")
		w.Eventually("the claim goes", func() error {
			return testcluster.CheckGone[*corev1.PersistentVolumeClaim](w, "refused")
		})
		w.Drivers.Change(func() { w.Drivers.Faults.CallError = nil })
		for _, name := range []string{"nowhere", "secret", "unheard", "there", "full"} {
			w.DeleteClaim(name)
		}
		w.Eventually("nothing is left", w.CheckNoVolumes)
	})
}

// A claim that is deleted while it is unknown whether its volume was created stays until that is
// known, and the volume is deleted with it.
func TestVolumeOfWhichNobodyHeard(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{Engine: engine.Options{Resync: time.Minute},
			NoMutationGuard: true})
		w.AddDriver("w1")
		w.CreateClass("now", storagev1.VolumeBindingImmediate, corev1.PersistentVolumeReclaimDelete)
		w.Drivers.Change(func() { w.Drivers.Faults.LoseResponses = true })
		w.CreateObject(testcluster.NewClassClaim("data", "now", "1Gi"))
		w.Eventually("the volume", func() error {
			if n := w.Drivers.CountVolumes(); n != 1 {
				return fmt.Errorf("%d volumes", n)
			}
			return nil
		})
		w.DeleteClaim("data")
		time.Sleep(time.Minute)
		if err := testcluster.CheckGone[*corev1.PersistentVolumeClaim](w, "data"); err == nil {
			t.Error("the claim went though nobody knows what became of its volume")
		}
		w.Drivers.Change(func() { w.Drivers.Faults.LoseResponses = false })
		w.EventuallyWithin(10*time.Minute, "the claim goes", func() error {
			return testcluster.CheckGone[*corev1.PersistentVolumeClaim](w, "data")
		})
		w.Eventually("nothing is left", w.CheckNoVolumes)
	})
}

// F110: the driver gets the mount options of the volume, and refuses invalid options. When the
// class is changed, the volume is created, with events. A claim without a selected node gets no
// event.
func TestMountOptionsOfClasses(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{NoMutationGuard: true})
		w.AddDriver("w1")
		w.CreateClass("now", storagev1.VolumeBindingImmediate, corev1.PersistentVolumeReclaimDelete)
		testcluster.Update(w, "now", func(c *storagev1.StorageClass) { c.MountOptions = []string{"noatime", "wrong"} })
		virtual.Wait() // the controller's view of the class has the options
		w.Drivers.Change(func() { w.Drivers.Faults.RefusedMountOption = "wrong" })
		w.CreateObject(testcluster.NewClassClaim("data", "now", "1Gi"))
		w.AwaitEvent("ProvisioningFailed", `failed to provision volume: StorageClass "now": node w1: InvalidArgument: `+
			`mount option "wrong" is none`)
		if n := w.Drivers.CountVolumes(); n != 0 {
			t.Errorf("%d volumes were made", n)
		}
		testcluster.Update(w, "now", func(c *storagev1.StorageClass) { c.MountOptions = []string{"noatime"} })
		if v := w.BoundVolume("data"); !slices.Equal(v.Spec.MountOptions, []string{"noatime"}) ||
			w.Drivers.CountVolumes() != 1 {
			t.Errorf("the volume has %q; there are %d", v.Spec.MountOptions, w.Drivers.CountVolumes())
		}
		list, err := client.List[*corev1.Event](w.Ctx, w.Admin, "", metav1.ListOptions{})
		if err != nil || slices.ContainsFunc(list, func(e *corev1.Event) bool {
			return e.Reason == "ExternalProvisioning"
		}) {
			t.Errorf("the claim hears of another provisioner, or %v", err)
		}
	})
}

// A driver with a provisioner of its own is left to that.
func TestOthersProvisioners(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{NoMutationGuard: true})
		w.AddDriver("w1")
		w.CreateClass("now", storagev1.VolumeBindingImmediate, corev1.PersistentVolumeReclaimDelete)
		testcluster.Update(w, testcluster.OwnDriver, func(d *storagev1.CSIDriver) { d.Annotations = nil })
		w.CreateObject(testcluster.NewClassClaim("data", "now", "1Gi"))
		w.AwaitEvent("ExternalProvisioning",
			fmt.Sprintf("waiting for a volume to be created by the external provisioner %q or by an administrator",
				testcluster.OwnDriver))
		time.Sleep(10 * time.Minute)
		if n := w.Drivers.CountVolumes(); n != 0 {
			t.Errorf("%d volumes were made", n)
		}
	})
}

// Regardless of lost calls, crashes and leader changes: claims that stay get one volume each. Of
// deleted claims nothing is left, neither an object nor a volume of a driver, whenever they are
// deleted.
func TestVolumesUnderFailures(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w, replaced := testcluster.LeadWithDriver(t,
			testcluster.Options{NoMutationGuard: true,
				ChangeController: testcluster.FailReconciles("volume-provisioner", 2, 2*time.Millisecond)},
			engine.Options{Resync: time.Second}, "w1", "w2")
		w.CreateClass("waits", storagev1.VolumeBindingWaitForFirstConsumer, corev1.PersistentVolumeReclaimDelete)
		r := rand.New(rand.NewPCG(3, 4))
		w.Drivers.Change(func() { w.Drivers.Faults.LossSource = rand.New(rand.NewPCG(5, 6)) })
		var live []string
		for i := range 40 {
			name, class := fmt.Sprint("c", i), []string{"now", "waits"}[i%2]
			w.CreateObject(testcluster.NewClassClaim(name, class, "1Gi"))
			if class == "waits" {
				w.SelectNode(name, fmt.Sprint("w", 1+r.IntN(2)))
			}
			live = append(live, name)
			time.Sleep(time.Duration(r.IntN(30)) * time.Millisecond)
			if r.IntN(2) == 0 {
				k := r.IntN(len(live))
				w.DeleteClaim(live[k])
				live = slices.Delete(live, k, k+1)
			}
			if i%8 == 7 {
				replaced()
			}
		}
		w.Drivers.Change(func() { w.Drivers.Faults.LossSource = nil })
		for _, name := range live {
			w.AwaitBound(name)
		}
		w.EventuallyWithin(5*time.Minute, "one volume for each claim", func() error {
			list, err := client.List[*corev1.PersistentVolume](w.Ctx, w.Admin, "", metav1.ListOptions{})
			if err == nil && (len(list) != len(live) || w.Drivers.CountVolumes() != len(live)) {
				err = fmt.Errorf("%d claims, %d objects, %d volumes", len(live), len(list), w.Drivers.CountVolumes())
			}
			return err
		})
		for _, name := range live {
			w.DeleteClaim(name)
		}
		w.EventuallyWithin(5*time.Minute, "nothing is left", w.CheckNoVolumes)
	})
}

// A driver and the topology labels of its node are in two objects: no volume is created and no
// capacity reported with only one of them. A provision that an older release started that way gets
// the right topology.
func TestLabelsComeAfterTheDriver(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{Engine: engine.Options{OwnIdentity: true,
			Resync: time.Hour}, NoMutationGuard: true})
		w.AddDriver("w1")
		w.CreateClass("now", storagev1.VolumeBindingImmediate, corev1.PersistentVolumeReclaimDelete)
		testcluster.Edit(w, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}}, client.Update,
			func(n *corev1.Node) { delete(n.Labels, testcluster.NodeSegment) })
		room := func() (told []string) {
			list, err := client.List[*storagev1.CSIStorageCapacity](w.Ctx, w.Admin, metav1.NamespaceSystem,
				metav1.ListOptions{})
			if err != nil {
				t.Fatal(err)
			}
			for _, c := range list {
				told = append(told, c.NodeTopology.MatchLabels[testcluster.NodeSegment])
			}
			return told
		}
		time.Sleep(5 * time.Minute) // virtual time: no event is recorded
		if told := room(); len(told) > 0 {
			t.Errorf("capacity is published for nodes %q", told)
		}
		begun := testcluster.NewClassClaim("old", "now", "1Gi")
		begun.Finalizers = []string{"keelson.dev/provisioning"}
		begun.Annotations = map[string]string{"volume.kubernetes.io/storage-provisioner": testcluster.OwnDriver,
			"keelson.dev/provisioning": `{"driver":"` + testcluster.OwnDriver + `","node":"w1","segments":{"` +
				testcluster.NodeSegment + `":""}}`}
		w.CreateObject(begun)
		w.CreateObject(testcluster.NewClassClaim("data", "now", "1Gi"))
		w.AwaitEvent("ProvisioningFailed", "failed to provision volume: node w1 lacks topology label "+
			testcluster.NodeSegment+" of CSI driver "+testcluster.OwnDriver+
			": the driver's registration sets the label")
		testcluster.Edit(w, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}}, client.Update,
			func(n *corev1.Node) { metav1.SetMetaDataLabel(&n.ObjectMeta, testcluster.NodeSegment, "w1") })
		for _, name := range []string{"data", "old"} {
			w.AwaitBound(name)
		}
		time.Sleep(5 * time.Minute) // virtual time: one event is recorded, and the state stays
		if told := room(); !slices.Equal(told, []string{"w1"}) {
			t.Errorf("capacity is published for nodes %q", told)
		}
	})
}
