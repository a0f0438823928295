package controllers_test

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
	"keelson.dev/keelson/controlplane/controllers"
	"keelson.dev/keelson/internal/virtual"
)

// volumeOf is the volume that a claim is bound to.
func (w *world) volumeOf(name string) *corev1.PersistentVolume {
	w.t.Helper()
	w.boundTo(name)
	c, err := client.Get[*corev1.PersistentVolumeClaim](w.ctx, w.admin, "default", name)
	if err != nil {
		w.t.Fatal(err)
	}
	v, err := client.Get[*corev1.PersistentVolume](w.ctx, w.admin, "", c.Spec.VolumeName)
	if err != nil {
		w.t.Fatal(err)
	}
	return v
}

func (w *world) deleteClaim(name string) {
	w.t.Helper()
	if err := client.Delete[*corev1.PersistentVolumeClaim](w.ctx, w.admin, "default", name, metav1.DeleteOptions{}); err != nil {
		w.t.Fatal(err)
	}
}

// F110: a claim of a class gets a volume on the right node, which is expanded and deleted with the
// claim unless it is retained.
func TestVolumesAreMade(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{engine: controllers.Options{OwnIdentity: true, Resync: time.Minute}, quiet: true})
		w.driverOn("w1", "w2", "w3")
		w.class("waits", storagev1.VolumeBindingWaitForFirstConsumer, corev1.PersistentVolumeReclaimDelete)
		w.class("kept", storagev1.VolumeBindingImmediate, corev1.PersistentVolumeReclaimRetain)
		w.drivers.set(func() { w.drivers.full = map[string]bool{"w1": true, "w3": true} })
		time.Sleep(2 * time.Minute) // until the nodes have reported their capacity
		w.create(classed("data", "waits", "1Gi"))
		w.create(classed("kept", "kept", "1Gi"))
		w.event("WaitForFirstConsumer", "waiting for first consumer to be created before binding")
		w.selected("data", "w2")
		for _, name := range []string{"data", "kept"} {
			v := w.volumeOf(name)
			terms := v.Spec.NodeAffinity.Required.NodeSelectorTerms
			if len(terms) != 1 || terms[0].MatchExpressions[0].Key != nodeSegment || !slices.Equal(terms[0].MatchExpressions[0].Values, []string{"w2"}) {
				t.Errorf("volume of claim %s is for %+v", name, terms)
			}
		}
		w.event("ProvisioningSucceeded", "Successfully provisioned volume "+w.volumeOf("data").Name)
		w.wants("data", "2Gi")
		w.claimIs("data", has("2Gi"))
		if m := w.drivers.get(w.volumeOf("data").Name); m == nil || m.size != 2<<30 {
			t.Errorf("the driver has %+v", m)
		}
		keep := w.volumeOf("kept").Name
		w.deleteClaim("data")
		w.deleteClaim("kept")
		w.eventually("one volume", func() error {
			list, err := client.List[*corev1.PersistentVolume](w.ctx, w.admin, "", metav1.ListOptions{})
			if err == nil && (len(list) != 1 || list[0].Name != keep || list[0].Status.Phase != corev1.VolumeReleased || w.drivers.count() != 1) {
				err = fmt.Errorf("%d objects, %d volumes", len(list), w.drivers.count())
			}
			return err
		})
		// The object may be deleted; retained data stay.
		if err := client.Delete[*corev1.PersistentVolume](w.ctx, w.admin, "", keep, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.eventually("no object", func() error {
			list, err := client.List[*corev1.PersistentVolume](w.ctx, w.admin, "", metav1.ListOptions{})
			if err == nil && len(list) > 0 {
				err = errors.New("it is there")
			}
			return err
		})
		if w.drivers.get(keep) == nil {
			t.Error("a volume of class Retain was deleted")
		}
	})
}

