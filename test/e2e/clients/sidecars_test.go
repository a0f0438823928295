package clients

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"keelson.dev/keelson/test/testenv"
)

// sidecarNode has the driver, and all that wants to be at its socket.
const sidecarNode = "w2"

// sidecarImages are the Kubernetes CSI sidecars with their arguments and the images of their
// releases.
var sidecarImages = []struct{ name, release, args string }{
	{"csi-provisioner", "v6.4.0", `--csi-address=/csi/csi.sock, --leader-election, "--http-endpoint=:8080", ` +
		`--enable-capacity, --capacity-ownerref-level=2, --capacity-poll-interval=5s, --default-fstype=ext4, --v=3`},
	{"csi-attacher", "v4.13.0", `--csi-address=/csi/csi.sock, --leader-election, "--http-endpoint=:8080", --v=3`},
	{"csi-resizer", "v2.3.0", `--csi-address=/csi/csi.sock, --leader-election, "--http-endpoint=:8080", --v=3`},
	{"csi-snapshotter", "v8.7.0", `--csi-address=/csi/csi.sock, --leader-election, "--http-endpoint=:8080", --v=3`},
	{"snapshot-controller", "v8.7.0", `--leader-election, "--http-endpoint=:8080", --v=3`},
}

// sidecarTest is a test of a CSI driver with the Kubernetes CSI sidecars.
type sidecarTest struct {
	*testing.T
	ns, driver, programs string
}

func (b sidecarTest) runKctl(args ...string) string {
	b.Helper()
	return strings.TrimSpace(testenv.Kctl(b, append([]string{"-n", b.ns}, args...)...))
}

func (b sidecarTest) tryKctl(args ...string) (string, error) {
	b.Helper()
	out, err := testenv.Try(b, filepath.Join(testenv.Lab().Config.BinDir, "kctl"),
		append([]string{"-n", b.ns}, args...)...)
	return strings.TrimSpace(out), err
}

// applyText applies a manifest in the test's namespace, with words replaced.
func (b sidecarTest) applyText(text string, replace ...string) {
	b.Helper()
	replace = append(replace, "DRIVER", b.driver, ": NODE", ": "+sidecarNode, "namespace: NAMESPACE",
		"namespace: "+b.ns)
	b.runKctl("apply", "-f", writeManifest(b, strings.NewReplacer(replace...).Replace(text)))
}

func (b sidecarTest) readFile(file string) string {
	b.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		b.Fatal(err)
	}
	return string(text)
}

// awaitValue waits until a JSONPath of an object has the value want.
func (b sidecarTest) awaitValue(want, object, path string) {
	b.Helper()
	testenv.Eventually(b, soon, func() error {
		out, err := b.tryKctl("get", object, "-o", "jsonpath={"+path+"}")
		if err != nil || out != want {
			return fmt.Errorf("%s of %s is %q, not %q: %v", path, object, out, want, err)
		}
		return nil
	})
}

// awaitNoObjects waits until no object of a kind names the driver.
func (b sidecarTest) awaitNoObjects(kind string) {
	b.Helper()
	testenv.Eventually(b, soon, func() error {
		out, err := b.tryKctl("get", kind, "-o", "yaml")
		if err != nil && !strings.Contains(out, "not found") || err == nil && strings.Contains(out, b.driver) {
			return fmt.Errorf("left of %s: %v %.2000s", kind, err, out)
		}
		return nil
	})
}

// loadDriver builds the image of the driver with its registrar and the file system programs, as in
// released images, and loads it into the lab.
func (b sidecarTest) loadDriver() {
	b.Helper()
	dir := testenv.Build(b, "keelson.dev/keelson/test/e2e/clients/attachingdriver",
		"keelson.dev/keelson/test/e2e/sidecar")
	files := map[string]string{"driver": filepath.Join(dir, "attachingdriver"),
		"sidecar": filepath.Join(dir, "sidecar")}
	library := regexp.MustCompile(`/[^ ]+`)
	for _, tool := range []string{"mkfs.ext4", "e2fsck", "resize2fs"} {
		path := "/usr/sbin/" + tool
		files[path[1:]] = path
		out, err := exec.Command("ldd", path).Output()
		if err != nil {
			b.Fatalf("libraries of %s: %v", path, err)
		}
		for _, l := range library.FindAllString(string(out), -1) {
			files[l[1:]] = l
		}
	}
	testenv.LoadImage(b, "example.com/csi/attaching:v1", files, "/driver")
}

