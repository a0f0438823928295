package volumesnapshot_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	groups "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumegroupsnapshot/v1"
	snap "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/custom"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
)

// groupKinds adds the group snapshot kinds to the snapshot kinds, with a default class.
func groupKinds(w *testcluster.Cluster, kinds map[string]*api.Kind) {
	w.T.Helper()
	for kind, plural := range map[string]string{"VolumeGroupSnapshot": "volumegroupsnapshots",
		"VolumeGroupSnapshotContent": "volumegroupsnapshotcontents",
		"VolumeGroupSnapshotClass":   "volumegroupsnapshotclasses"} {
		of := custom.Resource{Group: groups.GroupName, Kind: kind, Plural: plural, Singular: strings.ToLower(kind),
			Namespaced: kind == "VolumeGroupSnapshot"}
		kinds[kind] = custom.NewKind(of, "v1", kind != "VolumeGroupSnapshotClass", custom.NewStorage(of, "v1"))
		if err := w.Admin.Kinds().Register(kinds[kind]); err != nil {
			w.T.Fatal(err)
		}
	}
	testcluster.CreateCustom(w, kinds["VolumeGroupSnapshotClass"],
		"metadata: {name: std, annotations: {groupsnapshot.storage.kubernetes.io/is-default-class: 'true'}}\ndriver: "+
			testcluster.OwnDriver+
			"\ndeletionPolicy: Delete\nparameters: {csi.storage.k8s.io/group-snapshotter-secret-name: s-key, "+
			"csi.storage.k8s.io/group-snapshotter-secret-namespace: '${volumegroupsnapshot.namespace}'}")
}

// labelled creates a claim of an application and waits for its volume.
func labelled(w *testcluster.Cluster, name, app string) {
	w.T.Helper()
	c := testcluster.NewClassClaim(name, "now", "1Gi")
	c.Labels = map[string]string{"app": app}
	w.CreateObject(c)
	w.AwaitBound(name)
}

func groupOf(w *testcluster.Cluster, kinds map[string]*api.Kind, name, app string) {
	w.T.Helper()
	testcluster.CreateCustom(w, kinds["VolumeGroupSnapshot"],
		fmt.Sprintf("metadata: {name: %s}\nspec: {source: {selector: {matchLabels: {app: %s}}}}", name, app))
}

// groupIs waits until a group is as wanted.
func groupIs(
	w *testcluster.Cluster, kinds map[string]*api.Kind, name string, is func(*groups.VolumeGroupSnapshot) error,
) {
	w.T.Helper()
	w.CheckEvery(100*time.Millisecond, 5*time.Minute, "group "+name, func() error {
		g, err := engine.GetTyped[groups.VolumeGroupSnapshot](w.Ctx, w.Admin, kinds["VolumeGroupSnapshot"],
			"default", name)
		if err == nil {
			err = is(g.Typed)
		}
		return err
	})
}

func groupReady(g *groups.VolumeGroupSnapshot) error {
	if s := g.Status; s == nil || s.ReadyToUse == nil || !*s.ReadyToUse || s.Error != nil || s.CreationTime == nil ||
		s.CreationTime.Unix() != 1e9 {
		return fmt.Errorf("its status is %+v", s)
	}
	return nil
}

func groupFailedWith(words string) func(*groups.VolumeGroupSnapshot) error {
	return func(g *groups.VolumeGroupSnapshot) error {
		if s := g.Status; s == nil || s.Error == nil || !strings.Contains(*s.Error.Message, words) ||
			groupReady(g) == nil {
			return fmt.Errorf("its status is %+v", s)
		}
		return nil
	}
}

// membersOf are the snapshots of a group by the claims that they are of.
func membersOf(w *testcluster.Cluster, kinds map[string]*api.Kind, group string) map[string]*snap.VolumeSnapshot {
	w.T.Helper()
	all, err := engine.ListTyped[snap.VolumeSnapshot](w.Ctx, w.Admin, kinds["VolumeSnapshot"], "default")
	if err != nil {
		w.T.Fatal(err)
	}
	out := map[string]*snap.VolumeSnapshot{}
	for _, s := range all {
		if len(s.Typed.OwnerReferences) == 1 && s.Typed.OwnerReferences[0].Name == group &&
			s.Typed.Spec.Source.PersistentVolumeClaimName != nil {
			out[*s.Typed.Spec.Source.PersistentVolumeClaimName] = s.Typed
		}
	}
	return out
}

