package controllers_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	groups "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumegroupsnapshot/v1"
	snap "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/custom"
	"keelson.dev/keelson/controlplane/controllers"
	"keelson.dev/keelson/internal/virtual"
)

// group is the GroupController service of a node's driver: a group is its snapshots.
func (d *drivers) group(node, method string, request []byte) (proto.Message, error) {
	answer := func(id string) *csi.VolumeGroupSnapshot {
		g := &csi.VolumeGroupSnapshot{GroupSnapshotId: id, CreationTime: timestamppb.New(time.Unix(1e9, 0)), ReadyToUse: true}
		for name, s := range d.snaps {
			if s.in == id && s.node == node {
				g.ReadyToUse = g.ReadyToUse && s.left == 0
				g.Snapshots = append(g.Snapshots, &csi.Snapshot{SnapshotId: name, SourceVolumeId: s.of, SizeBytes: s.size,
					CreationTime: g.CreationTime, ReadyToUse: s.left == 0, GroupSnapshotId: id})
			}
		}
		slices.SortFunc(g.Snapshots, func(a, b *csi.Snapshot) int { return strings.Compare(a.SnapshotId, b.SnapshotId) })
		return g
	}
	switch method[strings.LastIndex(method, "/")+1:] {
	case "GroupControllerGetCapabilities":
		if d.single {
			return nil, status.Error(codes.Unimplemented, "unknown service")
		}
		const can = csi.GroupControllerServiceCapability_RPC_CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT
		return &csi.GroupControllerGetCapabilitiesResponse{Capabilities: []*csi.GroupControllerServiceCapability{
			{Type: &csi.GroupControllerServiceCapability_Rpc{Rpc: &csi.GroupControllerServiceCapability_RPC{Type: can}}}}}, nil
	case "CreateVolumeGroupSnapshot":
		q := &csi.CreateVolumeGroupSnapshotRequest{}
		if err := proto.Unmarshal(request, q); err != nil {
			return nil, err
		}
		d.told = q.Secrets
		for _, id := range q.SourceVolumeIds {
			if v := d.volumes[id]; v == nil || v.node != node {
				return nil, status.Errorf(codes.NotFound, "volume %s is not on node %s", id, node)
			}
		}
		for _, id := range q.SourceVolumeIds {
			if s := d.snaps[q.Name+"/"+id]; s == nil {
				d.snaps[q.Name+"/"+id] = &onDisk{node: node, size: d.volumes[id].size, of: id, left: d.slow, in: q.Name}
			} else if s.left > 0 {
				s.left--
			}
		}
		return &csi.CreateVolumeGroupSnapshotResponse{GroupSnapshot: answer(q.Name)}, nil
	case "DeleteVolumeGroupSnapshot":
		q := &csi.DeleteVolumeGroupSnapshotRequest{}
		if err := proto.Unmarshal(request, q); err != nil {
			return nil, err
		}
		for name, s := range d.snaps {
			if s.in == q.GroupSnapshotId && s.node == node {
				delete(d.snaps, name)
			}
		}
		return &csi.DeleteVolumeGroupSnapshotResponse{}, nil
	}
	q := &csi.GetVolumeGroupSnapshotRequest{}
	if err := proto.Unmarshal(request, q); err != nil {
		return nil, err
	}
	if g := answer(q.GroupSnapshotId); len(g.Snapshots) > 0 {
		return &csi.GetVolumeGroupSnapshotResponse{GroupSnapshot: g}, nil
	}
	return nil, status.Errorf(codes.NotFound, "group %s is not on node %s", q.GroupSnapshotId, node)
}

// groupKinds adds the group snapshot kinds to the snapshot kinds, with a default class.
func (w *world) groupKinds(kinds map[string]*api.Kind) {
	w.t.Helper()
	for kind, plural := range map[string]string{"VolumeGroupSnapshot": "volumegroupsnapshots", "VolumeGroupSnapshotContent": "volumegroupsnapshotcontents",
		"VolumeGroupSnapshotClass": "volumegroupsnapshotclasses"} {
		of := custom.Resource{Group: groups.GroupName, Kind: kind, Plural: plural, Singular: strings.ToLower(kind), Namespaced: kind == "VolumeGroupSnapshot"}
		kinds[kind] = custom.NewKind(of, "v1", kind != "VolumeGroupSnapshotClass", custom.NewStorage(of, "v1"))
		if err := w.admin.Kinds().Register(kinds[kind]); err != nil {
			w.t.Fatal(err)
		}
	}
	w.custom(kinds["VolumeGroupSnapshotClass"], "metadata: {name: std, annotations: {groupsnapshot.storage.kubernetes.io/is-default-class: 'true'}}\ndriver: "+ownDriver+
		"\ndeletionPolicy: Delete\nparameters: {csi.storage.k8s.io/group-snapshotter-secret-name: s-key, csi.storage.k8s.io/group-snapshotter-secret-namespace: '${volumegroupsnapshot.namespace}'}")
}

