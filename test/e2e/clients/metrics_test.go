package clients

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"keelson.dev/keelson/deploy/lab"
	"keelson.dev/keelson/test/testenv"
)

// metricsImage is the image that metrics-server's own manifests name.
const metricsImage = "gcr.io/k8s-staging-metrics-server/metrics-server:master"

// The released metrics-server with its original manifests verifies the nodes' certificates by the
// cluster's CA, is authorized through its ServiceAccount, and becomes part of the API. 'kctl top'
// then shows which pods are busy. The same metrics can be read through the API, by the agents'
// tunnels.
func TestMetricsServer(t *testing.T) {
	server := clientProgram(t, "metrics-server")
	manifests := filepath.Join(filepath.Dir(server), "metrics-server-manifests")
	ns := testenv.Namespace(t)
	testenv.LoadImage(t, metricsImage, map[string]string{"metrics-server": server}, "/metrics-server")
	t.Cleanup(func() {
		if t.Failed() {
			for _, what := range [][]string{{"logs", "deployment/metrics-server", "--tail=20"},
				{"describe", "pod", "-l", "k8s-app=metrics-server"}} {
				out, _ := testenv.Try(t, filepath.Join(testenv.Lab().Config.BinDir, "kctl"),
					append([]string{"-n", "kube-system"}, what...)...)
				t.Logf("%s:\n%s", strings.Join(what, " "), out)
			}
		}
		testenv.Kctl(t, "delete", "--ignore-not-found", "-k", manifests)
	})
	testenv.Kctl(t, "apply", "-k", manifests)
	startBurner(t, ns, "busy", "while :; do :; done")
	startBurner(t, ns, "asleep", "exec sleep 100000")
	checkNodeProxies(t)
	checkUnauthenticated(t, ns)
	testenv.Kctl(t, "wait", "--for=condition=Available", "apiservice/v1beta1.metrics.k8s.io", "--timeout=200s")
	testenv.Eventually(t, soon, func() error { return checkTopNodes(t) })
	testenv.Eventually(t, soon, func() error { return checkTopPods(t, ns) })
	testenv.Kctl(t, "auth", "can-i", "list", "pods.metrics.k8s.io") // discovered
}

// startBurner runs a script in a pod with a limit of a tenth of a CPU.
func startBurner(t *testing.T, ns, name, script string) {
	t.Helper()
	pod := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: v1.PodSpec{TerminationGracePeriodSeconds: new(int64), Containers: []v1.Container{{
			Name: "app", Image: "keelson.dev/tools:v1", Command: []string{"sh", "-c", script},
			Resources: v1.ResourceRequirements{Limits: v1.ResourceList{v1.ResourceCPU: resource.MustParse("100m")}},
		}}}}
	if _, err := testenv.Client(t).CoreV1().Pods(ns).Create(context.Background(), pod, metav1.CreateOptions{}); err !=
		nil {
		t.Fatal(err)
	}
}

// checkNodeProxies requests each node's server through the API, without naming a port.
func checkNodeProxies(t *testing.T) {
	t.Helper()
	for _, h := range testenv.Lab().Config.Hosts {
		if h.Role != lab.RoleWorker {
			continue
		}
		for path, want := range map[string]string{
			"metrics/resource": "\nnode_cpu_usage_seconds_total ", "stats/summary": `"nodeName":"` + h.Name + `"`,
			"metrics": "\nprocess_resident_memory_bytes ", "healthz": "ok", "pods": `"kind":"PodList"`,
			"metrics/cadvisor": "\ncontainer_memory_working_set_bytes{",
			"metrics/probes":   "\nprocess_start_time_seconds ", "configz": `"kind":"KubeletConfiguration"`,
		} {
			testenv.Eventually(t, soon, func() error { // a node that has just come has its certificate signed first
				out, err := testenv.Try(t, filepath.Join(testenv.Lab().Config.BinDir, "kctl"), "get", "--raw",
					"/api/v1/nodes/"+h.Name+"/proxy/"+path)
				if err != nil || !strings.Contains(out, want) {
					return fmt.Errorf("%s of %s: %w %.300s", path, h.Name, err, out)
				}
				return nil
			})
		}
	}
}

