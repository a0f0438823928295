package controllers_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	snap "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	extensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/custom"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers"
	"keelson.dev/keelson/internal/virtual"
)

// snapshots has the kinds of snapshots, served by the control plane, and a default class that has a Secret.
func (w *world) snapshots() map[string]*api.Kind {
	w.t.Helper()
	out := map[string]*api.Kind{}
	for kind, plural := range map[string]string{"VolumeSnapshot": "volumesnapshots", "VolumeSnapshotContent": "volumesnapshotcontents", "VolumeSnapshotClass": "volumesnapshotclasses"} {
		of := custom.Resource{Group: snap.GroupName, Kind: kind, Plural: plural, Singular: strings.ToLower(kind), Namespaced: kind == "VolumeSnapshot"}
		out[kind] = custom.NewKind(of, "v1", kind != "VolumeSnapshotClass", custom.NewStorage(of, "v1"))
		if err := w.admin.Kinds().Register(out[kind]); err != nil {
			w.t.Fatal(err)
		}
	}
	w.create(&extensionsv1.CustomResourceDefinition{ObjectMeta: metav1.ObjectMeta{Name: "volumesnapshots." + snap.GroupName,
		Annotations: map[string]string{"keelson.dev/served-by": "control-plane"}},
		Spec: extensionsv1.CustomResourceDefinitionSpec{Group: snap.GroupName, Scope: extensionsv1.NamespaceScoped,
			Names: extensionsv1.CustomResourceDefinitionNames{Plural: "volumesnapshots", Singular: "volumesnapshot", Kind: "VolumeSnapshot"}}})
	w.create(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "s-key"}, Data: map[string][]byte{"key": []byte("open")}})
	w.custom(out["VolumeSnapshotClass"], "metadata: {name: std, annotations: {snapshot.storage.kubernetes.io/is-default-class: 'true'}}\ndriver: "+ownDriver+
		"\ndeletionPolicy: Delete\nparameters: {csi.storage.k8s.io/snapshotter-secret-name: s-key, csi.storage.k8s.io/snapshotter-secret-namespace: '${volumesnapshot.namespace}'}")
	return out
}

func (w *world) snapshotOf(kinds map[string]*api.Kind, name, claim string) {
	w.t.Helper()
	w.custom(kinds["VolumeSnapshot"], fmt.Sprintf("metadata: {name: %s}\nspec: {source: {persistentVolumeClaimName: %s}}", name, claim))
}

func (w *world) remove(k *api.Kind, name string) {
	w.t.Helper()
	namespace := ""
	if k.Namespaced {
		namespace = "default"
	}
	if _, err := w.admin.Do(w.ctx, &api.Request{Verb: api.VerbDelete, Kind: k, Namespace: namespace, Name: name}); err != nil {
		w.t.Fatal(err)
	}
}

// isSo waits until a snapshot is as wanted.
func (w *world) isSo(kinds map[string]*api.Kind, name string, is func(*snap.VolumeSnapshot) error) {
	w.t.Helper()
	w.within(5*time.Minute, "snapshot "+name, func() error {
		s, err := controllers.GetTyped[snap.VolumeSnapshot](w.ctx, w.admin, kinds["VolumeSnapshot"], "default", name)
		if err == nil {
			err = is(s.Typed)
		}
		return err
	})
}

func ready(s *snap.VolumeSnapshot) error {
	if !controllers.IsSnapshotReady(s) || s.Status.Error != nil || s.Status.RestoreSize.String() != "1Gi" || s.Status.CreationTime.Unix() != 1e9 {
		return fmt.Errorf("its status is %+v", s.Status)
	}
	return nil
}

func failedWith(words string) func(*snap.VolumeSnapshot) error {
	return func(s *snap.VolumeSnapshot) error {
		if s.Status == nil || s.Status.Error == nil || !strings.Contains(*s.Status.Error.Message, words) || controllers.IsSnapshotReady(s) {
			return fmt.Errorf("its status is %+v", s.Status)
		}
		return nil
	}
}

// contents is nil when there are that many contents, and that many snapshots of drivers.
func (w *world) contents(kinds map[string]*api.Kind, contents, onDisk int) error {
	list, err := w.admin.ListKind(w.ctx, kinds["VolumeSnapshotContent"], "")
	w.drivers.mu.Lock()
	defer w.drivers.mu.Unlock()
	if err == nil && (len(list) != contents || len(w.drivers.snaps) != onDisk) {
		err = fmt.Errorf("%d contents, %d snapshots", len(list), len(w.drivers.snaps))
	}
	return err
}

func (w *world) goneOf(k *api.Kind, name string) {
	w.t.Helper()
	w.within(5*time.Minute, name+" goes", func() error {
		_, err := w.admin.Do(w.ctx, &api.Request{Verb: api.VerbGet, Kind: k, Namespace: "default", Name: name})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return errors.New("it is there")
	})
}

