package clients

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"keelson.dev/keelson/test/testenv"
)

// deviceSize prints how large a pod's device is.
const deviceSize = "wc -c < /dev/disk"

// createDevicePod creates a pod that has a claim as the device /dev/disk.
func (b sidecarTest) createDevicePod(name, claim string) {
	b.Helper()
	b.applyText(`{apiVersion: v1, kind: Pod, metadata: {name: ` + name + `}, spec: {terminationGracePeriodSeconds: 1,
  containers: [{name: main, image: "keelson.dev/tools:v1", command: [sleep, "1000000"], volumeDevices: [{name: disk, devicePath: /dev/disk}]}],
  volumes: [{name: disk, persistentVolumeClaim: {claimName: ` + claim + `}}]}}`)
}

func (b sidecarTest) writeDevice(pod, word string) {
	b.Helper()
	b.execScript(pod, "echo "+word+" | dd of=/dev/disk bs=512 seek=2048 conv=sync,fsync 2>/dev/null")
}

func (b sidecarTest) readDevice(pod string) string {
	b.Helper()
	return b.execScript(pod, "dd if=/dev/disk bs=512 skip=2048 count=1 2>/dev/null | tr -d '\\0'")
}

// checkBlockDevice attaches a block device, expands it under its pod, and takes a snapshot,
// restores it and clones the device while no pod uses it. This driver cannot freeze a device. Pod
// "raw" stays.
func (b sidecarTest) checkBlockDevice() {
	b.Helper()
	b.createClaim("raw", "now", "24Mi", ", volumeMode: Block")
	b.createDevicePod("raw", "raw")
	b.awaitReady("raw")
	b.requireProvisioned("raw")
	b.writeDevice("raw", "kept")
	b.runKctl("patch", "pvc/raw", "--type=merge", "-p", `{"spec": {"resources": {"requests": {"storage": "40Mi"}}}}`)
	b.awaitValue("40Mi", "pvc/raw", ".status.capacity.storage")
	if out := b.execScript("raw", deviceSize); out != strconv.Itoa(40<<20) {
		b.Errorf("the device that has grown under its pod has %s bytes", out)
	}
	b.runKctl("delete", "pod/raw")
	b.applyText(`{apiVersion: snapshot.storage.k8s.io/v1, kind: VolumeSnapshot, metadata: {name: raw},
  spec: {volumeSnapshotClassName: DRIVER, source: {persistentVolumeClaimName: raw}}}`)
	b.awaitValue("true", "volumesnapshot/raw", ".status.readyToUse")
	b.createDevicePod("raw", "raw")
	b.awaitReady("raw")
	b.writeDevice("raw", "changed")
	b.runKctl("delete", "pod/raw")
	b.createClaim("raw-restored", "now", "40Mi",
		", volumeMode: Block, dataSource: {apiGroup: snapshot.storage.k8s.io, kind: VolumeSnapshot, name: raw}")
	b.createClaim("raw-cloned", "wait", "40Mi",
		", volumeMode: Block, dataSource: {kind: PersistentVolumeClaim, name: raw}")
	for claim, want := range map[string]string{"raw-restored": "kept", "raw-cloned": "changed"} {
		b.createDevicePod(claim, claim)
		b.awaitReady(claim)
		if out := b.readDevice(claim); out != want {
			b.Errorf("on the device of claim %s there is %q", claim, out)
		}
		b.runKctl("delete", "pod/"+claim)
	}
	b.createDevicePod("raw", "raw")
	b.awaitReady("raw")
}

// checkEphemeral gives pod "own" an inline volume of the driver. The volume is not attached,
// although the driver's other volumes are.
func (b sidecarTest) checkEphemeral() {
	b.Helper()
	b.applyText(
		`{apiVersion: v1, kind: Pod, metadata: {name: own}, spec: {terminationGracePeriodSeconds: 1, nodeName: NODE, securityContext: {fsGroup: 4321},
  containers: [{name: main, image: "keelson.dev/tools:v1", command: [sleep, "1000000"], volumeMounts: [{name: data, mountPath: /data}]}],
  volumes: [{name: data, csi: {driver: DRIVER}}]}}`)
	b.awaitReady("own")
	if out, want := b.execScript("own", "cat /data/pod; stat -c ' %g' /data"), b.ns+"/own 4321"; out != want {
		b.Errorf("the pod's inline volume contains %q, not %q", out, want)
	}
}

// driverPID returns the PID of the driver on its node, or 0 if it is not running.
func (b sidecarTest) driverPID() int {
	b.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		b.Fatal(err)
	}
	for _, f := range files {
		line, err := os.ReadFile(f)
		if err != nil || !strings.HasPrefix(string(line), "/driver\x00--name="+b.driver+"\x00") {
			continue // ended meanwhile, or another's
		}
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(f))); err == nil {
			return pid
		}
	}
	return 0
}