// An event of a claim without a volume has the reason; when the cause is fixed, the claim gets a
// volume.
func TestClaimsSayWhyTheyWait(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{engine: controllers.Options{OwnIdentity: true, Resync: time.Minute}, quiet: true})
		w.driverOn("w1")
		w.class("now", storagev1.VolumeBindingImmediate, corev1.PersistentVolumeReclaimDelete)
		w.class("waits", storagev1.VolumeBindingWaitForFirstConsumer, corev1.PersistentVolumeReclaimDelete)
		w.create(&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "secret"}, Provisioner: ownDriver,
			Parameters: map[string]string{"csi.storage.k8s.io/provisioner-secret-name": "s"}})
		w.create(&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "unheard"}, Provisioner: ownDriver,
			Parameters: map[string]string{"csi.storage.k8s.io/unheard-of": "s"}})
		w.create(classed("nowhere", "missing", "1Gi"))
		w.event("ProvisioningFailed", `storageclass.storage.k8s.io "missing" not found`)
		w.create(classed("secret", "secret", "1Gi"))
		w.event("ProvisioningFailed", `failed to provision volume: StorageClass "secret": there is one of the parameters csi.storage.k8s.io/provisioner-secret-name and csi.storage.k8s.io/provisioner-secret-namespace: both belong together`)
		w.create(classed("unheard", "unheard", "1Gi"))
		w.event("ProvisioningFailed", "failed to provision volume: parameter csi.storage.k8s.io/unheard-of of StorageClass unheard is not served for drivers that the agents serve: leave it out")
		w.create(classed("there", "waits", "1Gi"))
		w.selected("there", "w2")
		w.event("ProvisioningFailed", "failed to provision volume: node w2, which was chosen for the pod, has no CSI driver "+ownDriver+
			": a driver registers by a socket in its kubelet folder's plugins_registry (kubectl get csinode w2 -o yaml lists those that have)")
		w.claimIs("there", func(c *corev1.PersistentVolumeClaim) bool {
			return c.Annotations["volume.kubernetes.io/selected-node"] == ""
		})
		w.drivers.set(func() { w.drivers.full = map[string]bool{"w1": true} })
		w.create(classed("full", "now", "1Gi"))
		w.event("ProvisioningFailed", `failed to provision volume: StorageClass "now": ResourceExhausted: node w1 is full`)
		w.drivers.set(func() { w.drivers.full = nil })
		w.boundTo("full")
		w.drivers.set(func() { w.drivers.err = status.Error(codes.InvalidArgument, "no such file system") })
		w.create(classed("refused", "now", "1Gi"))
		w.event("ProvisioningFailed", `failed to provision volume: StorageClass "now": node w1: InvalidArgument: no such file system`)
		w.deleteClaim("refused")
		w.eventually("the claim goes", func() error { return gone[*corev1.PersistentVolumeClaim](w, "refused") })
		w.drivers.set(func() { w.drivers.err = nil })
		for _, name := range []string{"nowhere", "secret", "unheard", "there", "full"} {
			w.deleteClaim(name)
		}
		w.eventually("nothing is left", w.noVolumes)
	})
}

// A claim that is deleted while it is unknown whether its volume was created stays until that is
// known, and the volume is deleted with it.
func TestVolumeOfWhichNobodyHeard(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{engine: controllers.Options{Resync: time.Minute}, quiet: true})
		w.driverOn("w1")
		w.class("now", storagev1.VolumeBindingImmediate, corev1.PersistentVolumeReclaimDelete)
		w.drivers.set(func() { w.drivers.mute = true })
		w.create(classed("data", "now", "1Gi"))
		w.eventually("the volume", func() error {
			if n := w.drivers.count(); n != 1 {
				return fmt.Errorf("%d volumes", n)
			}
			return nil
		})
		w.deleteClaim("data")
		time.Sleep(time.Minute)
		if err := gone[*corev1.PersistentVolumeClaim](w, "data"); err == nil {
			t.Error("the claim went though nobody knows what became of its volume")
		}
		w.drivers.set(func() { w.drivers.mute = false })
		w.within(10*time.Minute, "the claim goes", func() error { return gone[*corev1.PersistentVolumeClaim](w, "data") })
		w.eventually("nothing is left", w.noVolumes)
	})
}

// F110: the driver gets the mount options of the volume, and refuses invalid options. When the
// class is changed, the volume is created, with events. A claim without a selected node gets no
// event.
func TestMountOptionsOfClasses(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{quiet: true})
		w.driverOn("w1")
		w.class("now", storagev1.VolumeBindingImmediate, corev1.PersistentVolumeReclaimDelete)
		update(w, "now", func(c *storagev1.StorageClass) { c.MountOptions = []string{"noatime", "wrong"} })
		virtual.Wait() // the controller's view of the class has the options
		w.drivers.set(func() { w.drivers.unmounted = "wrong" })
		w.create(classed("data", "now", "1Gi"))
		w.event("ProvisioningFailed", `failed to provision volume: StorageClass "now": node w1: InvalidArgument: mount option "wrong" is none`)
		if n := w.drivers.count(); n != 0 {
			t.Errorf("%d volumes were made", n)
		}
		update(w, "now", func(c *storagev1.StorageClass) { c.MountOptions = []string{"noatime"} })
		if v := w.volumeOf("data"); !slices.Equal(v.Spec.MountOptions, []string{"noatime"}) || w.drivers.count() != 1 {
			t.Errorf("the volume has %q; there are %d", v.Spec.MountOptions, w.drivers.count())
		}
		list, err := client.List[*corev1.Event](w.ctx, w.admin, "", metav1.ListOptions{})
		if err != nil || slices.ContainsFunc(list, func(e *corev1.Event) bool { return e.Reason == "ExternalProvisioning" }) {
			t.Errorf("the claim hears of another provisioner, or %v", err)
		}
	})
}

