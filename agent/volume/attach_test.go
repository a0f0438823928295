package volume

import (
	"context"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/fake"
	"keelson.dev/keelson/agent/volume/iscsi"
)

const odd = v1.UniqueVolumeName("kubernetes.io/csi/odd.example^vol-1")

// attachment puts what attaches a volume to the node: by another PersistentVolume, which shows the same.
func attachment(c *fake.Cluster, handle string, change func(*storagev1.VolumeAttachment)) {
	name := "other"
	a := &storagev1.VolumeAttachment{Spec: storagev1.VolumeAttachmentSpec{Attacher: "odd.example", NodeName: "here", Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: &name}},
		Status: storagev1.VolumeAttachmentStatus{Attached: true, AttachmentMetadata: map[string]string{"device": "/dev/odd"}}}
	change(a)
	a.Name = agent.AttachmentName(handle, a.Spec.Attacher, a.Spec.NodeName)
	c.Put(a)
}

// known puts what the control plane says of the node.
func known(c *fake.Cluster, ready v1.ConditionStatus, inUse, attached bool) {
	n := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "here"}, Status: v1.NodeStatus{Conditions: []v1.NodeCondition{{Type: v1.NodeReady, Status: ready}}}}
	if inUse {
		n.Status.VolumesInUse = []v1.UniqueVolumeName{odd}
	}
	if attached {
		n.Status.VolumesAttached = []v1.AttachedVolume{{Name: odd}}
	}
	c.Put(n)
}

// F110: why a node may not mount a volume yet, in words. Another PersistentVolume by which the node has it does as well.
func TestMayMount(t *testing.T) {
	v, c, _, _ := withDriver(t)
	disk := source{name: "pv", driver: "odd.example", handle: "vol-1"}
	says := func(want string) {
		t.Helper()
		_, why := v.mayMount(disk)
		if want == "" && why != "" || !strings.Contains(why, want) {
			t.Errorf("%q does not say %q", why, want)
		}
	}
	known(c, v1.ConditionTrue, false, false)
	says("no VolumeAttachment to this node yet")
	attachment(c, "vol-1", func(a *storagev1.VolumeAttachment) { a.Spec.NodeName = "there" })
	says("no VolumeAttachment to this node yet")
	attachment(c, "vol-2", func(a *storagev1.VolumeAttachment) {})
	says("no VolumeAttachment to this node yet")
	attachment(c, "vol-1", func(a *storagev1.VolumeAttachment) { a.Status.Attached = false })
	says("waiting for the attacher of CSI driver odd.example (VolumeAttachment csi-")
	attachment(c, "vol-1", func(a *storagev1.VolumeAttachment) {
		a.Status = storagev1.VolumeAttachmentStatus{AttachError: &storagev1.VolumeError{Message: "no such disk"}}
	})
	says("CSI driver odd.example: no such disk")
	attachment(c, "vol-1", func(a *storagev1.VolumeAttachment) {})
	says("waiting for the control plane to know that this node uses it")
	known(c, v1.ConditionTrue, true, false)
	says("status.volumesAttached does not name it")
	known(c, v1.ConditionUnknown, true, true)
	says("waiting for the control plane to know that this node uses it")
	known(c, v1.ConditionTrue, true, true)
	says("")
	v.cfg.Fenced = func() bool { return true }
	says("not been heard for too long")
	v.cfg.Fenced = nil
	confirm := c.Unconfirmed()
	says("not been heard since the agent began")
	confirm()
	says("")
}

// F110: a node tells that it uses a volume before the driver is first called, mounts it once it is attached, and tells so
// until it is unmounted; the next agent knows as much.
func TestAttachedVolume(t *testing.T) {
	v, c, d, claim := withDriver(t)
	c.Put(&storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: "odd.example"}})
	known(c, v1.ConditionTrue, false, false)
	holds := false
	uses := func(v *Volumes, want bool) {
		t.Helper()
		names, held, err := v.InUse()
		must(t, err)
		if slices.Equal(held, []v1.UniqueVolumeName{odd}) != holds || !holds && len(held) > 0 {
			t.Errorf("held %v, want %v", held, holds)
		}
		pods, err := v.Attached()
		must(t, err)
		if slices.Equal(names, []v1.UniqueVolumeName{odd}) != want || slices.Equal(pods, []types.UID{"u1"}) != want || !want && len(names)+len(pods) > 0 {
			t.Errorf("in use %v by %v, want %v", names, pods, want)
		}
	}
	uses(v, false)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := v.MountAll(ctx, pod("u1", claim))
		done <- err
	}()
	<-v.UsesChanged()
	uses(v, true)
	cancel()
	if err := <-done; err == nil || len(d.staged) > 0 {
		t.Fatalf("staged %v: %v", d.staged, err)
	}
	next := New(v.cfg) // an agent that is killed meanwhile leaves word that nothing was done for the volume
	uses(next, true)
	tried, stop := context.WithCancel(t.Context())
	stop()
	if _, err := next.MountAll(tried, pod("u1", claim)); err == nil {
		t.Error("mounted")
	}
	uses(next, true)
	attachment(c, "vol-1", func(*storagev1.VolumeAttachment) {})
	known(c, v1.ConditionTrue, true, true)
	_, err := v.MountAll(t.Context(), pod("u1", claim))
	must(t, err)
	if d.context["device"] != "/dev/odd" {
		t.Errorf("the driver was told %v", d.context)
	}
	holds = true
	<-v.UsesChanged()
	next = New(v.cfg)
	uses(next, true)
	known(c, v1.ConditionUnknown, true, false) // a pod that runs on it keeps it
	_, err = next.MountAll(t.Context(), pod("u1", claim))
	must(t, err)
	must(t, next.UnmountAll(t.Context(), "u1"))
	holds = false
	uses(next, false)
	// A record of a release that did not write that it waits leaves open what was done, also once it is written anew.
	file := v.recordFile("u3", "data")
	must(t, writeRecord(file, map[string]any{"driver": "odd.example", "volume": "vol-1", "attach": true}))
	if awaits(file) || !awaits(v.recordFile("u4", "data")) {
		t.Error("what a record says of waiting is not so")
	}
	if _, held, err := v.InUse(); err != nil || !slices.Equal(held, []v1.UniqueVolumeName{odd}) {
		t.Errorf("held %v, %v", held, err)
	}
}

