package clients

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"keelson.dev/keelson/test/testenv"
)

// F110: a driver without a resizer and a provisioner of its own gets its volumes made with the attributes of a
// VolumeAttributesClass, and changed to those of another, by the control plane through the agent of its node.
func TestVolumeAttributes(t *testing.T) {
	t.Parallel()
	b := sidecarTest{T: t, ns: testenv.Namespace(t)}
	b.driver = b.ns + ".csi.example"
	b.loadDriver()
	t.Cleanup(func() {
		if t.Failed() {
			b.logContainers()
		}
		testenv.Kctl(t, append([]string{"delete", "--ignore-not-found"}, b.clusterObjects()...)...)
	})
	b.applyText(b.readFile("testdata/csidriver.yaml"))
	b.runKctl("annotate", "csidriver", b.driver, "keelson.dev/served-by=agent")
	b.runKctl("rollout", "status", "statefulset/driver", "--timeout=200s")
	b.createClaim("now", "now", "24Mi", "")
	b.awaitValue("Bound", "pvc/now", ".status.phase")
	b.checkModification(b.runKctl("get", "pvc/now", "-o", "jsonpath={.spec.volumeName}"))
	b.runKctl("delete", "pvc", "--all", "--timeout=180s")
	b.runKctl("delete", "volumeattributesclass/"+b.driver+"-fast")
	for _, kind := range []string{"pv", "volumeattributesclasses"} {
		b.awaitNoObjects(kind)
	}
	dir := "/var/lib/kubelet/plugins/" + b.driver
	b.awaitNoFiles(filepath.Join(dir, "tiers"), filepath.Join(dir, "data"))
	b.runKctl("delete", "statefulset/driver")
}

// clusterObjects returns the cluster-scoped objects of a driver.
func (b sidecarTest) clusterObjects() []string {
	return []string{"csidriver/" + b.driver, "storageclass/" + b.driver + "-now", "storageclass/" + b.driver + "-wait",
		"clusterrole/" + b.driver + "-attributes", "clusterrolebinding/" + b.driver + "-attributes",
		"volumeattributesclass/" + b.driver + "-fast", "volumeattributesclass/" + b.driver + "-slow",
		"volumeattributesclass/" + b.driver + "-odd"}
}

// requireTier checks that a volume has a tier on its node, that its claim and PersistentVolume
// report the class, and that no modification is in progress.
func (b sidecarTest) requireTier(claim, class, tier string) {
	b.Helper()
	b.awaitValue(b.driver+"-"+class, "pvc/"+claim, ".status.currentVolumeAttributesClassName")
	b.awaitValue("", "pvc/"+claim, ".status.modifyVolumeStatus")
	volume := b.runKctl("get", "pvc/"+claim, "-o", "jsonpath={.spec.volumeName}")
	b.awaitValue(b.driver+"-"+class, "pv/"+volume, ".spec.volumeAttributesClassName")
	id := b.runKctl("get", "pv/"+volume, "-o", "jsonpath={.spec.csi.volumeHandle}")
	out, err := testenv.Host(b, sidecarNode).Command(b.Context(), "cat",
		"/var/lib/kubelet/plugins/"+b.driver+"/tiers/"+id).CombinedOutput()
	if err != nil || string(out) != tier {
		b.Errorf("the volume of claim %s is of tier %q on its node, not %s: %v", claim, out, tier, err)
	}
}

// checkModification changes the VolumeAttributesClass of a volume in use, and creates another
// volume with a class. The claim reports a change that the driver refuses until the claim has its
// previous class again.
func (b sidecarTest) checkModification(volume string) {
	b.Helper()
	for class, tier := range map[string]string{"fast": "fast", "slow": "slow", "odd": "sideways"} {
		b.applyText(`{apiVersion: storage.k8s.io/v1, kind: VolumeAttributesClass, metadata: {name: DRIVER-` + class +
			`}, driverName: DRIVER, parameters: {tier: ` + tier + `}}`)
	}
	names := func(class string) {
		b.runKctl("patch", "pvc/now", "--type=merge", "-p",
			`{"spec": {"volumeAttributesClassName": "`+b.driver+"-"+class+`"}}`)
	}
	names("fast")
	b.requireTier("now", "fast", "fast")
	names("odd")
	b.awaitValue("Infeasible", "pvc/now", ".status.modifyVolumeStatus.status")
	testenv.Eventually(b, soon, func() error { // by events, which come after the status
		out, err := b.tryKctl("why", "pvc/now")
		if !strings.Contains(out, `unsupported attribute tier "sideways"`) {
			return fmt.Errorf("why the volume does not change: %v\n%s", err, out)
		}
		return nil
	})
	names("slow")
	b.requireTier("now", "slow", "slow")
	b.createClaim("quick", "now", "24Mi", ", volumeAttributesClassName: DRIVER-fast")
	b.awaitValue("Bound", "pvc/quick", ".status.phase")
	b.requireTier("quick", "fast", "fast")
	b.runKctl("delete", "--wait=false", "volumeattributesclass/"+b.driver+"-slow",
		"volumeattributesclass/"+b.driver+"-odd")
	b.awaitNoObjects("volumeattributesclass/" + b.driver + "-odd")
	if out := b.runKctl("get", "volumeattributesclass/"+b.driver+"-slow", "-o",
		"jsonpath={.metadata.finalizers} {.metadata.deletionTimestamp}"); !strings.HasPrefix(out,
		`["kubernetes.io/vac-protection"] 2`) {
		b.Errorf("a class that volume %s has: %q", volume, out)
	}
}
