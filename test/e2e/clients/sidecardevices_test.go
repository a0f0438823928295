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

// deviceUser is a pod that has a claim as its device /dev/disk.
func (b beside) deviceUser(name, claim string) {
	b.Helper()
	b.apply(`{apiVersion: v1, kind: Pod, metadata: {name: ` + name + `}, spec: {terminationGracePeriodSeconds: 1,
  containers: [{name: main, image: "keelson.dev/tools:v1", command: [sleep, "1000000"], volumeDevices: [{name: disk, devicePath: /dev/disk}]}],
  volumes: [{name: disk, persistentVolumeClaim: {claimName: ` + claim + `}}]}}`)
}

func (b beside) write(pod, word string) {
	b.Helper()
	b.sh(pod, "echo "+word+" | dd of=/dev/disk bs=512 seek=2048 conv=sync,fsync 2>/dev/null")
}

func (b beside) written(pod string) string {
	b.Helper()
	return b.sh(pod, "dd if=/dev/disk bs=512 skip=2048 count=1 2>/dev/null | tr -d '\\0'")
}

// devices has a claim be a block device that is attached, grows under its pod, and is snapshotted, restored and cloned while
// no pod has it: this driver has no way to hold a device still. Pod "raw" stays.
func (b beside) devices() {
	b.Helper()
	b.claim("raw", "now", "24Mi", ", volumeMode: Block")
	b.deviceUser("raw", "raw")
	b.ready("raw")
	b.made("raw")
	b.write("raw", "kept")
	b.kctl("patch", "pvc/raw", "--type=merge", "-p", `{"spec": {"resources": {"requests": {"storage": "40Mi"}}}}`)
	b.becomes("40Mi", "pvc/raw", ".status.capacity.storage")
	if out := b.sh("raw", deviceSize); out != strconv.Itoa(40<<20) {
		b.Errorf("the device that has grown under its pod has %s bytes", out)
	}
	b.kctl("delete", "pod/raw")
	b.apply(`{apiVersion: snapshot.storage.k8s.io/v1, kind: VolumeSnapshot, metadata: {name: raw},
  spec: {volumeSnapshotClassName: DRIVER, source: {persistentVolumeClaimName: raw}}}`)
	b.becomes("true", "volumesnapshot/raw", ".status.readyToUse")
	b.deviceUser("raw", "raw")
	b.ready("raw")
	b.write("raw", "changed")
	b.kctl("delete", "pod/raw")
	b.claim("raw-restored", "now", "40Mi", ", volumeMode: Block, dataSource: {apiGroup: snapshot.storage.k8s.io, kind: VolumeSnapshot, name: raw}")
	b.claim("raw-cloned", "wait", "40Mi", ", volumeMode: Block, dataSource: {kind: PersistentVolumeClaim, name: raw}")
	for claim, want := range map[string]string{"raw-restored": "kept", "raw-cloned": "changed"} {
		b.deviceUser(claim, claim)
		b.ready(claim)
		if out := b.written(claim); out != want {
			b.Errorf("on the device of claim %s there is %q", claim, out)
		}
		b.kctl("delete", "pod/"+claim)
	}
	b.deviceUser("raw", "raw")
	b.ready("raw")
}

// ownVolume has pod "own" have a volume of the driver for itself: it is not attached, though the driver's others are.
func (b beside) ownVolume() {
	b.Helper()
	b.apply(`{apiVersion: v1, kind: Pod, metadata: {name: own}, spec: {terminationGracePeriodSeconds: 1, nodeName: NODE, securityContext: {fsGroup: 4321},
  containers: [{name: main, image: "keelson.dev/tools:v1", command: [sleep, "1000000"], volumeMounts: [{name: data, mountPath: /data}]}],
  volumes: [{name: data, csi: {driver: DRIVER}}]}}`)
	b.ready("own")
	if out, want := b.sh("own", "cat /data/pod; stat -c ' %g' /data"), b.ns+"/own 4321"; out != want {
		b.Errorf("the pod's own volume says %q, not %q", out, want)
	}
}