// installDriver installs the driver and the sidecars with the RBAC rules and CRDs of their
// releases.
func (b sidecarTest) installDriver() {
	b.Helper()
	b.loadDriver()
	crds := filepath.Join(b.programs, "crd")
	b.Cleanup(func() {
		if b.Failed() {
			b.logContainers()
		}
		testenv.Kctl(b, append([]string{"delete", "--ignore-not-found"}, b.clusterObjects()...)...)
		testenv.Kctl(b, "delete", "--ignore-not-found", "-k", crds)
		for _, s := range sidecarImages {
			b.runKctl("delete", "--ignore-not-found", "-f", b.rbacManifest(s.name))
		}
	})
	testenv.Kctl(b, "apply", "-k", crds)
	testenv.Kctl(b, "wait", "--for=condition=Established", "--timeout=180s",
		"crd/volumesnapshots.snapshot.storage.k8s.io",
		"crd/volumesnapshotcontents.snapshot.storage.k8s.io", "crd/volumesnapshotclasses.snapshot.storage.k8s.io")
	b.applyText(b.readFile("testdata/csidriver.yaml"), "podInfoOnMount: false",
		"podInfoOnMount: true, fsGroupPolicy: File",
		"[Persistent]", "[Persistent, Ephemeral]")
	b.applyText(b.readFile("testdata/csiattributes.yaml"))
	for _, s := range sidecarImages {
		image := "registry.k8s.io/sig-storage/" + s.name + ":" + s.release
		testenv.LoadImage(b, image, map[string]string{s.name: filepath.Join(b.programs, s.name)}, "/"+s.name)
		b.runKctl("apply", "-f", b.rbacManifest(s.name))
		b.applyText(b.readFile("testdata/csisidecar.yaml"), "SIDECAR", s.name, "IMAGE", image, "ARGS", s.args)
	}
	b.runKctl("rollout", "status", "statefulset/driver", "--timeout=200s")
	for _, s := range sidecarImages {
		b.runKctl("rollout", "status", "deployment/"+s.name, "--timeout=200s")
	}
}

// awaitNoFiles waits until folders of the driver's node contain no files.
func (b sidecarTest) awaitNoFiles(dirs ...string) {
	b.Helper()
	testenv.Eventually(b, soon, func() error {
		out, err := testenv.Host(b, sidecarNode).Command(b.Context(),
			append(append([]string{"find"}, dirs...), "-type", "f")...).CombinedOutput()
		if err != nil || len(out) > 0 {
			return fmt.Errorf("left on the node: %q, %v", out, err)
		}
		return nil
	})
}

// rbacManifest returns the RBAC manifest of a sidecar's release, changed to the test's namespace as
// the comments in the manifest direct.
func (b sidecarTest) rbacManifest(name string) string {
	return writeManifest(b,
		strings.NewReplacer("namespace: default", "namespace: "+b.ns, "namespace: kube-system", "namespace: "+b.ns).
			Replace(b.readFile(filepath.Join(b.programs, "rbac", name+".yaml"))))
}

// logContainers logs the last lines of every container.
func (b sidecarTest) logContainers() {
	for _, s := range sidecarImages {
		out, _ := b.tryKctl("logs", "-l", "app="+s.name, "--tail=25", "--prefix")
		b.Logf("%s:\n%s", s.name, out)
	}
	for _, what := range [][]string{{"logs", "driver-0", "-c", "driver", "--tail=60"}, {"get", "events"},
		{"get", "pv,pvc,volumeattachments,leases,csistoragecapacities,pods", "-o", "wide"}} {
		out, _ := b.tryKctl(what...)
		b.Logf("%s:\n%s", strings.Join(what, " "), out)
	}
}

// createClaim creates a claim of one of the driver's classes.
func (b sidecarTest) createClaim(name, class, size, source string) {
	b.Helper()
	b.applyText(`{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {name: ` + name +
		`}, spec: {storageClassName: DRIVER-` + class +
		`, accessModes: [ReadWriteOnce], resources: {requests: {storage: ` + size + `}}` + source + `}}`)
}