// nothingGrouped is nil when no content of a group is there, nor a snapshot's, nor anything at a driver.
func nothingGrouped(w *testcluster.Cluster, kinds map[string]*api.Kind) error {
	list, err := w.Admin.ListKind(w.Ctx, kinds["VolumeGroupSnapshotContent"], "")
	if err == nil && len(list) > 0 {
		err = fmt.Errorf("%d contents of groups", len(list))
	}
	if err != nil {
		return err
	}
	return testcluster.CheckContents(w, kinds, 0, 0)
}

func unheld(w *testcluster.Cluster, names ...string) {
	w.T.Helper()
	for _, name := range names {
		w.AwaitClaim(name, func(c *corev1.PersistentVolumeClaim) bool {
			return !strings.Contains(strings.Join(c.Finalizers, " "), "pvc-as-source")
		})
	}
}

// F110: a group has one snapshot of each claim that its selector matches, taken by one driver call.
// The snapshots become ready with the group, name their claims and their group, and are deleted
// with it. A pre-provisioned group is found.
func TestGroupsOfSnapshots(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{Engine: engine.Options{OwnIdentity: true,
			Resync: time.Minute}, NoMutationGuard: true})
		w.AddDriver("w1")
		w.CreateClass("now", storagev1.VolumeBindingImmediate, corev1.PersistentVolumeReclaimDelete)
		kinds := testcluster.AddSnapshotKinds(w)
		groupKinds(w, kinds)
		labelled(w, "data", "db")
		labelled(w, "log", "db")
		labelled(w, "other", "web")
		w.Drivers.Change(func() { w.Drivers.SnapshotDelay = 3 })
		groupOf(w, kinds, "g", "db")
		groupIs(w, kinds, "g", groupReady)
		w.Drivers.Change(func() {
			if w.Drivers.SnapshotSecrets["key"] != "open" {
				t.Errorf("the driver was given %v", w.Drivers.SnapshotSecrets)
			}
		})
		members := membersOf(w, kinds, "g")
		if len(members) != 2 || members["data"] == nil || members["log"] == nil {
			t.Fatalf("its snapshots are of %v", members)
		}
		for claim, s := range members {
			if err := testcluster.CheckSnapshotReady(s); err != nil || s.Status.VolumeGroupSnapshotName == nil ||
				*s.Status.VolumeGroupSnapshotName != "g" {
				t.Errorf("the snapshot of %s: %v, %+v", claim, err, s.Status)
			}
		}
		if err := testcluster.CheckContents(w, kinds, 2, 2); err != nil {
			t.Error(err)
		}
		unheld(w, "data", "log")

		testcluster.DeleteCustom(w, kinds["VolumeSnapshot"], members["data"].Name)
		time.Sleep(time.Minute)
		if err := testcluster.CheckContents(w, kinds, 2, 2); err != nil || len(membersOf(w, kinds, "g")) != 2 {
			t.Errorf("a snapshot of a group that is there went: %v", err)
		}
		c := testcluster.NewClassClaim("restored", "now", "1Gi")
		group := snap.GroupName
		c.Spec.DataSource = &corev1.TypedLocalObjectReference{APIGroup: &group, Kind: "VolumeSnapshot",
			Name: members["log"].Name}
		w.CreateObject(c)
		w.AwaitBound("restored")
		testcluster.DeleteCustom(w, kinds["VolumeGroupSnapshot"], "g")
		testcluster.AwaitCustomDeleted(w, kinds["VolumeGroupSnapshot"], "g")
		w.Eventually("nothing is left", func() error { return nothingGrouped(w, kinds) })

		w.Drivers.Change(func() {
			w.Drivers.Snapshots["old/x"] = &testcluster.StoredVolume{Node: "w1", Size: 1 << 30,
				Source: "x", Group: "old"}
			w.Drivers.Snapshots["old/y"] = &testcluster.StoredVolume{Node: "w1", Size: 1 << 30,
				Source: "y", Group: "old"}
		})
		testcluster.CreateCustom(w, kinds["VolumeGroupSnapshotContent"],
			"metadata: {name: old}\nspec: {deletionPolicy: Retain, driver: "+testcluster.OwnDriver+
				", source: {groupSnapshotHandles: {volumeGroupSnapshotHandle: old, volumeSnapshotHandles: [old/x, "+
				"old/y]}}, volumeGroupSnapshotRef: {namespace: default, name: old}}")
		testcluster.CreateCustom(w, kinds["VolumeGroupSnapshot"],
			"metadata: {name: old}\nspec: {source: {volumeGroupSnapshotContentName: old}}")
		groupIs(w, kinds, "old", groupReady)
		testcluster.DeleteCustom(w, kinds["VolumeGroupSnapshot"], "old")
		testcluster.AwaitCustomDeleted(w, kinds["VolumeGroupSnapshot"], "old")
		testcluster.DeleteCustom(w, kinds["VolumeGroupSnapshotContent"], "old")
		testcluster.AwaitCustomDeleted(w, kinds["VolumeGroupSnapshotContent"], "old")
		w.Drivers.Change(func() {
			if len(w.Drivers.Snapshots) != 2 {
				t.Errorf("of a group that is kept there are %d", len(w.Drivers.Snapshots))
			}
		})
	})
}

