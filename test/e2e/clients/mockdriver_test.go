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

// called is what Kubernetes' mock driver writes down of a call.
type called struct {
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

// calls are those of a volume, in their order, without those that only look.
func (b beside) calls(handle string) (methods []string) {
	b.Helper()
	for line := range strings.SplitSeq(b.kctl("logs", "driver-0", "-c", "driver"), "\n") {
		_, text, found := strings.Cut(line, "gRPCCall: ")
		if !found {
			continue
		}
		var c called
		if err := json.Unmarshal([]byte(text), &c); err != nil {
			b.Fatalf("%v in %s", err, line)
		}
		method := c.Method[strings.LastIndex(c.Method, "/")+1:]
		if c.Request.VolumeID != handle && c.Response.Volume.ID != handle || strings.Contains(method, "Get") || strings.HasPrefix(method, "Validate") {
			continue
		}
		if c.Error != "" {
			method += ": " + c.Error
		}
		methods = append(methods, method)
	}
	return slices.Compact(methods) // what is asked again is answered again
}

// F110: the driver that Kubernetes' own tests have, as it is, with nothing beside it but what registers it: the agent of its
// node asks it for volumes, and each volume goes through all of the driver's calls in their order and back. It takes two at
// once, and says so: a third waits for one of them to go.
func TestDriverOfKubernetes(t *testing.T) {
	t.Parallel()
	b := beside{T: t, ns: testenv.Namespace(t), programs: program(t, "csi-sidecars")}
	b.driver = b.ns + ".mock.example"
	b.installMock()
	for _, name := range []string{"one", "two", "three"} {
		b.claim(name, "now", "1Gi", "")
		b.becomes("Bound", "pvc/"+name, ".status.phase")
	}
	handle := b.kctl("get", "pv/"+b.kctl("get", "pvc/one", "-o", "jsonpath={.spec.volumeName}"), "-o", "jsonpath={.spec.csi.volumeHandle}")
	for _, name := range []string{"one", "two"} {
		b.user(name, name)
		b.ready(name)
	}
	b.sh("one", "echo kept > /data/file && cat /data/file")
	b.user("three", "three")
	testenv.Eventually(t, soon, func() error {
		out, err := b.try("get", "events", "--field-selector=involvedObject.name=three,reason=FailedScheduling", "-o", "jsonpath={.items[*].message}")
		if err != nil || !strings.Contains(out, "exceed max volume count") {
			return fmt.Errorf("the pod with one volume too many: %q, %w", out, err)
		}
		return nil
	})
	b.kctl("patch", "pvc/one", "--type=merge", "-p", `{"spec": {"resources": {"requests": {"storage": "2Gi"}}}}`)
	b.becomes("2Gi", "pvc/one", ".status.capacity.storage")
	b.kctl("delete", "pod/one")
	b.ready("three")
	b.kctl("delete", "pod/two", "pod/three")
	b.kctl("delete", "pvc", "--all", "--timeout=60s")
	b.gone("pv")
	b.gone("volumeattachments")
	want := []string{"CreateVolume", "ControllerPublishVolume", "NodeStageVolume", "NodePublishVolume", "ControllerExpandVolume", "NodeExpandVolume",
		"NodeUnpublishVolume", "NodeUnstageVolume", "ControllerUnpublishVolume", "DeleteVolume"}
	if got := b.calls(handle); !slices.Equal(got, want) {
		t.Errorf("the driver was asked of volume %s:\n%q, not\n%q", handle, got, want)
	}
}

// installMock puts the driver onto its node.
func (b beside) installMock() {
	b.Helper()
	const image = "example.com/csi/mock:v1"
	sidecar := filepath.Join(testenv.Build(b, "keelson.dev/keelson/test/e2e/sidecar"), "sidecar")
	testenv.LoadImage(b, image, map[string]string{"driver": filepath.Join(b.programs, "mockdriver"), "sidecar": sidecar}, "/driver")
	b.Cleanup(func() {
		if b.Failed() {
			for _, what := range [][]string{{"logs", "driver-0", "-c", "driver", "--tail=80"}, {"get", "events"}, {"get", "pv,pvc,volumeattachments,csinodes,pods", "-o", "wide"}} {
				out, _ := b.try(what...)
				b.Logf("%s:\n%s", strings.Join(what, " "), out)
			}
		}
		testenv.Kctl(b, append([]string{"delete", "--ignore-not-found"}, b.global()...)...)
	})
	b.apply(b.read("testdata/csidriver.yaml"), "example.com/csi/attaching:v1", image, "--node-id=$(KUBE_NODE_NAME)", "--attach-limit=2, -v=3",
		"metadata: {name: DRIVER}\nspec: {attach", `metadata: {name: `+b.driver+`, annotations: {keelson.dev/served-by: agent}}`+"\nspec: {attach")
	b.kctl("rollout", "status", "statefulset/driver", "--timeout=100s")
	testenv.Eventually(b, soon, func() error {
		out, err := b.try("get", "csinode/"+sidecarNode, "-o", "jsonpath={.spec.drivers[*].name}")
		if err != nil || !strings.Contains(out, b.driver) {
			return fmt.Errorf("drivers of %s: %q, %w", sidecarNode, out, err)
		}
		return nil
	})
}