// createUserPod creates a pod that mounts a claim at /data.
func (b sidecarTest) createUserPod(name, claim string) {
	b.Helper()
	b.applyText(`{apiVersion: v1, kind: Pod, metadata: {name: ` + name + `}, spec: {terminationGracePeriodSeconds: 0,
  containers: [{name: main, image: "keelson.dev/tools:v1", command: [sleep, "1000000"], volumeMounts: [{name: data, mountPath: /data}]}],
  volumes: [{name: data, persistentVolumeClaim: {claimName: ` + claim + `}}]}}`)
}

func (b sidecarTest) awaitReady(pod string) {
	b.Helper()
	b.awaitValue("True", "pod/"+pod, `.status.conditions[?(@.type=="Ready")].status`)
}

func (b sidecarTest) execScript(pod, script string) string {
	b.Helper()
	return b.runKctl("exec", pod, "--", "sh", "-c", script)
}

// F110: the community's external-provisioner, attacher, resizer and snapshotter, as they are released and with the rights
// that they are released with, two pods each, serve a driver that the cluster does nothing for itself: its claims are
// provisioned, attached, grown, given other attributes, snapshotted alone and in groups, restored, cloned and deleted
// again, as file systems and as block devices, while the driver is killed under them; and pods have volumes of it for
// themselves.
func TestCommunitySidecars(t *testing.T) {
	t.Parallel() // it waits for a lease most of the time
	b := sidecarTest{T: t, ns: testenv.Namespace(t), programs: clientProgram(t, "csi-sidecars")}
	b.driver = b.ns + ".csi.example"
	began := time.Now()
	b.installDriver()
	step := func(what string) {
		t.Logf("%s after %s", what, time.Since(began).Round(time.Millisecond))
		began = time.Now()
	}
	step("installed")
	volume := b.checkProvisioning()
	step("provisioned and attached")
	b.checkDelayedBinding()
	step("another took the lease, and a claim waited for its pod")
	b.checkExpansion(volume)
	step("grown")
	b.checkModification(volume)
	b.requireProvisioned("quick")
	step("given other attributes")
	b.checkSnapshots()
	step("snapshotted, restored and cloned")
	b.checkGroupSnapshots()
	step("snapshotted with another")
	b.checkBlockDevice()
	step("block devices")
	b.checkEphemeral()
	b.checkDriverKill()
	step("the driver was killed, and away")
	b.checkRemoval()
	step("deleted")
}

// checkProvisioning checks that a claim is provisioned immediately and attached when a pod uses it.
// It returns the volume.
func (b sidecarTest) checkProvisioning() string {
	b.Helper()
	b.createClaim("now", "now", "24Mi", "")
	b.awaitValue("Bound", "pvc/now", ".status.phase")
	volume := b.runKctl("get", "pvc/now", "-o", "jsonpath={.spec.volumeName}")
	b.awaitValue(b.driver, "pv/"+volume, `.metadata.annotations.pv\.kubernetes\.io/provisioned-by`)
	if out := b.runKctl("get", "pvc/now", "pv/"+volume, "-o", "yaml"); strings.Contains(out,
		"keelson.dev/provisioning") ||
		!strings.Contains(out, "volume.beta.kubernetes.io/storage-provisioner: "+b.driver) {
		b.Errorf("the claim and its volume are not left to the provisioner:\n%s", out)
	}
	b.requireProvisioned("now")
	b.createUserPod("writer", "now")
	b.awaitReady("writer")
	b.execScript("writer", "echo kept > /data/file; sync")
	at := b.runKctl("get", "volumeattachments", "-o",
		`jsonpath={range .items[?(@.spec.attacher=="`+b.driver+
			`")]}{.spec.source.persistentVolumeName} {.spec.nodeName} {.status.attached} {.metadata.finalizers[0]} `+
			`{.status.attachmentMetadata.ticket}{"\n"}{end}`)
	if want := volume + " " + sidecarNode + " true external-attacher/" + strings.ReplaceAll(b.driver, ".", "-") + " " +
		volume + " at " + sidecarNode; at != want {
		b.Errorf("attachments are %q, not %q", at, want)
	}
	return volume
}