// F110: the disk of an iSCSI target that a claim is bound to is told of before the target is asked for anything, and until it is gone; one
// that a pod names itself is not attached.
func TestDisksAreAttached(t *testing.T) {
	v, c, _ := newVolumes(t)
	v.cfg.ISCSI.Kernel = iscsi.Kernel{Sys: t.TempDir(), Dev: t.TempDir()}
	t.Setenv("PATH", t.TempDir()) // nobody is asked
	disk := v1.ISCSIPersistentVolumeSource{TargetPortal: "192.0.2.1", IQN: "iqn.2026-01.example:disks", Lun: 3}
	claim := onDisk(c, v1.LocalVolumeSource{})
	pv, _ := c.PersistentVolume("pv")
	pv = pv.DeepCopy()
	pv.Spec.PersistentVolumeSource = v1.PersistentVolumeSource{ISCSI: &disk}
	c.Put(pv)
	name := v1.UniqueVolumeName("kubernetes.io/iscsi/iqn.2026-01.example:disks:3")
	says := func(want string, holds bool) {
		t.Helper()
		_, err := v.MountAll(t.Context(), pod("u1", claim))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
		names, held, err := v.InUse()
		users, uerr := v.Attached()
		if slices.Equal(held, []v1.UniqueVolumeName{name}) != holds || !holds && len(held) > 0 {
			t.Errorf("held %v, want %v", held, holds)
		}
		if err != nil || uerr != nil || !slices.Equal(names, []v1.UniqueVolumeName{name}) || !slices.Equal(users, []types.UID{"u1"}) {
			t.Errorf("in use %v by %v (%v, %v)", names, users, err, uerr)
		}
	}
	known(c, v1.ConditionTrue, false, false)
	says(`persistentvolume "pv" is not attached to this node: it has no VolumeAttachment to this node yet`, false)
	attachment(c, "iqn.2026-01.example:disks:3", func(a *storagev1.VolumeAttachment) { a.Spec.Attacher, a.Status.Attached = "iscsi.keelson.dev", false })
	says("waiting for the control plane (VolumeAttachment csi-", false)
	attachment(c, "iqn.2026-01.example:disks:3", func(a *storagev1.VolumeAttachment) { a.Spec.Attacher = "iscsi.keelson.dev" })
	says("waiting for the control plane to know that this node uses it", false)
	n, _ := c.Node()
	n = n.DeepCopy()
	n.Status.VolumesInUse, n.Status.VolumesAttached = []v1.UniqueVolumeName{name}, []v1.AttachedVolume{{Name: name}}
	c.Put(n)
	says("iscsiadm is not on this node", true)
	v = New(v.cfg)
	n = n.DeepCopy()
	n.Status.VolumesAttached = nil // whatever comes, it may have been mounted
	c.Put(n)
	says("volumesAttached does not name it", true)
	must(t, v.UnmountAll(t.Context(), "u1"))
	inline := volume("data", v1.VolumeSource{ISCSI: &v1.ISCSIVolumeSource{TargetPortal: disk.TargetPortal, IQN: disk.IQN, Lun: disk.Lun}})
	if _, err := v.MountAll(t.Context(), pod("u2", inline)); err == nil || !strings.Contains(err.Error(), "iscsiadm is not on this node") {
		t.Errorf("%v", err)
	}
	if names, _, err := v.InUse(); err != nil || len(names) > 0 {
		t.Errorf("in use %v, %v", names, err)
	}
	must(t, v.UnmountAll(t.Context(), "u2"))
}