// labelled creates a claim of an application and waits for its volume.
func (w *world) labelled(name, app string) {
	w.t.Helper()
	c := classed(name, "now", "1Gi")
	c.Labels = map[string]string{"app": app}
	w.create(c)
	w.boundTo(name)
}

func (w *world) groupOf(kinds map[string]*api.Kind, name, app string) {
	w.t.Helper()
	w.custom(kinds["VolumeGroupSnapshot"], fmt.Sprintf("metadata: {name: %s}\nspec: {source: {selector: {matchLabels: {app: %s}}}}", name, app))
}

// groupIs waits until a group is as wanted.
func (w *world) groupIs(kinds map[string]*api.Kind, name string, is func(*groups.VolumeGroupSnapshot) error) {
	w.t.Helper()
	w.checkEvery(100*time.Millisecond, 5*time.Minute, "group "+name, func() error {
		g, err := controllers.GetTyped[groups.VolumeGroupSnapshot](w.ctx, w.admin, kinds["VolumeGroupSnapshot"], "default", name)
		if err == nil {
			err = is(g.Typed)
		}
		return err
	})
}

func groupReady(g *groups.VolumeGroupSnapshot) error {
	if s := g.Status; s == nil || s.ReadyToUse == nil || !*s.ReadyToUse || s.Error != nil || s.CreationTime == nil || s.CreationTime.Unix() != 1e9 {
		return fmt.Errorf("its status is %+v", s)
	}
	return nil
}

func groupFailedWith(words string) func(*groups.VolumeGroupSnapshot) error {
	return func(g *groups.VolumeGroupSnapshot) error {
		if s := g.Status; s == nil || s.Error == nil || !strings.Contains(*s.Error.Message, words) || groupReady(g) == nil {
			return fmt.Errorf("its status is %+v", s)
		}
		return nil
	}
}

// membersOf are the snapshots of a group by the claims that they are of.
func (w *world) membersOf(kinds map[string]*api.Kind, group string) map[string]*snap.VolumeSnapshot {
	w.t.Helper()
	all, err := controllers.ListTyped[snap.VolumeSnapshot](w.ctx, w.admin, kinds["VolumeSnapshot"], "default")
	if err != nil {
		w.t.Fatal(err)
	}
	out := map[string]*snap.VolumeSnapshot{}
	for _, s := range all {
		if len(s.Typed.OwnerReferences) == 1 && s.Typed.OwnerReferences[0].Name == group && s.Typed.Spec.Source.PersistentVolumeClaimName != nil {
			out[*s.Typed.Spec.Source.PersistentVolumeClaimName] = s.Typed
		}
	}
	return out
}

// nothingGrouped is nil when no content of a group is there, nor a snapshot's, nor anything at a driver.
func (w *world) nothingGrouped(kinds map[string]*api.Kind) error {
	list, err := w.admin.ListKind(w.ctx, kinds["VolumeGroupSnapshotContent"], "")
	if err == nil && len(list) > 0 {
		err = fmt.Errorf("%d contents of groups", len(list))
	}
	if err != nil {
		return err
	}
	return w.contents(kinds, 0, 0)
}

func (w *world) unheld(names ...string) {
	w.t.Helper()
	for _, name := range names {
		w.claimIs(name, func(c *corev1.PersistentVolumeClaim) bool {
			return !strings.Contains(strings.Join(c.Finalizers, " "), "pvc-as-source")
		})
	}
}