// F110: a snapshot of a claim is taken with the parameters of its class, becomes ready when its
// driver reports so, and is deleted with its object. A retained snapshot can be named again, and is
// found on its node.
func TestSnapshots(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{engine: controllers.Options{OwnIdentity: true, Resync: time.Minute}, quiet: true})
		w.driverOn("w1", "w2")
		w.class("now", storagev1.VolumeBindingImmediate, corev1.PersistentVolumeReclaimDelete)
		kinds := w.snapshots()
		w.create(classed("data", "now", "1Gi"))
		w.boundTo("data")
		w.drivers.set(func() { w.drivers.slow = 3 })
		w.snapshotOf(kinds, "s", "data")
		w.isSo(kinds, "s", ready)
		w.drivers.set(func() {
			if w.drivers.told["key"] != "open" {
				t.Errorf("the driver was given %v", w.drivers.told)
			}
		})
		w.claimIs("data", func(c *corev1.PersistentVolumeClaim) bool {
			return !strings.Contains(strings.Join(c.Finalizers, " "), "pvc-as-source")
		})
		if err := w.contents(kinds, 1, 1); err != nil {
			t.Error(err)
		}
		w.remove(kinds["VolumeSnapshot"], "s")
		w.goneOf(kinds["VolumeSnapshot"], "s")
		w.eventually("nothing is left", func() error { return w.contents(kinds, 0, 0) })

		// A snapshot that existed before the cluster.
		w.drivers.set(func() { w.drivers.snaps["old"] = &onDisk{node: "w2", size: 1 << 30, of: "x"} })
		given := "metadata: {name: %s}\nspec: {deletionPolicy: %s, driver: " + ownDriver + ", source: {snapshotHandle: %s}, volumeSnapshotRef: {namespace: default, name: %s}}"
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w2"}}
		edit(w, node, client.Update, func(n *corev1.Node) { delete(n.Labels, nodeSegment) })
		w.custom(kinds["VolumeSnapshotContent"], fmt.Sprintf(given, "old", "Retain", "old", "old"))
		w.custom(kinds["VolumeSnapshot"], "metadata: {name: old}\nspec: {source: {volumeSnapshotContentName: old}}")
		w.event("SnapshotCreationFailed", "snapshot is not taken: node w2 has no label "+nodeSegment+", by which CSI driver "+ownDriver+" says where it is: the driver's registration sets it")
		edit(w, node, client.Update, func(n *corev1.Node) { metav1.SetMetaDataLabel(&n.ObjectMeta, nodeSegment, "w2") })
		w.isSo(kinds, "old", ready)
		c, err := controllers.GetTyped[snap.VolumeSnapshotContent](w.ctx, w.admin, kinds["VolumeSnapshotContent"], "", "old")
		if err != nil || !strings.Contains(c.Object.Annotations[controllers.ReachedFromAnnotation], `"w2"`) {
			t.Errorf("where it is: %v, %v", c.Object, err)
		}
		w.remove(kinds["VolumeSnapshot"], "old")
		w.goneOf(kinds["VolumeSnapshot"], "old")
		w.remove(kinds["VolumeSnapshotContent"], "old")
		w.eventually("its data are kept", func() error { return w.contents(kinds, 0, 1) })
	})
}