// The status of a group that cannot be taken names the problem, and nothing is left behind; the
// group is taken once the problem is fixed.
func TestGroupsSayWhyTheyWait(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{Engine: engine.Options{OwnIdentity: true,
			Resync: time.Minute}, NoMutationGuard: true})
		w.AddDriver("w1", "w2")
		w.CreateClass("waits", storagev1.VolumeBindingWaitForFirstConsumer, corev1.PersistentVolumeReclaimDelete)
		kinds := testcluster.AddSnapshotKinds(w)
		groupKinds(w, kinds)
		groupOf(w, kinds, "g", "db")
		groupIs(w, kinds, "g", groupFailedWith("no PersistentVolumeClaim of namespace default has the labels app=db"))
		unbound := testcluster.NewClassClaim("c", "waits", "1Gi")
		unbound.Labels = map[string]string{"app": "db"}
		w.CreateObject(unbound)
		groupIs(w, kinds, "g", groupFailedWith("PersistentVolumeClaim c is not bound to a volume yet"))
		w.DeleteClaim("c")
		// Both claims exist before one of them is bound: a group of one claim would be taken.
		for _, name := range []string{"a", "b"} {
			c := testcluster.NewClassClaim(name, "waits", "1Gi")
			c.Labels = map[string]string{"app": "db"}
			w.CreateObject(c)
		}
		for name, node := range map[string]string{"a": "w1", "b": "w2"} {
			w.SelectNode(name, node)
			w.AwaitBound(name)
		}
		groupIs(w, kinds, "g",
			groupFailedWith("no node reaches the volumes of all claims (a on w1, b on w2): a group snapshot is "+
				"taken on one node"))
		unheld(w, "a", "b")
		if err := nothingGrouped(w, kinds); err != nil {
			t.Error(err)
		}
		w.Drivers.Change(func() { w.Drivers.NoGroups = true })
		w.DeleteClaim("b")
		groupIs(w, kinds, "g", groupFailedWith("CSI driver "+testcluster.OwnDriver+" does not support group snapshots"))
		w.Drivers.Change(func() { w.Drivers.NoGroups = false })
		groupIs(w, kinds, "g", groupReady)
		testcluster.DeleteCustom(w, kinds["VolumeGroupSnapshot"], "g")
		testcluster.AwaitCustomDeleted(w, kinds["VolumeGroupSnapshot"], "g")
		testcluster.CreateCustom(w, kinds["VolumeGroupSnapshot"],
			"metadata: {name: h}\nspec: {volumeGroupSnapshotClassName: none, source: {selector: "+
				"{matchLabels: {app: db}}}}")
		groupIs(w, kinds, "h", groupFailedWith(`VolumeGroupSnapshotClass "none" does not exist`))
		testcluster.DeleteCustom(w, kinds["VolumeGroupSnapshot"], "h")
		testcluster.AwaitCustomDeleted(w, kinds["VolumeGroupSnapshot"], "h")
		w.Eventually("nothing is left", func() error { return nothingGrouped(w, kinds) })
		unheld(w, "a")
	})
}

