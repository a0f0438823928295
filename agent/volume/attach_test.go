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

// putAttachment stores a VolumeAttachment of the volume to the node, through another
// PersistentVolume with the same handle.
func putAttachment(c *fake.Cluster, handle string, change func(*storagev1.VolumeAttachment)) {
	name := "other"
	a := &storagev1.VolumeAttachment{Spec: storagev1.VolumeAttachmentSpec{Attacher: "odd.example", NodeName: "here",
		Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: &name}},
		Status: storagev1.VolumeAttachmentStatus{Attached: true,
			AttachmentMetadata: map[string]string{"device": "/dev/odd"}}}
	change(a)
	a.Name = agent.AttachmentName(handle, a.Spec.Attacher, a.Spec.NodeName)
	c.Put(a)
}

// setNodeStatus stores the Node as the control plane sends it.
func setNodeStatus(c *fake.Cluster, ready v1.ConditionStatus, inUse, attached bool) {
	n := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "here"},
		Status: v1.NodeStatus{Conditions: []v1.NodeCondition{{Type: v1.NodeReady, Status: ready}}}}
	if inUse {
		n.Status.VolumesInUse = []v1.UniqueVolumeName{odd}
	}
	if attached {
		n.Status.VolumesAttached = []v1.AttachedVolume{{Name: odd}}
	}
	c.Put(n)
}

// F110: a node that may not mount a volume yet reports why. An attachment through another
// PersistentVolume with the same handle is sufficient.
func TestMayMount(t *testing.T) {
	v, c, _, _ := withDriver(t)
	disk := csiSource{name: "pv", driver: "odd.example", handle: "vol-1"}
	says := func(want string) {
		t.Helper()
		_, why := v.attachments.mountBlocker(disk)
		if want == "" && why != "" || !strings.Contains(why, want) {
			t.Errorf("%q does not say %q", why, want)
		}
	}
	setNodeStatus(c, v1.ConditionTrue, false, false)
	says("no VolumeAttachment to this node yet")
	putAttachment(c, "vol-1", func(a *storagev1.VolumeAttachment) { a.Spec.NodeName = "there" })
	says("no VolumeAttachment to this node yet")
	putAttachment(c, "vol-2", func(a *storagev1.VolumeAttachment) {})
	says("no VolumeAttachment to this node yet")
	putAttachment(c, "vol-1", func(a *storagev1.VolumeAttachment) { a.Status.Attached = false })
	says("waiting for the attacher of CSI driver odd.example (VolumeAttachment csi-")
	putAttachment(c, "vol-1", func(a *storagev1.VolumeAttachment) {
		a.Status = storagev1.VolumeAttachmentStatus{AttachError: &storagev1.VolumeError{Message: "no such disk"}}
	})
	says("CSI driver odd.example: no such disk")
	putAttachment(c, "vol-1", func(a *storagev1.VolumeAttachment) {})
	says("waiting for the control plane to record that this node uses it")
	setNodeStatus(c, v1.ConditionTrue, true, false)
	says("status.volumesAttached does not list it")
	setNodeStatus(c, v1.ConditionUnknown, true, true)
	says("waiting for the control plane to record that this node uses it")
	setNodeStatus(c, v1.ConditionTrue, true, true)
	says("")
	v.cfg.Fenced = func() bool { return true }
	says("disconnected from the control plane for too long")
	v.cfg.Fenced = nil
	confirm := c.Unconfirmed()
	says("not reached the control plane since it started")
	confirm()
	says("")
}

