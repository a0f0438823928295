package clients

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"keelson.dev/keelson/test/testenv"
)

// mockCall is a call in the log of Kubernetes' mock driver.
type mockCall struct {
	Method  string
	Request struct {
		VolumeID string `json:"volume_id"`
		Name     string
	}
	Response struct {
		Volume struct {
			ID string `json:"volume_id"`
		}
	}
	Error string
}

// loggedCalls returns the methods called for a volume in their order, without read-only calls.
func (b sidecarTest) loggedCalls(handle string) (methods []string) {
	b.Helper()
	for line := range strings.SplitSeq(b.runKctl("logs", "driver-0", "-c", "driver"), "\n") {
		_, text, found := strings.Cut(line, "gRPCCall: ")
		if !found {
			continue
		}
		var c mockCall
		if err := json.Unmarshal([]byte(text), &c); err != nil {
			b.Fatalf("%v in %s", err, line)
		}
		method := c.Method[strings.LastIndex(c.Method, "/")+1:]
		if c.Request.VolumeID != handle && c.Response.Volume.ID != handle || strings.Contains(method, "Get") ||
			strings.HasPrefix(method, "Validate") {
			continue
		}
		if c.Error != "" {
			method += ": " + c.Error
		}
		methods = append(methods, method)
	}
	return slices.Compact(methods) // repeated calls are logged again
}

// F110: the unchanged mock driver of Kubernetes' tests runs with only a registrar. The node's agent
// calls it for volumes, and each volume passes through all of the driver's calls in their order and
// back. The driver accepts two volumes at once and reports that limit: a third pod waits until a
// volume is detached.
func TestDriverOfKubernetes(t *testing.T) {
	t.Parallel()
	b := sidecarTest{T: t, ns: testenv.Namespace(t), programs: clientProgram(t, "csi-sidecars")}
	b.driver = b.ns + ".mock.example"
	b.installMock()
	for _, name := range []string{"one", "two", "three"} {
		b.createClaim(name, "now", "1Gi", "")
		b.awaitValue("Bound", "pvc/"+name, ".status.phase")
	}
	handle := b.runKctl("get", "pv/"+b.runKctl("get", "pvc/one", "-o", "jsonpath={.spec.volumeName}"), "-o",
		"jsonpath={.spec.csi.volumeHandle}")
	for _, name := range []string{"one", "two"} {
		b.createUserPod(name, name)
		b.awaitReady(name)
	}
	b.execScript("one", "echo kept > /data/file && cat /data/file")
	b.createUserPod("three", "three")
	testenv.Eventually(t, soon, func() error {
		out, err := b.tryKctl("get", "events", "--field-selector=involvedObject.name=three,reason=FailedScheduling",
			"-o",
			"jsonpath={.items[*].message}")
		if err != nil || !strings.Contains(out, "exceed max volume count") {
			return fmt.Errorf("the pod with one volume too many: %q, %w", out, err)
		}
		return nil
	})
	b.runKctl("patch", "pvc/one", "--type=merge", "-p", `{"spec": {"resources": {"requests": {"storage": "2Gi"}}}}`)
	b.awaitValue("2Gi", "pvc/one", ".status.capacity.storage")
	b.runKctl("delete", "pod/one")
	b.awaitReady("three")
	b.runKctl("delete", "pod/two", "pod/three")
	b.runKctl("delete", "pvc", "--all", "--timeout=60s")
	b.awaitNoObjects("pv")
	b.awaitNoObjects("volumeattachments")
	want := []string{"CreateVolume", "ControllerPublishVolume", "NodeStageVolume", "NodePublishVolume",
		"ControllerExpandVolume", "NodeExpandVolume",
		"NodeUnpublishVolume", "NodeUnstageVolume", "ControllerUnpublishVolume", "DeleteVolume"}
	if got := b.loggedCalls(handle); !slices.Equal(got, want) {
		t.Errorf("the driver's calls for volume %s are\n%q, want\n%q", handle, got, want)
	}
}

// installMock installs the driver on its node.
func (b sidecarTest) installMock() {
	b.Helper()
	const image = "example.com/csi/mock:v1"
	sidecar := filepath.Join(testenv.Build(b, "keelson.dev/keelson/test/e2e/sidecar"), "sidecar")
	testenv.LoadImage(b, image, map[string]string{"driver": filepath.Join(b.programs, "mockdriver"),
		"sidecar": sidecar}, "/driver")
	b.Cleanup(func() {
		if b.Failed() {
			for _, what := range [][]string{{"logs", "driver-0", "-c", "driver", "--tail=80"}, {"get", "events"},
				{"get", "pv,pvc,volumeattachments,csinodes,pods", "-o", "wide"}} {
				out, _ := b.tryKctl(what...)
				b.Logf("%s:\n%s", strings.Join(what, " "), out)
			}
		}
		testenv.Kctl(b, append([]string{"delete", "--ignore-not-found"}, b.clusterObjects()...)...)
	})
	b.applyText(b.readFile("testdata/csidriver.yaml"), "example.com/csi/attaching:v1", image,
		"--node-id=$(KUBE_NODE_NAME)",
		"--attach-limit=2, -v=3",
		"metadata: {name: DRIVER}\nspec: {attach",
		`metadata: {name: `+b.driver+`, annotations: {keelson.dev/served-by: agent}}`+"\nspec: {attach")
	b.runKctl("rollout", "status", "statefulset/driver", "--timeout=100s")
	testenv.Eventually(b, soon, func() error {
		out, err := b.tryKctl("get", "csinode/"+sidecarNode, "-o", "jsonpath={.spec.drivers[*].name}")
		if err != nil || !strings.Contains(out, b.driver) {
			return fmt.Errorf("drivers of %s: %q, %w", sidecarNode, out, err)
		}
		return nil
	})
}