// F110: a group has one snapshot of each claim that its selector matches, taken by one driver call.
// The snapshots become ready with the group, name their claims and their group, and are deleted
// with it. A pre-provisioned group is found.
func TestGroupsOfSnapshots(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{engine: controllers.Options{OwnIdentity: true, Resync: time.Minute}, quiet: true})
		w.driverOn("w1")
		w.class("now", storagev1.VolumeBindingImmediate, corev1.PersistentVolumeReclaimDelete)
		kinds := w.snapshots()
		w.groupKinds(kinds)
		w.labelled("data", "db")
		w.labelled("log", "db")
		w.labelled("other", "web")
		w.drivers.set(func() { w.drivers.slow = 3 })
		w.groupOf(kinds, "g", "db")
		w.groupIs(kinds, "g", groupReady)
		w.drivers.set(func() {
			if w.drivers.told["key"] != "open" {
				t.Errorf("the driver was given %v", w.drivers.told)
			}
		})
		members := w.membersOf(kinds, "g")
		if len(members) != 2 || members["data"] == nil || members["log"] == nil {
			t.Fatalf("its snapshots are of %v", members)
		}
		for claim, s := range members {
			if err := ready(s); err != nil || s.Status.VolumeGroupSnapshotName == nil || *s.Status.VolumeGroupSnapshotName != "g" {
				t.Errorf("the snapshot of %s: %v, %+v", claim, err, s.Status)
			}
		}
		if err := w.contents(kinds, 2, 2); err != nil {
			t.Error(err)
		}
		w.unheld("data", "log")

		w.remove(kinds["VolumeSnapshot"], members["data"].Name)
		time.Sleep(time.Minute)
		if err := w.contents(kinds, 2, 2); err != nil || len(w.membersOf(kinds, "g")) != 2 {
			t.Errorf("a snapshot of a group that is there went: %v", err)
		}
		c := classed("restored", "now", "1Gi")
		group := snap.GroupName
		c.Spec.DataSource = &corev1.TypedLocalObjectReference{APIGroup: &group, Kind: "VolumeSnapshot", Name: members["log"].Name}
		w.create(c)
		w.boundTo("restored")
		w.remove(kinds["VolumeGroupSnapshot"], "g")
		w.goneOf(kinds["VolumeGroupSnapshot"], "g")
		w.eventually("nothing is left", func() error { return w.nothingGrouped(kinds) })

		w.drivers.set(func() {
			w.drivers.snaps["old/x"] = &onDisk{node: "w1", size: 1 << 30, of: "x", in: "old"}
			w.drivers.snaps["old/y"] = &onDisk{node: "w1", size: 1 << 30, of: "y", in: "old"}
		})
		w.custom(kinds["VolumeGroupSnapshotContent"], "metadata: {name: old}\nspec: {deletionPolicy: Retain, driver: "+ownDriver+
			", source: {groupSnapshotHandles: {volumeGroupSnapshotHandle: old, volumeSnapshotHandles: [old/x, old/y]}}, volumeGroupSnapshotRef: {namespace: default, name: old}}")
		w.custom(kinds["VolumeGroupSnapshot"], "metadata: {name: old}\nspec: {source: {volumeGroupSnapshotContentName: old}}")
		w.groupIs(kinds, "old", groupReady)
		w.remove(kinds["VolumeGroupSnapshot"], "old")
		w.goneOf(kinds["VolumeGroupSnapshot"], "old")
		w.remove(kinds["VolumeGroupSnapshotContent"], "old")
		w.goneOf(kinds["VolumeGroupSnapshotContent"], "old")
		w.drivers.set(func() {
			if len(w.drivers.snaps) != 2 {
				t.Errorf("of a group that is kept there are %d", len(w.drivers.snaps))
			}
		})
	})
}

// The status of a group that cannot be taken names the problem, and nothing is left behind; the
// group is taken once the problem is fixed.
func TestGroupsSayWhyTheyWait(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{engine: controllers.Options{OwnIdentity: true, Resync: time.Minute}, quiet: true})
		w.driverOn("w1", "w2")
		w.class("waits", storagev1.VolumeBindingWaitForFirstConsumer, corev1.PersistentVolumeReclaimDelete)
		kinds := w.snapshots()
		w.groupKinds(kinds)
		on := func(name, node string) {
			c := classed(name, "waits", "1Gi")
			c.Labels = map[string]string{"app": "db"}
			w.create(c)
			w.selected(name, node)
			w.boundTo(name)
		}
		w.groupOf(kinds, "g", "db")
		w.groupIs(kinds, "g", groupFailedWith("no PersistentVolumeClaim of namespace default has the labels app=db"))
		unbound := classed("c", "waits", "1Gi")
		unbound.Labels = map[string]string{"app": "db"}
		w.create(unbound)
		w.groupIs(kinds, "g", groupFailedWith("PersistentVolumeClaim c is not bound to a volume yet"))
		w.deleteClaim("c")
		on("a", "w1")
		on("b", "w2")
		w.groupIs(kinds, "g", groupFailedWith("no node reaches the volumes of all claims (a on w1, b on w2): a group is of one moment on one node"))
		w.unheld("a", "b")
		if err := w.nothingGrouped(kinds); err != nil {
			t.Error(err)
		}
		w.drivers.set(func() { w.drivers.single = true })
		w.deleteClaim("b")
		w.groupIs(kinds, "g", groupFailedWith("CSI driver "+ownDriver+" takes no groups of snapshots"))
		w.drivers.set(func() { w.drivers.single = false })
		w.groupIs(kinds, "g", groupReady)
		w.remove(kinds["VolumeGroupSnapshot"], "g")
		w.goneOf(kinds["VolumeGroupSnapshot"], "g")
		w.custom(kinds["VolumeGroupSnapshot"], "metadata: {name: h}\nspec: {volumeGroupSnapshotClassName: none, source: {selector: {matchLabels: {app: db}}}}")
		w.groupIs(kinds, "h", groupFailedWith(`VolumeGroupSnapshotClass "none" does not exist`))
		w.remove(kinds["VolumeGroupSnapshot"], "h")
		w.goneOf(kinds["VolumeGroupSnapshot"], "h")
		w.eventually("nothing is left", func() error { return w.nothingGrouped(kinds) })
		w.unheld("a")
	})
}