// checkUnauthenticated sends requests to a node directly. The node's certificate is valid for its
// address. The node refuses unauthenticated clients and clients without the right.
func checkUnauthenticated(t *testing.T, ns string) {
	t.Helper()
	nodes, err := testenv.Client(t).CoreV1().Nodes().List(context.Background(), metav1.ListOptions{})
	if err != nil || len(nodes.Items) == 0 {
		t.Fatal("no nodes: ", err)
	}
	node := nodes.Items[0]
	cfg := testenv.RestConfig(t)
	if err := rest.LoadTLSFiles(cfg); err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(cfg.CAData)
	c := testenv.HTTP(testenv.Host(t, nodes.Items[len(nodes.Items)-1].Name)) // from another node
	c.Transport.(*http.Transport).TLSClientConfig = &tls.Config{RootCAs: pool}
	testenv.Kctl(t, "-n", ns, "create", "serviceaccount", "poor")
	token, err := testenv.Client(t).CoreV1().ServiceAccounts(ns).CreateToken(context.Background(), "poor",
		&authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	at := fmt.Sprintf("https://%s:%d/metrics/resource", internalAddress(&node),
		node.Status.DaemonEndpoints.KubeletEndpoint.Port)
	for bearer, want := range map[string]int{"": 401, "made-up": 401, token.Status.Token: 403} {
		req, err := http.NewRequest(http.MethodGet, at, nil)
		if err != nil {
			t.Fatal(err)
		}
		if bearer != "" {
			req.Header.Set("Authorization", "Bearer "+bearer)
		}
		testenv.Eventually(t, soon, func() error {
			// the node may ask a replica that has not received the account yet, and caches its
			// response for a while
			resp, err := c.Do(req)
			if err != nil {
				return fmt.Errorf("%s: %w", at, err)
			}
			defer resp.Body.Close()
			said, _ := io.ReadAll(resp.Body)
			if resp.StatusCode != want {
				return fmt.Errorf("with token %.10q: %d %s", bearer, resp.StatusCode, said)
			}
			return nil
		})
	}
}

func internalAddress(n *v1.Node) string {
	for _, a := range n.Status.Addresses {
		if a.Type == v1.NodeInternalIP {
			return a.Address
		}
	}
	return ""
}

// readTop returns the fields of the lines of "kctl top" without the heading, by their first field.
func readTop(t *testing.T, args ...string) (map[string][]string, error) {
	t.Helper()
	out, err := testenv.Try(t, filepath.Join(testenv.Lab().Config.BinDir, "kctl"), append([]string{"top"}, args...)...)
	if err != nil {
		return nil, fmt.Errorf("%w: %s", err, out)
	}
	lines := map[string][]string{}
	for line := range strings.Lines(out) {
		if f := strings.Fields(line); len(f) > 2 && f[0] != "NAME" {
			lines[f[0]] = f
		}
	}
	return lines, nil
}

// parseAmount returns the number in "12m" or "34Mi", or -1 if there is no number, as for a node
// without metrics.
func parseAmount(word, unit string) int {
	n, err := strconv.Atoi(strings.TrimSuffix(word, unit))
	if err != nil {
		return -1
	}
	return n
}

func checkTopNodes(t *testing.T) error {
	lines, err := readTop(t, "node")
	if err != nil {
		return err
	}
	workers := 0
	for _, h := range testenv.Lab().Config.Hosts {
		if h.Role != lab.RoleWorker {
			continue
		}
		workers++
		f := lines[h.Name]
		if len(f) < 5 || parseAmount(f[1], "m") <= 0 || parseAmount(f[3], "Mi") < 5 || parseAmount(f[4], "%") < 0 ||
			parseAmount(f[4], "%") > 100 {
			return fmt.Errorf("node %s uses %v", h.Name, f)
		}
	}
	if workers == 0 {
		return fmt.Errorf("no workers in %v", lines)
	}
	return nil
}

func checkTopPods(t *testing.T, ns string) error {
	lines, err := readTop(t, "pod", "-n", ns)
	if err != nil {
		return err
	}
	busy, asleep := lines["busy"], lines["asleep"]
	if len(busy) < 3 || len(asleep) < 3 {
		return fmt.Errorf("pods: %v", lines)
	}
	if n := parseAmount(busy[1], "m"); n < 20 || n > 150 || parseAmount(asleep[1], "m") > 5 ||
		parseAmount(asleep[1], "m") < 0 {
		return fmt.Errorf("the pod that uses a tenth of a CPU has %v, the sleeping pod %v", busy, asleep)
	}
	if n := parseAmount(busy[2], "Mi"); n < 0 || n > 50 {
		return fmt.Errorf("the busy pod has %v of memory", busy)
	}
	return nil
}
