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
	b := beside{T: t, ns: testenv.Namespace(t)}
	b.driver = b.ns + ".csi.example"
	b.loadDriver()
	t.Cleanup(func() {
		if t.Failed() {
			b.tell()
		}
		testenv.Kctl(t, append([]string{"delete", "--ignore-not-found"}, b.global()...)...)
	})
	b.apply(b.read("testdata/csidriver.yaml"))
	b.kctl("annotate", "csidriver", b.driver, "keelson.dev/served-by=agent")
	b.kctl("rollout", "status", "statefulset/driver", "--timeout=200s")
	b.claim("now", "now", "24Mi", "")
	b.becomes("Bound", "pvc/now", ".status.phase")
	b.modifies(b.kctl("get", "pvc/now", "-o", "jsonpath={.spec.volumeName}"))
	b.kctl("delete", "pvc", "--all", "--timeout=180s")
	b.kctl("delete", "volumeattributesclass/"+b.driver+"-fast")
	for _, kind := range []string{"pv", "volumeattributesclasses"} {
		b.gone(kind)
	}
	dir := "/var/lib/kubelet/plugins/" + b.driver
	b.noFiles(filepath.Join(dir, "tiers"), filepath.Join(dir, "data"))
	b.kctl("delete", "statefulset/driver")
}

// global are the objects of a driver that are in no namespace.
func (b beside) global() []string {
	return []string{"csidriver/" + b.driver, "storageclass/" + b.driver + "-now", "storageclass/" + b.driver + "-wait",
		"clusterrole/" + b.driver + "-attributes", "clusterrolebinding/" + b.driver + "-attributes", "volumeattributesclass/" + b.driver + "-fast", "volumeattributesclass/" + b.driver + "-slow", "volumeattributesclass/" + b.driver + "-odd"}
}

// tier wants a volume to be of a tier on its node, a claim and its object to say that it has a class, and nothing to be under way.
func (b beside) tier(claim, class, tier string) {
	b.Helper()
	b.becomes(b.driver+"-"+class, "pvc/"+claim, ".status.currentVolumeAttributesClassName")
	b.becomes("", "pvc/"+claim, ".status.modifyVolumeStatus")
	volume := b.kctl("get", "pvc/"+claim, "-o", "jsonpath={.spec.volumeName}")
	b.becomes(b.driver+"-"+class, "pv/"+volume, ".spec.volumeAttributesClassName")
	id := b.kctl("get", "pv/"+volume, "-o", "jsonpath={.spec.csi.volumeHandle}")
	out, err := testenv.Host(b, sidecarNode).Command(b.Context(), "cat", "/var/lib/kubelet/plugins/"+b.driver+"/tiers/"+id).CombinedOutput()
	if err != nil || string(out) != tier {
		b.Errorf("the volume of claim %s is of tier %q on its node, not %s: %v", claim, out, tier, err)
	}
}

// modifies has a claim's volume be given the attributes of another class while a pod uses it, and another be made with some.
// Of what the driver refuses the claim says so, until it names what it had.
func (b beside) modifies(volume string) {
	b.Helper()
	for class, tier := range map[string]string{"fast": "fast", "slow": "slow", "odd": "sideways"} {
		b.apply(`{apiVersion: storage.k8s.io/v1, kind: VolumeAttributesClass, metadata: {name: DRIVER-` + class + `}, driverName: DRIVER, parameters: {tier: ` + tier + `}}`)
	}
	names := func(class string) {
		b.kctl("patch", "pvc/now", "--type=merge", "-p", `{"spec": {"volumeAttributesClassName": "`+b.driver+"-"+class+`"}}`)
	}
	names("fast")
	b.tier("now", "fast", "fast")
	names("odd")
	b.becomes("Infeasible", "pvc/now", ".status.modifyVolumeStatus.status")
	testenv.Eventually(b, soon, func() error { // by events, which come after the status
		out, err := b.try("why", "pvc/now")
		if !strings.Contains(out, `there is no tier "sideways"`) {
			return fmt.Errorf("why the volume does not change: %v\n%s", err, out)
		}
		return nil
	})
	names("slow")
	b.tier("now", "slow", "slow")
	b.claim("quick", "now", "24Mi", ", volumeAttributesClassName: DRIVER-fast")
	b.becomes("Bound", "pvc/quick", ".status.phase")
	b.tier("quick", "fast", "fast")
	b.kctl("delete", "--wait=false", "volumeattributesclass/"+b.driver+"-slow", "volumeattributesclass/"+b.driver+"-odd")
	b.gone("volumeattributesclass/" + b.driver + "-odd")
	if out := b.kctl("get", "volumeattributesclass/"+b.driver+"-slow", "-o", "jsonpath={.metadata.finalizers} {.metadata.deletionTimestamp}"); !strings.HasPrefix(out, `["kubernetes.io/vac-protection"] 2`) {
		b.Errorf("a class that volume %s has: %q", volume, out)
	}
}