// F110: a node reports that it uses a volume before the driver is first called. It mounts the
// volume once it is attached, and reports the use until it is unmounted. The next agent knows all
// of this.
func TestAttachedVolume(t *testing.T) {
	v, c, d, claim := withDriver(t)
	c.Put(&storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: "odd.example"}})
	setNodeStatus(c, v1.ConditionTrue, false, false)
	holds := false
	uses := func(v *Volumes, want bool) {
		t.Helper()
		names, held, err := v.VolumesInUse()
		requireNoError(t, err)
		if slices.Equal(held, []v1.UniqueVolumeName{odd}) != holds || !holds && len(held) > 0 {
			t.Errorf("held %v, want %v", held, holds)
		}
		pods, err := v.PodsWithAttachedVolumes()
		requireNoError(t, err)
		if slices.Equal(names, []v1.UniqueVolumeName{odd}) != want || slices.Equal(pods, []types.UID{"u1"}) != want ||
			!want && len(names)+len(pods) > 0 {
			t.Errorf("in use %v by %v, want %v", names, pods, want)
		}
	}
	uses(v, false)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := v.MountAll(ctx, newPod("u1", claim))
		done <- err
	}()
	<-v.UsesChanged()
	uses(v, true)
	cancel()
	if err := <-done; err == nil || len(d.staged) > 0 {
		t.Fatalf("staged %v: %v", d.staged, err)
	}
	next := New(*v.cfg) // an agent that was killed recorded that nothing was done for the volume
	uses(next, true)
	tried, stop := context.WithCancel(t.Context())
	stop()
	if _, err := next.MountAll(tried, newPod("u1", claim)); err == nil {
		t.Error("mounted")
	}
	uses(next, true)
	putAttachment(c, "vol-1", func(*storagev1.VolumeAttachment) {})
	setNodeStatus(c, v1.ConditionTrue, true, true)
	_, err := v.MountAll(t.Context(), newPod("u1", claim))
	requireNoError(t, err)
	if d.context["device"] != "/dev/odd" {
		t.Errorf("the driver was told %v", d.context)
	}
	holds = true
	<-v.UsesChanged()
	next = New(*v.cfg)
	uses(next, true)
	setNodeStatus(c, v1.ConditionUnknown, true, false) // a running pod keeps the volume
	_, err = next.MountAll(t.Context(), newPod("u1", claim))
	requireNoError(t, err)
	requireNoError(t, next.UnmountAll(t.Context(), "u1"))
	holds = false
	uses(next, false)
}

// writeLegacyRecord writes a record in the form of a release that did not store whether a volume
// waits for its attachment.
func writeLegacyRecord(t *testing.T, file string, r any) {
	raw, err := json.Marshal(r)
	requireNoError(t, err)
	var fields map[string]any
	requireNoError(t, json.Unmarshal(raw, &fields))
	delete(fields, "awaits")
	requireNoError(t, writeRecord(file, fields))
}

