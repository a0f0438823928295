package volumeattach_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/custom"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
)

// diskClass creates the class whose volumes the attaching driver creates.
func diskClass(w *testcluster.Cluster) {
	w.T.Helper()
	w.CreateObject(&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "disks"},
		Provisioner: testcluster.DiskDriver})
}

// madeIs waits until the driver has so many volumes, and the cluster as many of the class.
func madeIs(w *testcluster.Cluster, within time.Duration, want int) {
	w.T.Helper()
	d := w.Drivers.Disks
	w.EventuallyWithin(within, fmt.Sprintf("%d volumes made", want), func() error {
		list, err := client.List[*corev1.PersistentVolume](w.Ctx, w.Admin, "", metav1.ListOptions{})
		if err != nil {
			return err
		}
		n := 0
		for _, v := range list {
			if v.Spec.StorageClassName == "disks" {
				n++
			}
		}
		d.Mu.Lock()
		defer d.Mu.Unlock()
		if n != want || len(d.Created) != want {
			return fmt.Errorf("%d objects, the driver has %v", n, d.Created)
		}
		return nil
	})
}

// F110: while a node is lost, volumes that any node can reach are created and deleted through other
// nodes, even if the lost node had started it. They are deleted only after they were detached from
// their node.
func TestDisksAreMadeAndDeletedWithoutALostNode(t *testing.T) {
	testcluster.RunAttached(t, testcluster.Options{}, func(w *testcluster.Cluster, d *testcluster.Disks, _ string) {
		diskClass(w)
		asked := make(chan struct{}, 100)
		d.Change(func() {
			d.Hook = func(step string) error {
				if step != "call CreateVolume" {
					return nil
				}
				asked <- struct{}{}
				return errors.New("the tunnel broke")
			}
		})
		w.CreateObject(testcluster.NewClassClaim("begun", "disks", "1Gi"))
		<-asked // by way of w1, the first by name
		testcluster.SetPower(w, "w1", false)
		d.Change(func() { d.Hook = nil })
		w.CreateObject(testcluster.NewClassClaim("fresh", "disks", "1Gi"))
		madeIs(w, 30*time.Second, 2)
		w.BoundVolume("begun")
		v := w.BoundVolume("fresh").Name

		w.CreateObject(testcluster.NewClaimPod("user", "w2", "fresh"))
		testcluster.AwaitMounted(w, 30*time.Second, v, "w2")
		d.Change(func() { d.Unmounts = false })
		w.DeleteClaim("fresh")
		w.DeleteClaim("begun")
		if err := client.Delete[*corev1.Pod](w.Ctx, w.Admin, "default", "user", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		madeIs(w, 30*time.Second, 1)
		time.Sleep(time.Minute) // the node has not unmounted it
		if _, err := client.Get[*corev1.PersistentVolume](w.Ctx, w.Admin, "", v); err != nil {
			t.Errorf("the volume that a node has: %v", err)
		}
		d.Change(func() { d.Unmounts = true })
		madeIs(w, 10*time.Second, 0)
		if _, err := client.Get[*corev1.PersistentVolume](w.Ctx, w.Admin, "", v); !apierrors.IsNotFound(err) {
			t.Errorf("the volume: %v", err)
		}
	})
}

// F110: a node-local volume for which no pod has selected a node is created on a ready node.
func TestVolumesAreMadeOnNodesThatAnswer(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{Engine: engine.Options{OwnIdentity: true,
			Resync: time.Minute}, NoMutationGuard: true})
		w.AddDriver("w1", "w2")
		w.CreateClass("now", storagev1.VolumeBindingImmediate, corev1.PersistentVolumeReclaimDelete)
		w.SetNodeReady("w1", corev1.ConditionUnknown)
		w.CreateObject(testcluster.NewClassClaim("data", "now", "1Gi"))
		if on := w.Drivers.Volume(w.BoundVolume("data").Name); on == nil || on.Node != "w2" {
			t.Errorf("the volume is %+v", on)
		}
	})
}

// An event of a claim with an external data source names its populator, or reports that there is
// none.
func TestPopulatorsAreNamed(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{Engine: engine.Options{OwnIdentity: true,
			Resync: time.Minute}, NoMutationGuard: true})
		w.AddDriver("w1")
		w.CreateClass("now", storagev1.VolumeBindingImmediate, corev1.PersistentVolumeReclaimDelete)
		kind := func(group, kind, plural string, namespaced bool) *api.Kind {
			of := custom.Resource{Group: group, Kind: kind, Plural: plural, Singular: strings.ToLower(kind),
				Namespaced: namespaced}
			k := custom.NewKind(of, "v1beta1", true, custom.NewStorage(of, "v1beta1"))
			if err := w.Admin.Kinds().Register(k); err != nil {
				t.Fatal(err)
			}
			return k
		}
		filled := func(name string) {
			c, group := testcluster.NewClassClaim(name, "now", "1Gi"), "example.com"
			c.Spec.DataSourceRef = &corev1.TypedObjectReference{APIGroup: &group, Kind: "Page", Name: "home"}
			w.CreateObject(c)
		}
		const what = `the claim's data source is Page.example.com "home"`
		filled("unknown")
		w.AwaitEvent("UnrecognizedDataSourceKind",
			what+", and the cluster does not serve this kind: install the populator that defines it")
		kind("example.com", "Page", "pages", true)
		filled("waits")
		w.AwaitEvent("Provisioning",
			what+": waiting for the populator of that kind, which creates and fills the volume")
		populators := kind("populator.storage.k8s.io", "VolumePopulator", "volumepopulators", false)
		testcluster.CreateCustom(w, populators, "metadata: {name: other}\nsourceKind: {group: example.com, kind: Book}")
		filled("nobody")
		w.AwaitEvent("UnrecognizedDataSourceKind",
			what+", and no VolumePopulator supports this kind (kubectl get volumepopulators lists them): install one")
		testcluster.CreateCustom(w, populators, "metadata: {name: pages}\nsourceKind: {group: example.com, kind: Page}")
		filled("somebody")
		w.Eventually("the claim is told", func() error {
			list, err := client.List[*corev1.Event](w.Ctx, w.Admin, "", metav1.ListOptions{})
			for _, e := range list {
				if e.InvolvedObject.Name == "somebody" && e.Reason == "Provisioning" {
					return nil
				}
			}
			return fmt.Errorf("it was not: %v", err)
		})
		if n := w.Drivers.CountVolumes(); n != 0 {
			t.Errorf("the driver has %d volumes", n)
		}
	})
}