// The status of a snapshot that cannot be taken has the reason, and it is taken once the cause is
// fixed.
func TestSnapshotsSayWhyTheyWait(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{engine: controllers.Options{OwnIdentity: true, Resync: time.Minute}, quiet: true})
		w.driverOn("w1")
		w.class("now", storagev1.VolumeBindingImmediate, corev1.PersistentVolumeReclaimDelete)
		kinds := w.snapshots()
		w.snapshotOf(kinds, "early", "data")
		w.isSo(kinds, "early", failedWith(`"data" not found`))
		w.create(classed("data", "now", "1Gi"))
		w.isSo(kinds, "early", ready)
		w.custom(kinds["VolumeSnapshotClass"], "metadata: {name: second, annotations: {snapshot.storage.kubernetes.io/is-default-class: 'true'}}\ndriver: "+ownDriver+"\ndeletionPolicy: Delete")
		w.snapshotOf(kinds, "two", "data")
		w.isSo(kinds, "two", failedWith("VolumeSnapshotClasses second, std are all the default of CSI driver "+ownDriver))
		w.remove(kinds["VolumeSnapshotClass"], "second")
		w.isSo(kinds, "two", ready)
		w.custom(kinds["VolumeSnapshot"], "metadata: {name: nameless}\nspec: {source: {volumeSnapshotContentName: none}}")
		var since *metav1.Time
		w.isSo(kinds, "nameless", func(s *snap.VolumeSnapshot) error {
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
		w.isSo(kinds, "nameless", func(s *snap.VolumeSnapshot) error {
			if !s.Status.Error.Time.Equal(since) {
				return fmt.Errorf("it failed at %s, and says %s", since, s.Status.Error.Time)
			}
			return nil
		})
		w.custom(kinds["VolumeSnapshot"], "metadata: {name: unclassed}\nspec: {volumeSnapshotClassName: none, source: {persistentVolumeClaimName: data}}")
		w.isSo(kinds, "unclassed", failedWith(`VolumeSnapshotClass "none" does not exist`))
		w.custom(kinds["VolumeSnapshotClass"], "metadata: {name: others}\ndriver: other.example\ndeletionPolicy: Delete")
		w.custom(kinds["VolumeSnapshot"], "metadata: {name: misclassed}\nspec: {volumeSnapshotClassName: others, source: {persistentVolumeClaimName: data}}")
		w.isSo(kinds, "misclassed", failedWith(`VolumeSnapshotClass "others" is of CSI driver other.example, and the volume of the claim is of `+ownDriver))
		for _, name := range []string{"early", "two", "nameless", "unclassed", "misclassed"} {
			w.remove(kinds["VolumeSnapshot"], name)
			w.goneOf(kinds["VolumeSnapshot"], name)
		}
		w.eventually("nothing is left", func() error { return w.contents(kinds, 0, 0) })
	})
}

// Whoever brings definitions of his own has a snapshot controller of his own, and a driver with a snapshotter is left to that.
func TestOthersSnapshots(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{quiet: true})
		w.driverOn("w1")
		w.class("now", storagev1.VolumeBindingImmediate, corev1.PersistentVolumeReclaimDelete)
		kinds := w.snapshots()
		w.create(classed("data", "now", "1Gi"))
		w.boundTo("data")
		update(w, ownDriver, func(d *storagev1.CSIDriver) { d.Annotations = nil })
		w.snapshotOf(kinds, "bound", "data")
		time.Sleep(time.Minute)
		if err := w.contents(kinds, 1, 0); err != nil {
			t.Errorf("a driver with a snapshotter: %v", err)
		}
		update(w, "volumesnapshots."+snap.GroupName, func(d *extensionsv1.CustomResourceDefinition) { d.Annotations = nil })
		time.Sleep(time.Second) // virtual time: until the leader has observed it
		w.snapshotOf(kinds, "theirs", "data")
		time.Sleep(time.Minute)
		if err := w.contents(kinds, 1, 0); err != nil {
			t.Errorf("definitions of somebody else: %v", err)
		}
	})
}

// taken waits until the driver has a snapshot.
func (w *world) taken(kinds map[string]*api.Kind, name string) {
	w.t.Helper()
	s, err := controllers.GetTyped[snap.VolumeSnapshot](w.ctx, w.admin, kinds["VolumeSnapshot"], "default", name)
	if err != nil {
		w.t.Fatal(err)
	}
	w.within(10*time.Minute, name+" is taken", func() (err error) {
		w.drivers.set(func() {
			if w.drivers.snaps["snapshot-"+string(s.Typed.UID)] == nil {
				err = fmt.Errorf("the driver has %d", len(w.drivers.snaps))
			}
		})
		return err
	})
}

// Regardless of lost calls, crashes and leader changes: snapshots that stay become ready, and of
// deleted snapshots nothing is left, whenever they are deleted.
func TestSnapshotsUnderFailures(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w, replaced := led(t, options{quiet: true, change: failing("volume-snapshotter", 2, 2*time.Millisecond)}, controllers.Options{Resync: time.Second}, "w1", "w2")
		kinds := w.snapshots()
		for _, c := range []string{"a", "b", "c"} {
			w.create(classed(c, "now", "1Gi"))
			w.boundTo(c)
		}
		r := rand.New(rand.NewPCG(7, 8))
		w.drivers.set(func() { w.drivers.flaky, w.drivers.slow = rand.New(rand.NewPCG(5, 6)), 1 })
		var live []string
		for i := range 30 {
			name := fmt.Sprint("s", i)
			w.snapshotOf(kinds, name, []string{"a", "b", "c"}[i%3])
			live = append(live, name)
			time.Sleep(time.Duration(r.IntN(30)) * time.Millisecond)
			if r.IntN(2) == 0 {
				k := r.IntN(len(live))
				w.remove(kinds["VolumeSnapshot"], live[k])
				live = append(live[:k:k], live[k+1:]...)
			}
			if i%8 == 7 {
				replaced()
			}
			if i%6 == 5 { // taken, but the response was lost: it is deleted before the call is repeated
				unheard := fmt.Sprint("unheard", i)
				w.drivers.set(func() { w.drivers.mute = true })
				w.snapshotOf(kinds, unheard, "a")
				w.taken(kinds, unheard)
				w.remove(kinds["VolumeSnapshot"], unheard)
				w.drivers.set(func() { w.drivers.mute = false })
			}
		}
		w.drivers.set(func() { w.drivers.flaky = nil })
		for _, name := range live {
			w.isSo(kinds, name, ready)
		}
		w.within(5*time.Minute, "one for each", func() error { return w.contents(kinds, len(live), len(live)) })
		for _, name := range live {
			w.remove(kinds["VolumeSnapshot"], name)
		}
		w.within(5*time.Minute, "nothing is left", func() error { return w.contents(kinds, 0, 0) })
		for _, c := range []string{"a", "b", "c"} {
			w.claimIs(c, func(c *corev1.PersistentVolumeClaim) bool {
				return !strings.Contains(strings.Join(c.Finalizers, " "), "pvc-as-source")
			})
		}
	})
}

