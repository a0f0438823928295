package volume

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
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
		names, held, err := v.VolumesInUse()
		must(t, err)
		if slices.Equal(held, []v1.UniqueVolumeName{odd}) != holds || !holds && len(held) > 0 {
			t.Errorf("held %v, want %v", held, holds)
		}
		pods, err := v.PodsWithAttachedVolumes()
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
}

// legacy is what a release that did not write whether a volume waits leaves of one that a pod has, or waits for.
func legacy(t *testing.T, file string, r any) {
	raw, err := json.Marshal(r)
	must(t, err)
	var fields map[string]any
	must(t, json.Unmarshal(raw, &fields))
	delete(fields, "awaits")
	must(t, writeRecord(file, fields))
}

// F110: nodes whose agents are upgraded while their pods wait for a volume do not say that they have it: the first that is given it gets
// it. One whose driver may have been asked says that it has it, until it is unmounted.
func TestAnUpgradeWhilePodsWait(t *testing.T) {
	type node struct {
		v     *Volumes
		c     *fake.Cluster
		claim v1.Volume
		file  string
		r     record
	}
	join := func(block bool) (n node) {
		n.v, n.c, _, n.claim = withDriver(t)
		n.c.Put(&storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: "odd.example"}})
		pv, _ := n.c.PersistentVolume("pv")
		if pv = pv.DeepCopy(); block {
			pv.Spec.VolumeMode = new(v1.PersistentVolumeMode)
			*pv.Spec.VolumeMode = v1.PersistentVolumeBlock
		}
		n.c.Put(pv)
		known(n.c, v1.ConditionTrue, false, false)
		var err error
		n.r, err = n.v.place("u1", "data", source{name: "pv", driver: "odd.example", handle: "vol-1", block: block})
		must(t, err)
		n.r.Attach = true
		n.file = n.v.recordFile("u1", "data")
		return n
	}
	holds := func(n node) bool {
		t.Helper()
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() {
			_, err := n.v.MountAll(ctx, pod("u1", n.claim))
			done <- err
		}()
		<-n.v.UsesChanged() // it waits
		if stop(); <-done == nil {
			t.Error("mounted")
		}
		names, held, err := n.v.VolumesInUse()
		if must(t, err); !slices.Equal(names, []v1.UniqueVolumeName{odd}) {
			t.Errorf("in use %v", names)
		}
		return len(held) > 0
	}
	a, b := join(false), join(false)
	for _, n := range []node{a, b} {
		legacy(t, n.file, n.r)
		if _, held, err := n.v.VolumesInUse(); err != nil || len(held) != 1 {
			t.Errorf("before anybody has looked: %v, %v", held, err)
		}
		if holds(n) || holds(n) {
			t.Error("a node that waits says that it has the volume")
		}
	}
	attachment(a.c, "vol-1", func(*storagev1.VolumeAttachment) {})
	known(a.c, v1.ConditionTrue, true, true)
	_, err := a.v.MountAll(t.Context(), pod("u1", a.claim))
	must(t, err)
	if _, held, err := a.v.VolumesInUse(); err != nil || len(held) != 1 {
		t.Errorf("the node that got it says %v, %v", held, err)
	}
	must(t, a.v.UnmountAll(t.Context(), "u1"))
	for name, block := range map[string]bool{"a folder of the pod": false, "a folder of all pods with the device": true} {
		n := join(block)
		must(t, os.MkdirAll(filepath.Dir(n.r.Target), 0o750))
		if legacy(t, n.file, n.r); !holds(n) || !holds(n) {
			t.Errorf("%s: the driver may have been asked, and the node says that it waits", name)
		}
	}
	n := join(true)
	if legacy(t, n.file, n.r); holds(n) {
		t.Error("a node that waits for a device says that it has it")
	}
	n = join(false)
	n.r.Ready = true // and unmounted by a reboot
	if legacy(t, n.file, n.r); !holds(n) {
		t.Error("what was ready counts as waited for")
	}
	n = join(false)
	must(t, os.MkdirAll(filepath.Dir(n.file), 0o750))
	must(t, os.WriteFile(n.file, []byte("{"), 0o600))
	if awaits(n.file, n.r.untouched) {
		t.Error("a record that cannot be read says that nothing was done")
	}
}

// session has the kernel find a unit of a target by a session that is down.
func session(t *testing.T, sys, target string, lun int) {
	of, device := filepath.Join(sys, "class/iscsi_session/session1"), filepath.Join(sys, "host3/session1")
	connection := filepath.Join(sys, "class/iscsi_connection/connection1:0")
	for file, text := range map[string]string{of + "/targetname": target, of + "/ifacename": "default", of + "/state": "FAILED", of + "/target_id": "0",
		connection + "/persistent_address": "192.0.2.1", connection + "/persistent_port": "3260"} {
		must(t, errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, []byte(text), 0o600)))
	}
	must(t, os.MkdirAll(filepath.Join(device, fmt.Sprintf("target3:0:0/3:0:0:%d", lun)), 0o755))
	if err := os.Symlink(device, filepath.Join(of, "device")); !errors.Is(err, os.ErrExist) {
		must(t, err)
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
		names, held, err := v.VolumesInUse()
		users, uerr := v.PodsWithAttachedVolumes()
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
	// After an upgrade while the pod waits: what the node has of the disk says whether anything was done.
	r := iscsiRecord{Version: 1, Target: disk.IQN, Interface: "default", LUN: 3, Attach: true}
	file := filepath.Join(v.podDir("u1"), "iscsi", "data.json")
	legacy(t, file, r)
	says("volumesAttached does not name it", false)
	legacy(t, file, r)
	untouched := func() bool {
		return v.iscsiUntouched(iscsiSource{disk: iscsi.Disk{Target: strings.ToUpper(disk.IQN), LUN: 3}}, r)
	}
	if session(t, v.cfg.ISCSI.Kernel.Sys, disk.IQN, 4); !awaits(file, untouched) {
		t.Error("another disk of the target counts as this one")
	}
	if session(t, v.cfg.ISCSI.Kernel.Sys, disk.IQN, 3); awaits(file, untouched) {
		t.Error("a disk that the kernel has counts as waited for")
	}
	must(t, os.RemoveAll(filepath.Join(v.cfg.ISCSI.Kernel.Sys, "class")))
	must(t, v.UnmountAll(t.Context(), "u1"))
	inline := volume("data", v1.VolumeSource{ISCSI: &v1.ISCSIVolumeSource{TargetPortal: disk.TargetPortal, IQN: disk.IQN, Lun: disk.Lun}})
	if _, err := v.MountAll(t.Context(), pod("u2", inline)); err == nil || !strings.Contains(err.Error(), "iscsiadm is not on this node") {
		t.Errorf("%v", err)
	}
	if names, _, err := v.VolumesInUse(); err != nil || len(names) > 0 {
		t.Errorf("in use %v, %v", names, err)
	}
	must(t, v.UnmountAll(t.Context(), "u2"))
}
