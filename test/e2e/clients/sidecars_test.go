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

// sidecarImages are the community's programs, each with what it is started with and the name of its release's image.
var sidecarImages = []struct{ name, release, args string }{
	{"csi-provisioner", "v6.4.0", `--csi-address=/csi/csi.sock, --leader-election, "--http-endpoint=:8080", --enable-capacity, --capacity-ownerref-level=2, --capacity-poll-interval=5s, --default-fstype=ext4, --v=3`},
	{"csi-attacher", "v4.13.0", `--csi-address=/csi/csi.sock, --leader-election, "--http-endpoint=:8080", --v=3`},
	{"csi-resizer", "v2.3.0", `--csi-address=/csi/csi.sock, --leader-election, "--http-endpoint=:8080", --v=3`},
	{"csi-snapshotter", "v8.7.0", `--csi-address=/csi/csi.sock, --leader-election, "--http-endpoint=:8080", --v=3`},
	{"snapshot-controller", "v8.7.0", `--leader-election, "--http-endpoint=:8080", --v=3`},
}

// beside is a CSI driver with the community's programs beside it.
type beside struct {
	*testing.T
	ns, driver, programs string
}

func (b beside) kctl(args ...string) string {
	b.Helper()
	return strings.TrimSpace(testenv.Kctl(b, append([]string{"-n", b.ns}, args...)...))
}

func (b beside) try(args ...string) (string, error) {
	b.Helper()
	out, err := testenv.Try(b, filepath.Join(testenv.Lab().Config.BinDir, "kctl"), append([]string{"-n", b.ns}, args...)...)
	return strings.TrimSpace(out), err
}

// apply puts a manifest into the test's namespace, with words replaced.
func (b beside) apply(text string, replace ...string) {
	b.Helper()
	replace = append(replace, "DRIVER", b.driver, ": NODE", ": "+sidecarNode, "namespace: NAMESPACE", "namespace: "+b.ns)
	b.kctl("apply", "-f", written(b, strings.NewReplacer(replace...).Replace(text)))
}

func (b beside) read(file string) string {
	b.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		b.Fatal(err)
	}
	return string(text)
}

// becomes waits until something of an object has a value.
func (b beside) becomes(want, object, path string) {
	b.Helper()
	testenv.Eventually(b, soon, func() error {
		out, err := b.try("get", object, "-o", "jsonpath={"+path+"}")
		if err != nil || out != want {
			return fmt.Errorf("%s of %s is %q, not %q: %v", path, object, out, want, err)
		}
		return nil
	})
}

// gone waits until nothing of a kind names the driver.
func (b beside) gone(kind string) {
	b.Helper()
	testenv.Eventually(b, soon, func() error {
		out, err := b.try("get", kind, "-o", "yaml")
		if err != nil && !strings.Contains(out, "not found") || err == nil && strings.Contains(out, b.driver) {
			return fmt.Errorf("left of %s: %v %.2000s", kind, err, out)
		}
		return nil
	})
}