// Regardless of lost calls, crashes and leader changes: groups that stay become ready, and of
// deleted groups nothing is left, whenever they are deleted.
func TestGroupsUnderFailures(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w, replaced := led(t, options{quiet: true, change: failing("volume-snapshotter", 2, 2*time.Millisecond)}, controllers.Options{Resync: time.Second}, "w1")
		kinds := w.snapshots()
		w.groupKinds(kinds)
		for _, c := range []string{"a", "b", "c"} {
			w.labelled(c, "db")
		}
		r := rand.New(rand.NewPCG(17, 18))
		w.drivers.set(func() { w.drivers.flaky, w.drivers.slow = rand.New(rand.NewPCG(15, 16)), 1 })
		var live []string
		for i := range 16 {
			name := fmt.Sprint("g", i)
			w.groupOf(kinds, name, "db")
			live = append(live, name)
			time.Sleep(time.Duration(r.IntN(60)) * time.Millisecond)
			if r.IntN(2) == 0 {
				k := r.IntN(len(live))
				w.remove(kinds["VolumeGroupSnapshot"], live[k])
				live = append(live[:k:k], live[k+1:]...)
			}
			if i%5 == 4 {
				replaced()
			}
		}
		w.drivers.set(func() { w.drivers.flaky = nil })
		for _, name := range live {
			w.groupIs(kinds, name, groupReady)
			if n := len(w.membersOf(kinds, name)); n != 3 {
				t.Errorf("group %s has %d snapshots", name, n)
			}
		}
		w.within(5*time.Minute, "three for each", func() error { return w.contents(kinds, 3*len(live), 3*len(live)) })
		for _, name := range live {
			w.remove(kinds["VolumeGroupSnapshot"], name)
		}
		w.within(10*time.Minute, "nothing is left", func() error { return w.nothingGrouped(kinds) })
		w.unheld("a", "b", "c")
	})
}

// A group that is deleted while it is unknown whether it was taken deletes the taken snapshots.
func TestGroupOfWhichNobodyHeard(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{engine: controllers.Options{Resync: time.Minute}, quiet: true})
		w.driverOn("w1")
		w.class("now", storagev1.VolumeBindingImmediate, corev1.PersistentVolumeReclaimDelete)
		kinds := w.snapshots()
		w.groupKinds(kinds)
		w.labelled("data", "db")
		w.drivers.set(func() { w.drivers.muteTakes = true })
		w.groupOf(kinds, "g", "db")
		has := func(n int) (err error) {
			w.drivers.set(func() {
				if len(w.drivers.snaps) != n {
					err = fmt.Errorf("the driver has %d snapshots", len(w.drivers.snaps))
				}
			})
			return err
		}
		w.eventually("it is taken", func() error { return has(1) })
		w.remove(kinds["VolumeGroupSnapshot"], "g")
		time.Sleep(time.Minute) // virtual
		if err := has(1); err != nil {
			t.Errorf("while nobody knows what became of it: %v", err)
		}
		w.drivers.set(func() { w.drivers.muteTakes = false })
		w.goneOf(kinds["VolumeGroupSnapshot"], "g")
		w.within(10*time.Minute, "nothing is left", func() error { return w.nothingGrouped(kinds) })
	})
}