// checkDriverKill kills the driver while its volumes are in use; they stay usable. Then pods that
// use them are deleted while the driver is absent. The pods end only after the driver is back.
func (b sidecarTest) checkDriverKill() {
	b.Helper()
	pid := b.driverPID()
	if pid == 0 {
		b.Fatal("the driver does not run")
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		b.Fatal(err)
	}
	b.awaitValue("1", "pod/driver-0", `.status.containerStatuses[?(@.name=="driver")].restartCount`)
	b.awaitReady("driver-0")
	b.execScript("writer", "echo more >> /data/file; sync")
	b.writeDevice("raw", "after")
	b.execScript("own", "echo more > /data/more")
	b.createDevicePod("raw-again", "raw") // two pods of one node may have it
	b.awaitReady("raw-again")
	if out := b.readDevice("raw-again"); out != "after" {
		b.Errorf("on the device that another pod has too there is %q", out)
	}
	b.checkDriverAbsence()
	b.runKctl("scale", "statefulset/driver", "--replicas=1")
	b.awaitPodsDeleted("raw", "raw-again", "own", "writer")
	b.createUserPod("writer", "now")
	b.createDevicePod("raw", "raw")
	b.awaitReady("writer")
	b.awaitReady("raw")
	if out := b.execScript("writer", "cat /data/file") + " " + b.readDevice("raw"); out != "changed\nmore after" {
		b.Errorf("after the driver was killed and away there is %q", out)
	}
	b.runKctl("delete", "pod/raw")
	b.runKctl("delete", "volumesnapshot/raw", "--timeout=180s")
}

// checkDriverAbsence removes the driver and deletes pods that use its volumes. The pods stay until
// the driver is back and report the reason. Pod "writer" has no grace period, so its object is
// deleted at once.
func (b sidecarTest) checkDriverAbsence() {
	b.Helper()
	b.runKctl("scale", "statefulset/driver", "--replicas=0")
	b.awaitPodsDeleted("driver-0")
	b.runKctl("delete", "--wait=false", "pod/raw", "pod/raw-again", "pod/own", "pod/writer")
	for _, pod := range []string{"raw", "raw-again", "own"} {
		testenv.Eventually(b, soon, func() error {
			out, err := b.tryKctl("why", "pod/"+pod)
			if !strings.Contains(out, "a volume cannot be unmounted") || !strings.Contains(out, b.driver) {
				return fmt.Errorf("why pod %s stays: %v\n%s", pod, err, out)
			}
			return nil
		})
		b.runKctl("get", "pod/"+pod)
	}
	for _, claim := range []string{"raw", "now"} {
		if out := b.runKctl("get", b.attachmentOf(claim), "-o", "jsonpath={.status.attached}"); out != "true" {
			b.Errorf("the volume of claim %s is mounted, and attached: %q", claim, out)
		}
	}
}

// attachmentOf returns the name of the VolumeAttachment of a claim's volume.
func (b sidecarTest) attachmentOf(claim string) string {
	b.Helper()
	volume := b.runKctl("get", "pvc/"+claim, "-o", "jsonpath={.spec.volumeName}")
	return "volumeattachment/" + b.runKctl("get", "volumeattachments", "-o",
		`jsonpath={.items[?(@.spec.source.persistentVolumeName=="`+volume+`")].metadata.name}`)
}

func (b sidecarTest) awaitPodsDeleted(names ...string) {
	b.Helper()
	testenv.Eventually(b, soon, func() error {
		out, err := b.tryKctl("get", "pods", "-o", "jsonpath={.items[*].metadata.name}")
		for _, name := range names {
			for _, there := range strings.Fields(out) {
				if there == name {
					err = errors.Join(err, fmt.Errorf("pod %s is still there", name))
				}
			}
		}
		return err
	})
}

// volumeHandles returns the IDs of the driver's volumes.
func (b sidecarTest) volumeHandles() []string {
	b.Helper()
	return strings.Fields(b.runKctl("get", "pv", "-o",
		`jsonpath={.items[?(@.spec.csi.driver=="`+b.driver+`")].spec.csi.volumeHandle}`))
}

// awaitUnmounted waits until the driver's node has no mounts or loop devices of the volumes.
func (b sidecarTest) awaitUnmounted(handles []string) {
	b.Helper()
	if len(handles) == 0 {
		b.Error("there were no volumes")
	}
	testenv.Eventually(b, soon, func() error {
		out, err := testenv.Host(b, sidecarNode).Command(b.Context(), "sh", "-c",
			// there may be no loop device
			"cat /proc/self/mountinfo && { cat /sys/block/loop*/loop/backing_file 2>/dev/null || true; }").Output()
		for _, h := range append(handles, b.driver) { // which is in the paths where volumes are staged
			for line := range strings.Lines(string(out)) {
				if strings.Contains(line, h) {
					err = errors.Join(err, fmt.Errorf("left of %s: %s", h, line))
				}
			}
		}
		return err
	})
}