// A snapshot that is deleted while it is unknown whether it was taken deletes the taken snapshot.
func TestSnapshotOfWhichNobodyHeard(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{engine: controllers.Options{Resync: time.Minute}, quiet: true})
		w.driverOn("w1")
		w.class("now", storagev1.VolumeBindingImmediate, corev1.PersistentVolumeReclaimDelete)
		kinds := w.snapshots()
		w.create(classed("data", "now", "1Gi"))
		w.boundTo("data")
		w.drivers.set(func() { w.drivers.mute = true })
		w.snapshotOf(kinds, "s", "data")
		w.eventually("it is taken", func() error { return w.contents(kinds, 1, 1) })
		w.remove(kinds["VolumeSnapshot"], "s")
		time.Sleep(time.Minute)
		if err := w.contents(kinds, 1, 1); err != nil {
			t.Errorf("while nobody knows what became of it: %v", err)
		}
		w.drivers.set(func() { w.drivers.mute = false })
		w.goneOf(kinds["VolumeSnapshot"], "s")
		w.within(10*time.Minute, "nothing is left", func() error { return w.contents(kinds, 0, 0) })
	})
}

// F110: a claim gets a volume with the data of a snapshot or another claim, on a node that can
// reach the data, whichever node was selected before. A claim that cannot gets an event with the
// reason.
func TestVolumesOfSnapshots(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{engine: controllers.Options{OwnIdentity: true, Resync: time.Minute}, quiet: true})
		w.driverOn("w1", "w2")
		w.class("waits", storagev1.VolumeBindingWaitForFirstConsumer, corev1.PersistentVolumeReclaimDelete)
		kinds := w.snapshots()
		w.create(classed("data", "waits", "1Gi"))
		w.selected("data", "w2")
		w.boundTo("data")
		group := snap.GroupName
		from := func(name, size, kind, source string) {
			c := classed(name, "waits", size)
			c.Spec.DataSource = &corev1.TypedLocalObjectReference{Kind: kind, Name: source}
			if kind == "VolumeSnapshot" {
				c.Spec.DataSource.APIGroup = &group
			}
			w.create(c)
		}
		from("restored", "2Gi", "VolumeSnapshot", "s")
		w.event("ProvisioningFailed", `failed to provision volume: VolumeSnapshot s cannot be read: volumesnapshots.snapshot.storage.k8s.io "s" not found`)
		w.snapshotOf(kinds, "s", "data")
		w.isSo(kinds, "s", ready)
		from("clone", "1Gi", "PersistentVolumeClaim", "data")
		from("small", "512Mi", "VolumeSnapshot", "s")
		w.event("ProvisioningFailed", "failed to provision volume: the claim wants 512Mi, and VolumeSnapshot s has 1Gi: request that or more")
		for _, name := range []string{"restored", "clone"} {
			w.claimIs(name, func(c *corev1.PersistentVolumeClaim) bool {
				return strings.Contains(c.Annotations[controllers.ReachedFromAnnotation], `"w2"`)
			})
			w.selected(name, "w1")
			w.claimIs(name, func(c *corev1.PersistentVolumeClaim) bool {
				return c.Annotations["volume.kubernetes.io/selected-node"] == ""
			})
			w.selected(name, "w2")
			if m := w.drivers.get(w.volumeOf(name).Name); m == nil || m.node != "w2" || m.of == "" {
				t.Errorf("the volume of claim %s is %+v", name, m)
			}
		}
		w.remove(kinds["VolumeSnapshot"], "s")
		time.Sleep(time.Minute)
		if err := w.contents(kinds, 1, 1); err != nil {
			t.Errorf("a snapshot of which a claim waits for its volume: %v", err)
		}
		w.deleteClaim("small")
		w.goneOf(kinds["VolumeSnapshot"], "s")
	})
}