// loadDriver makes the image of the driver: with its registrar and the programs of the file system, as such images have them.
func (b beside) loadDriver() {
	b.Helper()
	dir := testenv.Build(b, "keelson.dev/keelson/test/e2e/clients/attachingdriver", "keelson.dev/keelson/test/e2e/sidecar")
	files := map[string]string{"driver": filepath.Join(dir, "attachingdriver"), "sidecar": filepath.Join(dir, "sidecar")}
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

// install puts the driver into the cluster, and the programs with the rights and kinds that they are released with.
func (b beside) install() {
	b.Helper()
	b.loadDriver()
	crds := filepath.Join(b.programs, "crd")
	b.Cleanup(func() {
		if b.Failed() {
			b.tell()
		}
		testenv.Kctl(b, append([]string{"delete", "--ignore-not-found"}, b.global()...)...)
		testenv.Kctl(b, "delete", "--ignore-not-found", "-k", crds)
		for _, s := range sidecarImages {
			b.kctl("delete", "--ignore-not-found", "-f", b.rights(s.name))
		}
	})
	testenv.Kctl(b, "apply", "-k", crds)
	testenv.Kctl(b, "wait", "--for=condition=Established", "--timeout=180s", "crd/volumesnapshots.snapshot.storage.k8s.io",
		"crd/volumesnapshotcontents.snapshot.storage.k8s.io", "crd/volumesnapshotclasses.snapshot.storage.k8s.io")
	b.apply(b.read("testdata/csidriver.yaml"), "podInfoOnMount: false", "podInfoOnMount: true, fsGroupPolicy: File", "[Persistent]", "[Persistent, Ephemeral]")
	b.apply(b.read("testdata/csiattributes.yaml"))
	for _, s := range sidecarImages {
		image := "registry.k8s.io/sig-storage/" + s.name + ":" + s.release
		testenv.LoadImage(b, image, map[string]string{s.name: filepath.Join(b.programs, s.name)}, "/"+s.name)
		b.kctl("apply", "-f", b.rights(s.name))
		b.apply(b.read("testdata/csisidecar.yaml"), "SIDECAR", s.name, "IMAGE", image, "ARGS", s.args)
	}
	b.kctl("rollout", "status", "statefulset/driver", "--timeout=200s")
	for _, s := range sidecarImages {
		b.kctl("rollout", "status", "deployment/"+s.name, "--timeout=200s")
	}
}

// noFiles waits until there are no files in folders of the driver's node.
func (b beside) noFiles(dirs ...string) {
	b.Helper()
	testenv.Eventually(b, soon, func() error {
		out, err := testenv.Host(b, sidecarNode).Command(b.Context(), append(append([]string{"find"}, dirs...), "-type", "f")...).CombinedOutput()
		if err != nil || len(out) > 0 {
			return fmt.Errorf("left on the node: %q, %v", out, err)
		}
		return nil
	})
}

// rights are those that a program's release asks for, in the test's namespace, as their comments want it.
func (b beside) rights(name string) string {
	return written(b, strings.NewReplacer("namespace: default", "namespace: "+b.ns, "namespace: kube-system", "namespace: "+b.ns).
		Replace(b.read(filepath.Join(b.programs, "rbac", name+".yaml"))))
}

// tell says of everybody what he last said.
func (b beside) tell() {
	for _, s := range sidecarImages {
		out, _ := b.try("logs", "-l", "app="+s.name, "--tail=25", "--prefix")
		b.Logf("%s:\n%s", s.name, out)
	}
	for _, what := range [][]string{{"logs", "driver-0", "-c", "driver", "--tail=60"}, {"get", "events"}, {"get", "pv,pvc,volumeattachments,leases,csistoragecapacities,pods", "-o", "wide"}} {
		out, _ := b.try(what...)
		b.Logf("%s:\n%s", strings.Join(what, " "), out)
	}
}

// claim asks for a volume of one of the driver's classes.
func (b beside) claim(name, class, size, source string) {
	b.Helper()
	b.apply(`{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {name: ` + name + `}, spec: {storageClassName: DRIVER-` + class +
		`, accessModes: [ReadWriteOnce], resources: {requests: {storage: ` + size + `}}` + source + `}}`)
}

// user is a pod that has a claim at /data.
func (b beside) user(name, claim string) {
	b.Helper()
	b.apply(`{apiVersion: v1, kind: Pod, metadata: {name: ` + name + `}, spec: {terminationGracePeriodSeconds: 0,
  containers: [{name: main, image: "keelson.dev/tools:v1", command: [sleep, "1000000"], volumeMounts: [{name: data, mountPath: /data}]}],
  volumes: [{name: data, persistentVolumeClaim: {claimName: ` + claim + `}}]}}`)
}

func (b beside) ready(pod string) {
	b.Helper()
	b.becomes("True", "pod/"+pod, `.status.conditions[?(@.type=="Ready")].status`)
}

func (b beside) sh(pod, script string) string {
	b.Helper()
	return b.kctl("exec", pod, "--", "sh", "-c", script)
}

// F110: the community's external-provisioner, attacher, resizer and snapshotter, as they are released and with the rights
// that they are released with, two pods each, serve a driver that the cluster does nothing for itself: its claims are
// provisioned, attached, grown, given other attributes, snapshotted alone and in groups, restored, cloned and deleted
// again, as file systems and as block devices, while the driver is killed under them; and pods have volumes of it for
// themselves.
func TestCommunitySidecars(t *testing.T) {
	t.Parallel() // it waits for a lease most of the time
	b := beside{T: t, ns: testenv.Namespace(t), programs: program(t, "csi-sidecars")}
	b.driver = b.ns + ".csi.example"
	began := time.Now()
	b.install()
	step := func(what string) {
		t.Logf("%s after %s", what, time.Since(began).Round(time.Millisecond))
		began = time.Now()
	}
	step("installed")
	volume := b.provisions()
	step("provisioned and attached")
	b.waits()
	step("another took the lease, and a claim waited for its pod")
	b.grows(volume)
	step("grown")
	b.modifies(volume)
	b.made("quick")
	step("given other attributes")
	b.snapshots()
	step("snapshotted, restored and cloned")
	b.groups()
	step("snapshotted with another")
	b.devices()
	step("block devices")
	b.ownVolume()
	b.killed()
	step("the driver was killed, and away")
	b.removes()
	step("deleted")
}

// provisions has a claim provisioned at once and attached when a pod wants it. It returns the volume.
func (b beside) provisions() string {
	b.Helper()
	b.claim("now", "now", "24Mi", "")
	b.becomes("Bound", "pvc/now", ".status.phase")
	volume := b.kctl("get", "pvc/now", "-o", "jsonpath={.spec.volumeName}")
	b.becomes(b.driver, "pv/"+volume, `.metadata.annotations.pv\.kubernetes\.io/provisioned-by`)
	if out := b.kctl("get", "pvc/now", "pv/"+volume, "-o", "yaml"); strings.Contains(out, "keelson.dev/provisioning") || !strings.Contains(out, "volume.beta.kubernetes.io/storage-provisioner: "+b.driver) {
		b.Errorf("the claim and its volume are not left to the provisioner:\n%s", out)
	}
	b.made("now")
	b.user("writer", "now")
	b.ready("writer")
	b.sh("writer", "echo kept > /data/file; sync")
	at := b.kctl("get", "volumeattachments", "-o", `jsonpath={range .items[?(@.spec.attacher=="`+b.driver+`")]}{.spec.source.persistentVolumeName} {.spec.nodeName} {.status.attached} {.metadata.finalizers[0]} {.status.attachmentMetadata.ticket}{"\n"}{end}`)
	if want := volume + " " + sidecarNode + " true external-attacher/" + strings.ReplaceAll(b.driver, ".", "-") + " " + volume + " at " + sidecarNode; at != want {
		b.Errorf("attachments are %q, not %q", at, want)
	}
	return volume
}

// made wants a claim's volume to be one that the provisioner itself says that it has made.
func (b beside) made(claim string) {
	b.Helper()
	volume := b.kctl("get", "pvc/"+claim, "-o", "jsonpath={.spec.volumeName}")
	by := b.kctl("get", "pv/"+volume, "-o", `jsonpath={.spec.csi.volumeAttributes.storage\.kubernetes\.io/csiProvisionerIdentity}`)
	if !strings.HasSuffix(by, b.driver) {
		b.Errorf("volume %s of claim %s is of provisioner %q", volume, claim, by)
	}
}

// waits has a claim wait for its pod, by way of what the provisioner says of free storage; beforehand its leader is deleted.
func (b beside) waits() {
	b.Helper()
	const lease = `jsonpath={.items[?(@.metadata.name=="LEASE")].spec.holderIdentity}`
	name := strings.ReplaceAll(b.driver, ".", "-") // as the provisioner has it
	holder := func() (string, error) { return b.try("get", "leases", "-o", strings.Replace(lease, "LEASE", name, 1)) }
	first, err := holder()
	if err != nil || first == "" {
		b.Fatalf("nobody holds lease %s: %v: %s", name, err, b.kctl("get", "leases"))
	}
	pods := strings.Fields(b.kctl("get", "pods", "-l", "app=csi-provisioner", "-o", "jsonpath={.items[*].metadata.name}"))
	for _, p := range pods {
		if strings.HasSuffix(first, p) {
			b.kctl("delete", "pod", p, "--wait=false")
		}
	}
	b.claim("wait", "wait", "24Mi", "")
	b.claim("vast", "wait", "900Ti", "")
	b.user("second", "wait")
	b.user("vast", "vast")
	b.ready("second")
	b.made("wait")
	b.becomes(sidecarNode, "pod/second", ".spec.nodeName")
	testenv.Eventually(b, soon, func() error { // it may have done its last work while it ended
		now, err := holder()
		if err == nil && (now == first || now == "") {
			err = fmt.Errorf("the lease is held by %q, and was by %q", now, first)
		}
		return err
	})
	testenv.Eventually(b, soon, func() error {
		out, err := b.try("get", "events", "--field-selector=involvedObject.name=vast,reason=FailedScheduling", "-o", "jsonpath={.items[*].message}")
		if err != nil || !strings.Contains(out, "did not have enough free storage") {
			return fmt.Errorf("the pod that no node has room for: %q, %w", out, err)
		}
		return nil
	})
	b.becomes("Deployment", "csistoragecapacities", ".items[0].metadata.ownerReferences[0].kind")
	b.kctl("delete", "pod/vast", "pvc/vast")
}

// grows has a claim grow while a pod uses it. Where the nodes may not grow mounted file systems, that is done when a pod
// mounts it again, which is after it was detached.
func (b beside) grows(volume string) {
	b.Helper()
	b.kctl("patch", "pvc/now", "--type=merge", "-p", `{"spec": {"resources": {"requests": {"storage": "40Mi"}}}}`)
	b.becomes("40Mi", "pv/"+volume, ".spec.capacity.storage")
	b.kctl("delete", "pod/writer")
	testenv.Eventually(b, soon, func() error {
		out, err := b.try("get", "volumeattachments", "-o", "yaml")
		if err != nil || strings.Contains(out, volume) {
			return fmt.Errorf("volume %s is still attached: %v", volume, err)
		}
		return nil
	})
	b.user("writer", "now")
	b.ready("writer")
	b.becomes("40Mi", "pvc/now", ".status.capacity.storage")
	if out := b.sh("writer", "cat /data/file; dd if=/dev/zero of=/data/large bs=1M count=30 2>&1 && rm /data/large"); !strings.HasPrefix(out, "kept") || strings.Contains(out, "No space") {
		b.Errorf("the volume that has grown: %q", out)
	}
}

// snapshots keeps what a volume holds, and has a claim begin with it, and another with what the volume holds by then.
func (b beside) snapshots() {
	b.Helper()
	b.apply(b.read("testdata/csisnapshots.yaml"))
	b.becomes("true", "volumesnapshot/kept", ".status.readyToUse")
	b.sh("writer", "echo changed > /data/file; sync")
	b.claim("restored", "now", "48Mi", ", dataSource: {apiGroup: snapshot.storage.k8s.io, kind: VolumeSnapshot, name: kept}")
	b.claim("cloned", "wait", "48Mi", ", dataSource: {kind: PersistentVolumeClaim, name: now}")
	for claim, want := range map[string]string{"restored": "kept", "cloned": "changed"} {
		b.user("reader-of-"+claim, claim)
		b.ready("reader-of-" + claim)
		b.made(claim)
		if out := b.sh("reader-of-"+claim, "cat /data/file"); out != want {
			b.Errorf("in the claim that was %s there is %q", claim, out)
		}
	}
	if out := b.kctl("get", "pvc/now", "-o", "jsonpath={.metadata.finalizers}"); !strings.Contains(out, "provisioner.storage.kubernetes.io/cloning-protection") {
		b.Errorf("the claim that was cloned has %s", out) // the provisioner takes its finalizer away when the claim is deleted
	}
}

// groups keeps what two volumes hold at one moment, and has a claim begin with what one of them held.
func (b beside) groups() {
	b.Helper()
	b.kctl("label", "pvc/now", "pvc/wait", "kept=together")
	b.sh("second", "echo beside > /data/file; sync")
	b.apply(b.read("testdata/csigroups.yaml"))
	b.becomes("true", "volumegroupsnapshot/both", ".status.readyToUse")
	b.sh("second", "echo later > /data/file; sync")
	member := b.kctl("get", "volumesnapshots", "-o", `jsonpath={.items[?(@.spec.source.persistentVolumeClaimName=="wait")].metadata.name}`)
	b.becomes("true", "volumesnapshot/"+member, ".status.readyToUse")
	b.claim("of-group", "now", "24Mi", ", dataSource: {apiGroup: snapshot.storage.k8s.io, kind: VolumeSnapshot, name: "+member+"}")
	b.user("reader-of-group", "of-group")
	b.ready("reader-of-group")
	if out := b.sh("reader-of-group", "cat /data/file"); out != "beside" {
		b.Errorf("in the claim that began with a member of a group there is %q", out)
	}
	b.kctl("delete", "pod/reader-of-group")
	b.kctl("delete", "volumegroupsnapshot/both", "--timeout=180s")
}

// removes deletes all, of which nothing is left on the node either.
func (b beside) removes() {
	b.Helper()
	handles := b.handles()
	b.kctl("delete", "pod/writer", "pod/second", "pod/reader-of-restored", "pod/reader-of-cloned")
	b.kctl("delete", "pvc", "--all", "--timeout=180s")
	b.kctl("delete", "volumesnapshot/kept", "--timeout=180s")
	b.kctl("delete", "volumeattributesclass/"+b.driver+"-fast")
	for _, kind := range []string{"pv", "volumeattachments", "volumesnapshotcontents", "volumegroupsnapshotcontents", "volumeattributesclasses"} {
		b.gone(kind)
	}
	dir := "/var/lib/kubelet/plugins/" + b.driver
	b.noFiles(dir)
	b.unmounted(handles)
	b.kctl("delete", "deployment,statefulset", "--all")
	testenv.Eventually(b, soon, func() error {
		if out := b.kctl("get", "pods", "-o", "name"); out != "" {
			return errors.New("pods are still there: " + out)
		}
		return nil
	})
	if out, err := testenv.Host(b, sidecarNode).Command(b.Context(), "rm", "-rf", dir).CombinedOutput(); err != nil {
		b.Errorf("%s: %v", out, err)
	}
}