// requireProvisioned checks that the provisioner reports that it has created a claim's volume.
func (b sidecarTest) requireProvisioned(claim string) {
	b.Helper()
	volume := b.runKctl("get", "pvc/"+claim, "-o", "jsonpath={.spec.volumeName}")
	by := b.runKctl("get", "pv/"+volume, "-o",
		`jsonpath={.spec.csi.volumeAttributes.storage\.kubernetes\.io/csiProvisionerIdentity}`)
	if !strings.HasSuffix(by, b.driver) {
		b.Errorf("volume %s of claim %s is of provisioner %q", volume, claim, by)
	}
}

// checkDelayedBinding creates a claim that waits for its pod and for the free capacity that the
// provisioner reports. The provisioner's leader is deleted first.
func (b sidecarTest) checkDelayedBinding() {
	b.Helper()
	const lease = `jsonpath={.items[?(@.metadata.name=="LEASE")].spec.holderIdentity}`
	name := strings.ReplaceAll(b.driver, ".", "-") // as the provisioner has it
	holder := func() (string, error) {
		return b.tryKctl("get", "leases", "-o", strings.Replace(lease, "LEASE", name, 1))
	}
	first, err := holder()
	if err != nil || first == "" {
		b.Fatalf("lease %s has no holder: %v: %s", name, err, b.runKctl("get", "leases"))
	}
	pods := strings.Fields(b.runKctl("get", "pods", "-l", "app=csi-provisioner", "-o",
		"jsonpath={.items[*].metadata.name}"))
	for _, p := range pods {
		if strings.HasSuffix(first, p) {
			b.runKctl("delete", "pod", p, "--wait=false")
		}
	}
	b.createClaim("wait", "wait", "24Mi", "")
	b.createClaim("vast", "wait", "900Ti", "")
	b.createUserPod("second", "wait")
	b.createUserPod("vast", "vast")
	b.awaitReady("second")
	b.requireProvisioned("wait")
	b.awaitValue(sidecarNode, "pod/second", ".spec.nodeName")
	testenv.Eventually(b, soon, func() error { // it may have done its last work while it ended
		now, err := holder()
		if err == nil && (now == first || now == "") {
			err = fmt.Errorf("the lease is held by %q, and was by %q", now, first)
		}
		return err
	})
	testenv.Eventually(b, soon, func() error {
		out, err := b.tryKctl("get", "events", "--field-selector=involvedObject.name=vast,reason=FailedScheduling",
			"-o",
			"jsonpath={.items[*].message}")
		if err != nil || !strings.Contains(out, "did not have enough free storage") {
			return fmt.Errorf("the pod that no node has room for: %q, %w", out, err)
		}
		return nil
	})
	b.awaitValue("Deployment", "csistoragecapacities", ".items[0].metadata.ownerReferences[0].kind")
	b.runKctl("delete", "pod/vast", "pvc/vast")
}

// checkExpansion expands a claim while a pod uses it. If the nodes may not expand mounted file
// systems, the file system is expanded when a pod mounts the volume again after it was detached.
func (b sidecarTest) checkExpansion(volume string) {
	b.Helper()
	b.runKctl("patch", "pvc/now", "--type=merge", "-p", `{"spec": {"resources": {"requests": {"storage": "40Mi"}}}}`)
	b.awaitValue("40Mi", "pv/"+volume, ".spec.capacity.storage")
	b.runKctl("delete", "pod/writer")
	testenv.Eventually(b, soon, func() error {
		out, err := b.tryKctl("get", "volumeattachments", "-o", "yaml")
		if err != nil || strings.Contains(out, volume) {
			return fmt.Errorf("volume %s is still attached: %v", volume, err)
		}
		return nil
	})
	b.createUserPod("writer", "now")
	b.awaitReady("writer")
	b.awaitValue("40Mi", "pvc/now", ".status.capacity.storage")
	if out := b.execScript("writer", "cat /data/file; dd if=/dev/zero of=/data/large bs=1M count=30 2>&1 && rm "+
		"/data/large"); !strings.HasPrefix(out, "kept") || strings.Contains(out, "No space") {
		b.Errorf("the volume that has grown: %q", out)
	}
}

