package controllers_test

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
	"keelson.dev/keelson/controlplane/controllers"
	"keelson.dev/keelson/internal/virtual"
)

// diskClass creates the class whose volumes the attaching driver creates.
func (w *world) diskClass() {
	w.t.Helper()
	w.create(&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "disks"}, Provisioner: diskDriver})
}

// madeIs waits until the driver has so many volumes, and the cluster as many of the class.
func (w *world) madeIs(within time.Duration, want int) {
	w.t.Helper()
	d := w.drivers.disks
	w.within(within, fmt.Sprintf("%d volumes made", want), func() error {
		list, err := client.List[*corev1.PersistentVolume](w.ctx, w.admin, "", metav1.ListOptions{})
		if err != nil {
			return err
		}
		n := 0
		for _, v := range list {
			if v.Spec.StorageClassName == "disks" {
				n++
			}
		}
		d.mu.Lock()
		defer d.mu.Unlock()
		if n != want || len(d.made) != want {
			return fmt.Errorf("%d objects, the driver has %v", n, d.made)
		}
		return nil
	})
}

// F110: while a node is lost, volumes that any node can reach are created and deleted through other
// nodes, even if the lost node had started it. They are deleted only after they were detached from
// their node.
func TestDisksAreMadeAndDeletedWithoutALostNode(t *testing.T) {
	attaching(t, options{}, func(w *world, d *disks, _ string) {
		w.diskClass()
		asked := make(chan struct{}, 100)
		d.set(func() {
			d.hook = func(step string) error {
				if step != "call CreateVolume" {
					return nil
				}
				asked <- struct{}{}
				return errors.New("the tunnel broke")
			}
		})
		w.create(classed("begun", "disks", "1Gi"))
		<-asked // by way of w1, the first by name
		w.power("w1", false)
		d.set(func() { d.hook = nil })
		w.create(classed("fresh", "disks", "1Gi"))
		w.madeIs(30*time.Second, 2)
		w.volumeOf("begun")
		v := w.volumeOf("fresh").Name

		w.create(user("user", "w2", "fresh"))
		w.mountedOn(30*time.Second, v, "w2")
		d.set(func() { d.unmounts = false })
		w.deleteClaim("fresh")
		w.deleteClaim("begun")
		if err := client.Delete[*corev1.Pod](w.ctx, w.admin, "default", "user", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.madeIs(30*time.Second, 1)
		time.Sleep(time.Minute) // the node has not unmounted it
		if _, err := client.Get[*corev1.PersistentVolume](w.ctx, w.admin, "", v); err != nil {
			t.Errorf("the volume that a node has: %v", err)
		}
		d.set(func() { d.unmounts = true })
		w.madeIs(10*time.Second, 0)
		if _, err := client.Get[*corev1.PersistentVolume](w.ctx, w.admin, "", v); !apierrors.IsNotFound(err) {
			t.Errorf("the volume: %v", err)
		}
	})
}

// F110: a node-local volume for which no pod has selected a node is created on a ready node.
func TestVolumesAreMadeOnNodesThatAnswer(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{engine: controllers.Options{OwnIdentity: true, Resync: time.Minute}, quiet: true})
		w.driverOn("w1", "w2")
		w.class("now", storagev1.VolumeBindingImmediate, corev1.PersistentVolumeReclaimDelete)
		w.setReady("w1", corev1.ConditionUnknown)
		w.create(classed("data", "now", "1Gi"))
		if on := w.drivers.get(w.volumeOf("data").Name); on == nil || on.node != "w2" {
			t.Errorf("the volume is %+v", on)
		}
	})
}

// An event of a claim with an external data source names its populator, or reports that there is
// none.
func TestPopulatorsAreNamed(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{engine: controllers.Options{OwnIdentity: true, Resync: time.Minute}, quiet: true})
		w.driverOn("w1")
		w.class("now", storagev1.VolumeBindingImmediate, corev1.PersistentVolumeReclaimDelete)
		kind := func(group, kind, plural string, namespaced bool) *api.Kind {
			of := custom.Resource{Group: group, Kind: kind, Plural: plural, Singular: strings.ToLower(kind), Namespaced: namespaced}
			k := custom.NewKind(of, "v1beta1", true, custom.NewStorage(of, "v1beta1"))
			if err := w.admin.Kinds().Register(k); err != nil {
				t.Fatal(err)
			}
			return k
		}
		filled := func(name string) {
			c, group := classed(name, "now", "1Gi"), "example.com"
			c.Spec.DataSourceRef = &corev1.TypedObjectReference{APIGroup: &group, Kind: "Page", Name: "home"}
			w.create(c)
		}
		const what = `the claim's data source is Page.example.com "home"`
		filled("unknown")
		w.event("UnrecognizedDataSourceKind", what+", and the cluster serves no such kind: install the populator that brings it")
		kind("example.com", "Page", "pages", true)
		filled("waits")
		w.event("Provisioning", what+": the populator of that kind is waited for, which makes the volume and fills it")
		populators := kind("populator.storage.k8s.io", "VolumePopulator", "volumepopulators", false)
		w.custom(populators, "metadata: {name: other}\nsourceKind: {group: example.com, kind: Book}")
		filled("nobody")
		w.event("UnrecognizedDataSourceKind", what+", and no VolumePopulator is for that kind (kubectl get volumepopulators lists them): install one")
		w.custom(populators, "metadata: {name: pages}\nsourceKind: {group: example.com, kind: Page}")
		filled("somebody")
		w.eventually("the claim is told", func() error {
			list, err := client.List[*corev1.Event](w.ctx, w.admin, "", metav1.ListOptions{})
			for _, e := range list {
				if e.InvolvedObject.Name == "somebody" && e.Reason == "Provisioning" {
					return nil
				}
			}
			return fmt.Errorf("it was not: %v", err)
		})
		if n := w.drivers.count(); n != 0 {
			t.Errorf("the driver has %d volumes", n)
		}
	})
}