// F110: nodes whose agents are upgraded while their pods wait for a volume do not report that they
// hold it, so the first node can get it. A node whose driver may have been called reports that it
// holds the volume until it is unmounted.
func TestAnUpgradeWhilePodsWait(t *testing.T) {
	type node struct {
		v     *Volumes
		c     *fake.Cluster
		claim v1.Volume
		file  string
		r     csiRecord
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
		setNodeStatus(n.c, v1.ConditionTrue, false, false)
		var err error
		n.r, err = n.v.csi.csiPaths("u1", "data", csiSource{name: "pv", driver: "odd.example",
			handle: "vol-1", block: block})
		requireNoError(t, err)
		n.r.Attach = true
		n.file = n.v.csiRecordFile("u1", "data")
		return n
	}
	holds := func(n node) bool {
		t.Helper()
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() {
			_, err := n.v.MountAll(ctx, newPod("u1", n.claim))
			done <- err
		}()
		<-n.v.UsesChanged() // it waits
		if stop(); <-done == nil {
			t.Error("mounted")
		}
		names, held, err := n.v.VolumesInUse()
		if requireNoError(t, err); !slices.Equal(names, []v1.UniqueVolumeName{odd}) {
			t.Errorf("in use %v", names)
		}
		return len(held) > 0
	}
	a, b := join(false), join(false)
	for _, n := range []node{a, b} {
		writeLegacyRecord(t, n.file, n.r)
		if _, held, err := n.v.VolumesInUse(); err != nil || len(held) != 1 {
			t.Errorf("before anybody has looked: %v, %v", held, err)
		}
		if holds(n) || holds(n) {
			t.Error("a node that waits says that it has the volume")
		}
	}
	putAttachment(a.c, "vol-1", func(*storagev1.VolumeAttachment) {})
	setNodeStatus(a.c, v1.ConditionTrue, true, true)
	_, err := a.v.MountAll(t.Context(), newPod("u1", a.claim))
	requireNoError(t, err)
	if _, held, err := a.v.VolumesInUse(); err != nil || len(held) != 1 {
		t.Errorf("the node that got it says %v, %v", held, err)
	}
	requireNoError(t, a.v.UnmountAll(t.Context(), "u1"))
	for name, block := range map[string]bool{"a folder of the pod": false,
		"a folder of all pods with the device": true} {
		n := join(block)
		requireNoError(t, os.MkdirAll(filepath.Dir(n.r.Target), 0o750))
		if writeLegacyRecord(t, n.file, n.r); !holds(n) || !holds(n) {
			t.Errorf("%s: the driver may have been asked, and the node says that it waits", name)
		}
	}
	n := join(true)
	if writeLegacyRecord(t, n.file, n.r); holds(n) {
		t.Error("a node that waits for a device says that it has it")
	}
	n = join(false)
	n.r.Ready = true // and unmounted by a reboot
	if writeLegacyRecord(t, n.file, n.r); !holds(n) {
		t.Error("what was ready counts as waited for")
	}
	n = join(false)
	requireNoError(t, os.MkdirAll(filepath.Dir(n.file), 0o750))
	requireNoError(t, os.WriteFile(n.file, []byte("{"), 0o600))
	if isAwaitingAttach(n.file, n.r.isUntouched) {
		t.Error("a record that cannot be read says that nothing was done")
	}
}

// addSession adds a session that is down, with a unit of a target, to a fake /sys.
func addSession(t *testing.T, sys, target string, lun int) {
	of, device := filepath.Join(sys, "class/iscsi_session/session1"), filepath.Join(sys, "host3/session1")
	connection := filepath.Join(sys, "class/iscsi_connection/connection1:0")
	for file, text := range map[string]string{of + "/targetname": target, of + "/ifacename": "default",
		of + "/state": "FAILED", of + "/target_id": "0",
		connection + "/persistent_address": "192.0.2.1", connection + "/persistent_port": "3260"} {
		requireNoError(t, errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, []byte(text), 0o600)))
	}
	requireNoError(t, os.MkdirAll(filepath.Join(device, fmt.Sprintf("target3:0:0/3:0:0:%d", lun)), 0o755))
	if err := os.Symlink(device, filepath.Join(of, "device")); !errors.Is(err, os.ErrExist) {
		requireNoError(t, err)
	}
}