// checkSnapshots takes a snapshot of a volume and creates one claim from the snapshot and one from
// the volume's later content.
func (b sidecarTest) checkSnapshots() {
	b.Helper()
	b.applyText(b.readFile("testdata/csisnapshots.yaml"))
	b.awaitValue("true", "volumesnapshot/kept", ".status.readyToUse")
	b.execScript("writer", "echo changed > /data/file; sync")
	b.createClaim("restored", "now", "48Mi",
		", dataSource: {apiGroup: snapshot.storage.k8s.io, kind: VolumeSnapshot, name: kept}")
	b.createClaim("cloned", "wait", "48Mi", ", dataSource: {kind: PersistentVolumeClaim, name: now}")
	for claim, want := range map[string]string{"restored": "kept", "cloned": "changed"} {
		b.createUserPod("reader-of-"+claim, claim)
		b.awaitReady("reader-of-" + claim)
		b.requireProvisioned(claim)
		if out := b.execScript("reader-of-"+claim, "cat /data/file"); out != want {
			b.Errorf("in the claim that was %s there is %q", claim, out)
		}
	}
	if out := b.runKctl("get", "pvc/now", "-o", "jsonpath={.metadata.finalizers}"); !strings.Contains(out,
		"provisioner.storage.kubernetes.io/cloning-protection") {
		// the provisioner takes its finalizer away when the claim is deleted
		b.Errorf("the claim that was cloned has %s", out)
	}
}

// checkGroupSnapshots takes a group snapshot of two volumes and creates a claim from one of its
// snapshots.
func (b sidecarTest) checkGroupSnapshots() {
	b.Helper()
	b.runKctl("label", "pvc/now", "pvc/wait", "kept=together")
	b.execScript("second", "echo beside > /data/file; sync")
	b.applyText(b.readFile("testdata/csigroups.yaml"))
	b.awaitValue("true", "volumegroupsnapshot/both", ".status.readyToUse")
	b.execScript("second", "echo later > /data/file; sync")
	member := b.runKctl("get", "volumesnapshots", "-o",
		`jsonpath={.items[?(@.spec.source.persistentVolumeClaimName=="wait")].metadata.name}`)
	b.awaitValue("true", "volumesnapshot/"+member, ".status.readyToUse")
	b.createClaim("of-group", "now", "24Mi",
		", dataSource: {apiGroup: snapshot.storage.k8s.io, kind: VolumeSnapshot, name: "+
			member+"}")
	b.createUserPod("reader-of-group", "of-group")
	b.awaitReady("reader-of-group")
	if out := b.execScript("reader-of-group", "cat /data/file"); out != "beside" {
		b.Errorf("the claim restored from a group's snapshot contains %q", out)
	}
	b.runKctl("delete", "pod/reader-of-group")
	b.runKctl("delete", "volumegroupsnapshot/both", "--timeout=180s")
}

// checkRemoval deletes everything and checks that nothing is left on the node.
func (b sidecarTest) checkRemoval() {
	b.Helper()
	handles := b.volumeHandles()
	b.runKctl("delete", "pod/writer", "pod/second", "pod/reader-of-restored", "pod/reader-of-cloned")
	b.runKctl("delete", "pvc", "--all", "--timeout=180s")
	b.runKctl("delete", "volumesnapshot/kept", "--timeout=180s")
	b.runKctl("delete", "volumeattributesclass/"+b.driver+"-fast")
	for _, kind := range []string{"pv", "volumeattachments", "volumesnapshotcontents", "volumegroupsnapshotcontents",
		"volumeattributesclasses"} {
		b.awaitNoObjects(kind)
	}
	dir := "/var/lib/kubelet/plugins/" + b.driver
	b.awaitNoFiles(dir)
	b.awaitUnmounted(handles)
	b.runKctl("delete", "deployment,statefulset", "--all")
	testenv.Eventually(b, soon, func() error {
		if out := b.runKctl("get", "pods", "-o", "name"); out != "" {
			return errors.New("pods are still there: " + out)
		}
		return nil
	})
	if out, err := testenv.Host(b, sidecarNode).Command(b.Context(), "rm", "-rf", dir).CombinedOutput(); err != nil {
		b.Errorf("%s: %v", out, err)
	}
}
