package clients

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/tools/clientcmd"

	"keelson.dev/keelson/kctl/definitions"
	"keelson.dev/keelson/test/testenv"
)

// echoImages are the images in the suite's manifests: its echo program in two releases, and a DNS
// server that only tests of UDPRoute use. The echo program replaces the DNS server so that its pod
// runs.
var echoImages = []string{"registry.k8s.io/gateway-api/echo-basic:v1.5.1",
	"registry.k8s.io/gateway-api/echo-basic:v1.6.0-dev.3",
	"registry.k8s.io/coredns/coredns:v1.12.2"}

// The published conformance suite of the Gateway API passes with the features in our class's
// status. It runs on a host outside of the cluster, which reaches the Gateways' addresses like any
// client.
func TestGatewayAPI(t *testing.T) {
	t.Parallel() // beside TestCommunitySidecars, which waits most of the time
	suite, echo := clientProgram(t, "gateway-conformance"), clientProgram(t, "echo-basic")
	cluster, err := dynamic.NewForConfig(testenv.RestConfig(t))
	if err != nil {
		t.Fatal(err)
	}
	if err := definitions.Gateway.Install(t.Context(), cluster, func(definitions.Outcome) {}); err != nil {
		t.Fatal(err)
	}
	for _, image := range echoImages {
		testenv.LoadImage(t, image, map[string]string{"echo-basic": echo}, "/echo-basic")
	}
	outside := testenv.Host(t, "registry")
	address := func(last byte) netip.Addr {
		raw := outside.IP.As4()
		raw[3] = last
		return netip.AddrFrom4(raw)
	}
	maps := testenv.Client(t).CoreV1().ConfigMaps("kube-system")
	if _, err := maps.Create(t.Context(), &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "load-balancer-pools"},
		Data: map[string]string{
			"conformance": fmt.Sprintf("{addresses: [%s-%s], namespaceSelector: {matchLabels: "+
				"{kubernetes.io/metadata.name: keelson-entry}}}", address(200), address(240)),
		}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = maps.Delete(context.Background(), "load-balancer-pools", metav1.DeleteOptions{}) })
	classes := cluster.Resource(schema.GroupVersionResource{Group: "gateway.networking.k8s.io", Version: "v1",
		Resource: "gatewayclasses"})
	class := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "gateway.networking.k8s.io/v1",
		"kind":     "GatewayClass",
		"metadata": map[string]any{"name": "conformance"},
		"spec":     map[string]any{"controllerName": "keelson.dev/gateway"}}}
	if _, err := classes.Create(t.Context(), class, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = classes.Delete(context.Background(), "conformance", metav1.DeleteOptions{}) })
	testenv.Eventually(t, soon, func() error {
		c, err := classes.Get(t.Context(), "conformance", metav1.GetOptions{})
		if err == nil && c.Object["status"] == nil {
			err = fmt.Errorf("the class has no status")
		}
		return err
	})
	args := []string{"--net=" + outside.NetNS(), suite, "-test.v", "-test.run=^TestConformance$",
		"-gateway-class=conformance",
		"-conformance-profiles=GATEWAY-HTTP,GATEWAY-GRPC", "-usable-address=" + address(239).String(),
		"-unusable-address=203.0.113.9",
		"-organization=Keelson", "-project=keelson", "-url=https://keelson.dev", "-version=test", "-contact=none",
		"-report-output=" + filepath.Join(t.TempDir(), "report.yaml")}
	if only := os.Getenv("KEELSON_GATEWAY_TEST"); only != "" {
		args = append(args, "-run-test="+only)
	}
	run := exec.CommandContext(t.Context(), "nsenter", args...)
	run.Env = append(os.Environ(), "KUBECONFIG="+kubeconfigAt(t, "cp1"))
	out, err := run.CombinedOutput()
	passed, failed := parseOutcomes(string(out))
	t.Logf("passed %d: %s", len(passed), strings.Join(passed, " "))
	if dir := os.Getenv("KEELSON_GATEWAY_LOG"); dir != "" {
		if err := os.WriteFile(dir, out, 0o600); err != nil {
			t.Error(err)
		}
	}
	if err != nil || len(failed) > 0 || len(passed) == 0 {
		t.Errorf("%v; failed: %s\n%s", err, strings.Join(failed, " "), lastBytes(string(out), 20_000))
	}
}

// kubeconfigAt returns the administrator's kubeconfig for a client that connects to one replica.
func kubeconfigAt(t *testing.T, replica string) string {
	t.Helper()
	c, err := clientcmd.LoadFromFile(testenv.Lab().Config.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	for _, cl := range c.Clusters {
		cl.Server = fmt.Sprintf("https://%s:6443", testenv.Host(t, replica).IP)
	}
	file := filepath.Join(t.TempDir(), "kubeconfig")
	if err := clientcmd.WriteToFile(*c, file); err != nil {
		t.Fatal(err)
	}
	return file
}

// parseOutcomes returns the suite's tests that passed and those that failed, without their
// subtests.
func parseOutcomes(out string) (passed, failed []string) {
	for line := range strings.Lines(out) {
		f := strings.Fields(line)
		if len(f) < 3 || f[0] != "---" {
			continue
		}
		name, ok := strings.CutPrefix(f[2], "TestConformance/")
		if !ok || strings.Contains(name, "/") {
			continue
		}
		switch f[1] {
		case "PASS:":
			passed = append(passed, name)
		case "FAIL:":
			failed = append(failed, name)
		}
	}
	return passed, failed
}

// lastBytes returns the end of a text.
func lastBytes(text string, most int) string { return text[max(0, len(text)-most):] }
