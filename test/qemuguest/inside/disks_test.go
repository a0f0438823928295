//go:build guest

package inside

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/agent/volume/iscsi/iscsitest"
)

const (
	disks   = "iqn.2026-01.example:pods"
	guarded = "iqn.2026-01.example:guarded" // requires authentication
	portal  = "127.0.0.2:3260"
)

// iscsiMachine is a machine whose pods use disks of iSCSI targets in its own kernel.
type iscsiMachine struct {
	*singleMachine
	backingFile string // the file of LUN 1 of disks
}

// createTargets creates the iSCSI targets: LUN 0 and 1 of target disks are blank, target guarded
// has a file system with a file. It returns the backing file of LUN 1.
func createTargets(t *testing.T) (raw string) {
	t.Helper()
	open := iscsitest.Serve(t, disks, portal)
	open.Disk(0, 16<<20)
	raw = open.Disk(1, 1<<20)
	shut := iscsitest.Serve(t, guarded, "127.0.0.3:3260")
	shut.Authenticate("user", "of-the-initiator-1", "target", "of-the-target-0001")
	files := t.TempDir()
	if err := os.WriteFile(filepath.Join(files, "file"), []byte("of somebody\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("mkfs.ext4", "-q", "-F", "-d", files, shut.Disk(0, 8<<20)).CombinedOutput(); err !=
		nil {
		t.Fatalf("%v: %s", err, out)
	}
	return raw
}

// createVolumes creates PersistentVolumes with bound claims, and a Secret. The volumes data and
// same are the same disk.
func (i *iscsiMachine) createVolumes() {
	i.Helper()
	core, size, none := i.core, v1.ResourceList{v1.ResourceStorage: resource.MustParse("1Mi")}, ""
	once := []v1.PersistentVolumeAccessMode{v1.ReadWriteOnce}
	i.createObject("the namespace", func() error {
		_, err := core.Namespaces().Create(i.ctx, &v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "disks"}},
			metav1.CreateOptions{})
		return err
	})
	for name, lun := range map[string]int32{"data": 0, "same": 0, "raw": 1} {
		mode, target := v1.PersistentVolumeFilesystem, disks
		switch name {
		case "raw":
			mode = v1.PersistentVolumeBlock
		case "same": // names of targets are the same in capitals
			target = "iqn.2026-01.Example:PODS"
		}
		pv := &v1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: v1.PersistentVolumeSpec{Capacity: size, AccessModes: once, VolumeMode: &mode,
				PersistentVolumeSource: v1.PersistentVolumeSource{
					ISCSI: &v1.ISCSIPersistentVolumeSource{TargetPortal: portal, IQN: target, Lun: lun,
						FSType: "ext4"}}}}
		claim := &v1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: v1.PersistentVolumeClaimSpec{StorageClassName: &none, VolumeName: name,
				AccessModes: once, VolumeMode: &mode, Resources: v1.VolumeResourceRequirements{Requests: size}}}
		i.createObject("volume "+name, func() error {
			_, err := core.PersistentVolumes().Create(i.ctx, pv, metav1.CreateOptions{})
			return err
		})
		i.createObject("claim "+name, func() error {
			_, err := core.PersistentVolumeClaims("disks").Create(i.ctx, claim, metav1.CreateOptions{})
			return err
		})
	}
	i.createObject("the secret", func() error {
		_, err := core.Secrets("disks").Create(i.ctx,
			&v1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "chap"}, Type: "kubernetes.io/iscsi-chap",
				StringData: map[string]string{
					"node.session.auth.username": "user", "node.session.auth.password": "of-the-initiator-1",
					"node.session.auth.username_in": "target", "node.session.auth.password_in": "of-the-target-0001"}},
			metav1.CreateOptions{})
		return err
	})
}

func claimSource(name string) v1.VolumeSource {
	return v1.VolumeSource{PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{ClaimName: name}}
}

// createPod creates a pod with a disk at /disk; the device of claim raw is /dev/disk.
func (i *iscsiMachine) createPod(name string, source v1.VolumeSource, script string) {
	i.Helper()
	p := newPod(name, "", "", "sh", "-c", script)
	second := int64(1)
	p.Spec.TerminationGracePeriodSeconds = &second // without any a pod is forgotten at once, whatever its node is about
	p.Spec.Volumes = []v1.Volume{{Name: "disk", VolumeSource: source}}
	if c := &p.Spec.Containers[0]; source.PersistentVolumeClaim != nil &&
		source.PersistentVolumeClaim.ClaimName == "raw" {
		c.VolumeDevices = []v1.VolumeDevice{{Name: "disk", DevicePath: "/dev/disk"}}
	} else {
		c.VolumeMounts = []v1.VolumeMount{{Name: "disk", MountPath: "/disk"}}
	}
	i.createObject("pod "+name, func() error {
		_, err := i.core.Pods("disks").Create(i.ctx, p, metav1.CreateOptions{})
		return err
	})
}