// F110: the disk of a claim is reported before its iSCSI target is contacted, and until it is
// detached. An inline disk is not attached.
func TestDisksAreAttached(t *testing.T) {
	v, c, _ := newVolumes(t)
	v.cfg.ISCSI.Kernel = iscsi.Kernel{Sys: t.TempDir(), Dev: t.TempDir()}
	t.Setenv("PATH", t.TempDir()) // iscsiadm is not found
	disk := v1.ISCSIPersistentVolumeSource{TargetPortal: "192.0.2.1", IQN: "iqn.2026-01.example:disks", Lun: 3}
	claim := newLocalClaim(c, v1.LocalVolumeSource{})
	pv, _ := c.PersistentVolume("pv")
	pv = pv.DeepCopy()
	pv.Spec.PersistentVolumeSource = v1.PersistentVolumeSource{ISCSI: &disk}
	c.Put(pv)
	name := v1.UniqueVolumeName("kubernetes.io/iscsi/iqn.2026-01.example:disks:3")
	says := func(want string, holds bool) {
		t.Helper()
		_, err := v.MountAll(t.Context(), newPod("u1", claim))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
		names, held, err := v.VolumesInUse()
		users, uerr := v.PodsWithAttachedVolumes()
		if slices.Equal(held, []v1.UniqueVolumeName{name}) != holds || !holds && len(held) > 0 {
			t.Errorf("held %v, want %v", held, holds)
		}
		if err != nil || uerr != nil || !slices.Equal(names, []v1.UniqueVolumeName{name}) ||
			!slices.Equal(users, []types.UID{"u1"}) {
			t.Errorf("in use %v by %v (%v, %v)", names, users, err, uerr)
		}
	}
	setNodeStatus(c, v1.ConditionTrue, false, false)
	says(`persistentvolume "pv" is not attached to this node: it has no VolumeAttachment to this node yet`, false)
	putAttachment(c, "iqn.2026-01.example:disks:3", func(a *storagev1.VolumeAttachment) {
		a.Spec.Attacher, a.Status.Attached = "iscsi.keelson.dev", false
	})
	says("waiting for the control plane (VolumeAttachment csi-", false)
	putAttachment(c, "iqn.2026-01.example:disks:3", func(a *storagev1.VolumeAttachment) {
		a.Spec.Attacher = "iscsi.keelson.dev"
	})
	says("waiting for the control plane to record that this node uses it", false)
	n, _ := c.Node()
	n = n.DeepCopy()
	n.Status.VolumesInUse, n.Status.VolumesAttached = []v1.UniqueVolumeName{name}, []v1.AttachedVolume{{Name: name}}
	c.Put(n)
	says("iscsiadm is not on this node", true)
	v = New(*v.cfg)
	n = n.DeepCopy()
	n.Status.VolumesAttached = nil // from here on it may have been mounted
	c.Put(n)
	says("volumesAttached does not list it", true)
	requireNoError(t, v.UnmountAll(t.Context(), "u1"))
	// After an upgrade while the pod waits, the state of the node decides whether anything was
	// done.
	r := iscsiRecord{Version: 1, Target: disk.IQN, Interface: "default", LUN: 3, Attach: true}
	file := filepath.Join(v.podDir("u1"), "iscsi", "data.json")
	writeLegacyRecord(t, file, r)
	says("volumesAttached does not list it", false)
	writeLegacyRecord(t, file, r)
	untouched := func() bool {
		return v.iscsi.isISCSIUntouched(iscsiSource{disk: iscsi.Disk{Target: strings.ToUpper(disk.IQN), LUN: 3}}, r)
	}
	if addSession(t, v.cfg.ISCSI.Kernel.Sys, disk.IQN, 4); !isAwaitingAttach(file, untouched) {
		t.Error("another disk of the target counts as this one")
	}
	if addSession(t, v.cfg.ISCSI.Kernel.Sys, disk.IQN, 3); isAwaitingAttach(file, untouched) {
		t.Error("a disk that the kernel has counts as waited for")
	}
	requireNoError(t, os.RemoveAll(filepath.Join(v.cfg.ISCSI.Kernel.Sys, "class")))
	requireNoError(t, v.UnmountAll(t.Context(), "u1"))
	inline := newVolume("data",
		v1.VolumeSource{ISCSI: &v1.ISCSIVolumeSource{TargetPortal: disk.TargetPortal, IQN: disk.IQN, Lun: disk.Lun}})
	if _, err := v.MountAll(t.Context(), newPod("u2", inline)); err == nil ||
		!strings.Contains(err.Error(), "iscsiadm is not on this node") {
		t.Errorf("%v", err)
	}
	if names, _, err := v.VolumesInUse(); err != nil || len(names) > 0 {
		t.Errorf("in use %v, %v", names, err)
	}
	requireNoError(t, v.UnmountAll(t.Context(), "u2"))
}