// Regardless of lost calls, crashes and leader changes: groups that stay become ready, and of
// deleted groups nothing is left, whenever they are deleted.
func TestGroupsUnderFailures(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w, replaced := testcluster.LeadWithDriver(t,
			testcluster.Options{NoMutationGuard: true,
				ChangeController: testcluster.FailReconciles("volume-snapshotter", 2, 2*time.Millisecond)},
			engine.Options{Resync: time.Second}, "w1")
		kinds := testcluster.AddSnapshotKinds(w)
		groupKinds(w, kinds)
		for _, c := range []string{"a", "b", "c"} {
			labelled(w, c, "db")
		}
		r := rand.New(rand.NewPCG(17, 18))
		w.Drivers.Change(func() {
			w.Drivers.Faults.LossSource, w.Drivers.SnapshotDelay = rand.New(rand.NewPCG(15, 16)), 1
		})
		var live []string
		for i := range 16 {
			name := fmt.Sprint("g", i)
			groupOf(w, kinds, name, "db")
			live = append(live, name)
			time.Sleep(time.Duration(r.IntN(60)) * time.Millisecond)
			if r.IntN(2) == 0 {
				k := r.IntN(len(live))
				testcluster.DeleteCustom(w, kinds["VolumeGroupSnapshot"], live[k])
				live = append(live[:k:k], live[k+1:]...)
			}
			if i%5 == 4 {
				replaced()
			}
		}
		w.Drivers.Change(func() { w.Drivers.Faults.LossSource = nil })
		for _, name := range live {
			groupIs(w, kinds, name, groupReady)
			if n := len(membersOf(w, kinds, name)); n != 3 {
				t.Errorf("group %s has %d snapshots", name, n)
			}
		}
		w.EventuallyWithin(5*time.Minute, "three for each", func() error {
			return testcluster.CheckContents(w, kinds, 3*len(live), 3*len(live))
		})
		for _, name := range live {
			testcluster.DeleteCustom(w, kinds["VolumeGroupSnapshot"], name)
		}
		w.EventuallyWithin(10*time.Minute, "nothing is left", func() error { return nothingGrouped(w, kinds) })
		unheld(w, "a", "b", "c")
	})
}

// A group that is deleted while it is unknown whether it was taken deletes the taken snapshots.
func TestGroupOfWhichNobodyHeard(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{Engine: engine.Options{Resync: time.Minute},
			NoMutationGuard: true})
		w.AddDriver("w1")
		w.CreateClass("now", storagev1.VolumeBindingImmediate, corev1.PersistentVolumeReclaimDelete)
		kinds := testcluster.AddSnapshotKinds(w)
		groupKinds(w, kinds)
		labelled(w, "data", "db")
		w.Drivers.Change(func() { w.Drivers.Faults.LoseGroupResponses = true })
		groupOf(w, kinds, "g", "db")
		has := func(n int) (err error) {
			w.Drivers.Change(func() {
				if len(w.Drivers.Snapshots) != n {
					err = fmt.Errorf("the driver has %d snapshots", len(w.Drivers.Snapshots))
				}
			})
			return err
		}
		w.Eventually("it is taken", func() error { return has(1) })
		testcluster.DeleteCustom(w, kinds["VolumeGroupSnapshot"], "g")
		time.Sleep(time.Minute) // virtual
		if err := has(1); err != nil {
			t.Errorf("while nobody knows what became of it: %v", err)
		}
		w.Drivers.Change(func() { w.Drivers.Faults.LoseGroupResponses = false })
		testcluster.AwaitCustomDeleted(w, kinds["VolumeGroupSnapshot"], "g")
		w.EventuallyWithin(10*time.Minute, "nothing is left", func() error { return nothingGrouped(w, kinds) })
	})
}