// sessionTargets returns the targets of the kernel's iSCSI sessions.
func (i *iscsiMachine) sessionTargets() (with []string) {
	i.Helper()
	for _, s := range iscsitest.Sessions(i.T) {
		target, err := os.ReadFile(filepath.Join("/sys/class/iscsi_session", s, "targetname"))
		if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENODEV) { // these: the session has ended meanwhile
			i.requireNoError(err)
			with = append(with, strings.TrimSpace(string(target)))
		}
	}
	return with
}

// awaitIdle waits until no disk is left, neither on the machine nor in the control plane's records.
func (i *iscsiMachine) awaitIdle() {
	i.Helper()
	i.awaitCondition(func() error {
		pods, err := i.core.Pods("disks").List(i.ctx, metav1.ListOptions{})
		if err != nil || len(pods.Items) > 0 {
			return errors.Join(fmt.Errorf("pods still exist: %d", len(pods.Items)), err)
		}
		var errs []error
		for what, left := range map[string][]string{"sessions": i.sessionTargets(),
			"records of iscsiadm": iscsitest.Records(i.T), "mounts": i.diskMounts(), "records": i.recordFiles()} {
			if len(left) > 0 {
				errs = append(errs, fmt.Errorf("%s that are left: %q", what, left))
			}
		}
		attached, err := i.storage.VolumeAttachments().List(i.ctx, metav1.ListOptions{})
		if err != nil || len(attached.Items) > 0 {
			errs = append(errs, fmt.Errorf("attachments that are left: %d", len(attached.Items)), err)
		}
		n, err := i.core.Nodes().Get(i.ctx, machineName, metav1.GetOptions{})
		if err != nil || len(n.Status.VolumesInUse)+len(n.Status.VolumesAttached) > 0 {
			errs = append(errs, fmt.Errorf("the node has %v, and uses %v", n.Status.VolumesAttached,
				n.Status.VolumesInUse), err)
		}
		return errors.Join(errs...)
	})
}

// diskMounts returns the paths at which disks are mounted.
func (i *iscsiMachine) diskMounts() (at []string) {
	i.Helper()
	raw, err := os.ReadFile("/proc/self/mountinfo")
	i.requireNoError(err)
	for line := range strings.Lines(string(raw)) {
		if f := strings.Fields(line); strings.Contains(f[4], "/iscsi/") {
			at = append(at, f[4])
		}
	}
	return at
}

// recordFiles returns the agent's files about disks and targets.
func (i *iscsiMachine) recordFiles() (files []string) {
	i.Helper()
	for _, dir := range []string{"/var/lib/keelson/volumes", "/var/lib/kubelet"} {
		err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil // it goes just now
			}
			if err == nil && strings.Contains(p, "/iscsi/") {
				files = append(files, p)
			}
			return err
		})
		i.requireNoError(err)
	}
	return files
}

// readCount returns the number to which a pod has counted in its file on the disk.
func (i *iscsiMachine) readCount() int {
	i.Helper()
	n := 0
	i.awaitCondition(func() error { // the pod writes it again
		raw, err := os.ReadFile(filepath.Join("/var/lib/kubelet/plugins/kubernetes.io/iscsi/default", disks,
			"lun-0/count"))
		if err == nil {
			n, err = strconv.Atoi(strings.TrimSpace(string(raw)))
		}
		return err
	})
	return n
}