// process is the driver's on its node; 0 where there is none.
func (b beside) process() int {
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

// killed kills the driver while its volumes are in use, which goes on; then it is away while pods that use them are
// deleted, which end when it is back and not before.
func (b beside) killed() {
	b.Helper()
	pid := b.process()
	if pid == 0 {
		b.Fatal("the driver does not run")
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		b.Fatal(err)
	}
	b.becomes("1", "pod/driver-0", `.status.containerStatuses[?(@.name=="driver")].restartCount`)
	b.ready("driver-0")
	b.sh("writer", "echo more >> /data/file; sync")
	b.write("raw", "after")
	b.sh("own", "echo more > /data/more")
	b.deviceUser("raw-again", "raw") // two pods of one node may have it
	b.ready("raw-again")
	if out := b.written("raw-again"); out != "after" {
		b.Errorf("on the device that another pod has too there is %q", out)
	}
	b.away()
	b.kctl("scale", "statefulset/driver", "--replicas=1")
	b.gonePods("raw", "raw-again", "own", "writer")
	b.user("writer", "now")
	b.deviceUser("raw", "raw")
	b.ready("writer")
	b.ready("raw")
	if out := b.sh("writer", "cat /data/file") + " " + b.written("raw"); out != "changed\nmore after" {
		b.Errorf("after the driver was killed and away there is %q", out)
	}
	b.kctl("delete", "pod/raw")
	b.kctl("delete", "volumesnapshot/raw", "--timeout=180s")
}

// away takes the driver away and has pods that use its volumes deleted: they are there until it is back, and say why. Pod
// "writer" has no grace, so that its object goes at once.
func (b beside) away() {
	b.Helper()
	b.kctl("scale", "statefulset/driver", "--replicas=0")
	b.gonePods("driver-0")
	b.kctl("delete", "--wait=false", "pod/raw", "pod/raw-again", "pod/own", "pod/writer")
	for _, pod := range []string{"raw", "raw-again", "own"} {
		testenv.Eventually(b, soon, func() error {
			out, err := b.try("why", "pod/"+pod)
			if !strings.Contains(out, "a volume cannot be unmounted") || !strings.Contains(out, b.driver) {
				return fmt.Errorf("why pod %s stays: %v\n%s", pod, err, out)
			}
			return nil
		})
		b.kctl("get", "pod/"+pod)
	}
	for _, claim := range []string{"raw", "now"} {
		if out := b.kctl("get", b.attachmentOf(claim), "-o", "jsonpath={.status.attached}"); out != "true" {
			b.Errorf("the volume of claim %s is mounted, and attached: %q", claim, out)
		}
	}
}

// attachmentOf is the VolumeAttachment of a claim's volume.
func (b beside) attachmentOf(claim string) string {
	b.Helper()
	volume := b.kctl("get", "pvc/"+claim, "-o", "jsonpath={.spec.volumeName}")
	return "volumeattachment/" + b.kctl("get", "volumeattachments", "-o", `jsonpath={.items[?(@.spec.source.persistentVolumeName=="`+volume+`")].metadata.name}`)
}

func (b beside) gonePods(names ...string) {
	b.Helper()
	testenv.Eventually(b, soon, func() error {
		out, err := b.try("get", "pods", "-o", "jsonpath={.items[*].metadata.name}")
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

// handles are what the driver calls its volumes.
func (b beside) handles() []string {
	b.Helper()
	return strings.Fields(b.kctl("get", "pv", "-o", `jsonpath={.items[?(@.spec.csi.driver=="`+b.driver+`")].spec.csi.volumeHandle}`))
}

// unmounted waits until the driver's node shows nothing of volumes any more, neither as mounts nor as loop devices.
func (b beside) unmounted(handles []string) {
	b.Helper()
	if len(handles) == 0 {
		b.Error("there were no volumes")
	}
	testenv.Eventually(b, soon, func() error {
		out, err := testenv.Host(b, sidecarNode).Command(b.Context(), "sh", "-c",
			"cat /proc/self/mountinfo && { cat /sys/block/loop*/loop/backing_file 2>/dev/null || true; }").Output() // there may be no loop device
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