// A driver with a provisioner of its own is left to that.
func TestOthersProvisioners(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{quiet: true})
		w.driverOn("w1")
		w.class("now", storagev1.VolumeBindingImmediate, corev1.PersistentVolumeReclaimDelete)
		update(w, ownDriver, func(d *storagev1.CSIDriver) { d.Annotations = nil })
		w.create(classed("data", "now", "1Gi"))
		w.event("ExternalProvisioning", fmt.Sprintf("waiting for a volume to be made by the external provisioner %q or by an administrator", ownDriver))
		time.Sleep(10 * time.Minute)
		if n := w.drivers.count(); n != 0 {
			t.Errorf("%d volumes were made", n)
		}
	})
}

// Regardless of lost calls, crashes and leader changes: claims that stay get one volume each. Of
// deleted claims nothing is left, neither an object nor a volume of a driver, whenever they are
// deleted.
func TestVolumesUnderFailures(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w, replaced := led(t, options{quiet: true, change: failing("volume-provisioner", 2, 2*time.Millisecond)}, controllers.Options{Resync: time.Second}, "w1", "w2")
		w.class("waits", storagev1.VolumeBindingWaitForFirstConsumer, corev1.PersistentVolumeReclaimDelete)
		r := rand.New(rand.NewPCG(3, 4))
		w.drivers.set(func() { w.drivers.flaky = rand.New(rand.NewPCG(5, 6)) })
		var live []string
		for i := range 40 {
			name, class := fmt.Sprint("c", i), []string{"now", "waits"}[i%2]
			w.create(classed(name, class, "1Gi"))
			if class == "waits" {
				w.selected(name, fmt.Sprint("w", 1+r.IntN(2)))
			}
			live = append(live, name)
			time.Sleep(time.Duration(r.IntN(30)) * time.Millisecond)
			if r.IntN(2) == 0 {
				k := r.IntN(len(live))
				w.deleteClaim(live[k])
				live = slices.Delete(live, k, k+1)
			}
			if i%8 == 7 {
				replaced()
			}
		}
		w.drivers.set(func() { w.drivers.flaky = nil })
		for _, name := range live {
			w.boundTo(name)
		}
		w.within(5*time.Minute, "one volume for each claim", func() error {
			list, err := client.List[*corev1.PersistentVolume](w.ctx, w.admin, "", metav1.ListOptions{})
			if err == nil && (len(list) != len(live) || w.drivers.count() != len(live)) {
				err = fmt.Errorf("%d claims, %d objects, %d volumes", len(live), len(list), w.drivers.count())
			}
			return err
		})
		for _, name := range live {
			w.deleteClaim(name)
		}
		w.within(5*time.Minute, "nothing is left", w.noVolumes)
	})
}

// A driver and the topology labels of its node are in two objects: no volume is created and no
// capacity reported with only one of them. A provision that an older release started that way gets
// the right topology.
func TestLabelsComeAfterTheDriver(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{engine: controllers.Options{OwnIdentity: true, Resync: time.Hour}, quiet: true})
		w.driverOn("w1")
		w.class("now", storagev1.VolumeBindingImmediate, corev1.PersistentVolumeReclaimDelete)
		edit(w, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}}, client.Update, func(n *corev1.Node) { delete(n.Labels, nodeSegment) })
		room := func() (told []string) {
			list, err := client.List[*storagev1.CSIStorageCapacity](w.ctx, w.admin, metav1.NamespaceSystem, metav1.ListOptions{})
			if err != nil {
				t.Fatal(err)
			}
			for _, c := range list {
				told = append(told, c.NodeTopology.MatchLabels[nodeSegment])
			}
			return told
		}
		time.Sleep(5 * time.Minute) // virtual time: no event is recorded
		if told := room(); len(told) > 0 {
			t.Errorf("room is told for %q", told)
		}
		begun := classed("old", "now", "1Gi")
		begun.Finalizers = []string{"keelson.dev/provisioning"}
		begun.Annotations = map[string]string{"volume.kubernetes.io/storage-provisioner": ownDriver, "keelson.dev/provisioning": `{"driver":"` + ownDriver + `","node":"w1","segments":{"` + nodeSegment + `":""}}`}
		w.create(begun)
		w.create(classed("data", "now", "1Gi"))
		w.event("ProvisioningFailed", "failed to provision volume: node w1 has no label "+nodeSegment+", by which CSI driver "+ownDriver+" says where it is: the driver's registration sets it")
		edit(w, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}}, client.Update, func(n *corev1.Node) { metav1.SetMetaDataLabel(&n.ObjectMeta, nodeSegment, "w1") })
		for _, name := range []string{"data", "old"} {
			w.boundTo(name)
		}
		time.Sleep(5 * time.Minute) // virtual time: one event is recorded, and the state stays
		if told := room(); !slices.Equal(told, []string{"w1"}) {
			t.Errorf("room is told for %q", told)
		}
	})
}