// F110: pods use disks of iSCSI targets, by claims as file systems and as devices, and inline with
// credentials of the node. Two PersistentVolumes of one disk are attached once. The agent is killed
// meanwhile: pods continue, and the next agent removes everything when they are deleted. The next
// pod reads the data of the previous one. A missing target is named.
func TestPodsWithDisks(t *testing.T) {
	iscsitest.Need(t)
	i := &iscsiMachine{backingFile: createTargets(t)}
	i.singleMachine = newSingleMachine(t)
	i.createVolumes()
	inline := func(portal, target string, lun int32) v1.VolumeSource {
		return v1.VolumeSource{ISCSI: &v1.ISCSIVolumeSource{TargetPortal: portal, IQN: target, Lun: lun}}
	}
	i.createPod("absent", inline(portal, "iqn.2026-01.example:none", 3), "true")
	proven := inline("127.0.0.3", guarded, 0)
	proven.ISCSI.ReadOnly, proven.ISCSI.SessionCHAPAuth, proven.ISCSI.SecretRef = true, true,
		&v1.LocalObjectReference{Name: "chap"}
	i.createPod("reader", proven, "grep 'of somebody' /disk/file && ! touch /disk/new")
	i.createPod("raw", claimSource("raw"),
		"echo of the pod | dd of=/dev/disk bs=512 seek=8 conv=fsync && dd if=/dev/disk "+
			"bs=512 skip=8 count=1 | grep 'of the pod'")
	i.createPod("writer", claimSource("data"),
		"echo of the writer > /disk/greeting; n=0; while n=$((n+1)); do echo $n > /disk/count; sleep 1; done")
	i.createPod("other", claimSource("same"),
		"until grep 'of the writer' /disk/greeting; do sleep 1; done; echo of the other > "+
			"/disk/answer; exec sleep 1000")
	i.awaitPhases("disks", map[string]v1.PodPhase{"writer": v1.PodRunning, "other": v1.PodRunning,
		"reader": v1.PodSucceeded,
		"raw":    v1.PodSucceeded})
	t.Log("four pods have their disks")
	if raw, err := os.ReadFile(i.backingFile); err != nil ||
		string(raw[4096:4096+len("of the pod\n")]) != "of the pod\n" {
		t.Errorf("the target's disk: %v", err)
	}
	i.checkAttachedOnce()
	i.checkMissingTarget()

	before := i.runningPods()
	i.killAgent()
	from := i.readCount()
	i.awaitCondition(func() error {
		if now := i.readCount(); now < from+2 {
			return fmt.Errorf("without an agent the pod has counted from %d to %d", from, now)
		}
		return nil
	})
	i.restartAgent()
	t.Log("the agent was killed")
	i.awaitCondition(func() error { return i.checkContainers(before) })
	i.deleteAll()
	i.awaitIdle()
	t.Log("the pods are gone")

	i.createPod("second", claimSource("data"),
		"grep 'of the writer' /disk/greeting && grep 'of the other' /disk/answer")
	i.awaitPhases("disks", map[string]v1.PodPhase{"second": v1.PodSucceeded})
	i.deleteAll()
	i.awaitIdle()
}

// checkAttachedOnce checks that one of the two volumes of the disk of two pods is attached, by one
// session.
func (i *iscsiMachine) checkAttachedOnce() {
	i.Helper()
	var list *storagev1.VolumeAttachmentList
	i.awaitCondition(func() (err error) {
		list, err = i.storage.VolumeAttachments().List(i.ctx, metav1.ListOptions{})
		return err
	})
	var by []string
	for _, a := range list.Items {
		if name := *a.Spec.Source.PersistentVolumeName; name != "raw" {
			by = append(by, name)
		}
	}
	if len(by) != 1 || by[0] != "data" && by[0] != "same" {
		i.Errorf("the disk is attached by %q", by)
	}
	if with := strings.Join(i.sessionTargets(), " "); strings.Count(with, disks) != 1 {
		i.Errorf("the sessions are with %s", with)
	}
}

// checkMissingTarget checks that the pod's event and "kctl why" name portal, target and LUN.
func (i *iscsiMachine) checkMissingTarget() {
	i.Helper()
	const want = "iSCSI target iqn.2026-01.example:none at " + portal + ", LUN 3: portal " + portal +
		" does not offer this target to this node's initiator: it offers " + disks
	i.awaitCondition(func() error {
		if said := i.podEvents("disks", "absent"); !strings.Contains(strings.Join(said, "\n"), want) {
			return fmt.Errorf("the events of a pod with a missing target: %q", said)
		}
		return nil
	})
	if said := i.kctlWhy("pod/absent", "--namespace=disks"); !strings.Contains(said, want) ||
		!strings.Contains(said, "on node "+machineName) {
		i.Errorf("the output of kctl why is %s", said)
	}
}

// runningPods returns the container IDs of the running pods by name.
func (i *iscsiMachine) runningPods() map[string]string {
	i.Helper()
	var list *v1.PodList
	i.awaitCondition(func() (err error) {
		list, err = i.core.Pods("disks").List(i.ctx, metav1.ListOptions{})
		return err
	})
	run := map[string]string{}
	for _, p := range list.Items {
		if p.Status.Phase == v1.PodRunning {
			run[p.Name] = p.Status.ContainerStatuses[0].ContainerID
		}
	}
	return run
}

// checkContainers returns an error unless the restarted agent reports the same containers and
// returns their logs.
func (i *iscsiMachine) checkContainers(before map[string]string) error {
	if _, err := i.core.Pods("disks").GetLogs("other", &v1.PodLogOptions{}).DoRaw(i.ctx); err != nil {
		return err
	}
	if now := i.runningPods(); fmt.Sprint(now) != fmt.Sprint(before) {
		i.Errorf("the pods were %v and are %v", before, now)
	}
	return nil
}

func (i *iscsiMachine) deleteAll() {
	i.Helper()
	i.awaitCondition(func() error {
		return i.core.Pods("disks").DeleteCollection(i.ctx, metav1.DeleteOptions{}, metav1.ListOptions{})
	})
}
