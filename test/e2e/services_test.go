package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/test/testenv"
)

// F115 F117: the settings of a Service of type LoadBalancer take effect on the nodes once it has an
// address: its client ranges, its traffic policy, its health check port. The node's metrics count
// its connections.
func TestLoadBalancerPolicies(t *testing.T) {
	w := newNamespace(t)
	p := newPod("web", hello)
	p.Spec.NodeName, p.Labels = "w1", map[string]string{"app": "web"}
	w.createPod(p)
	outside, w1, w2 := testenv.Host(t, "registry"), testenv.Host(t, "w1"), testenv.Host(t, "w2")
	svc := webService("web", v1.ServiceTypeLoadBalancer)
	svc.Spec.Ports[0].Port = 8089
	svc.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal
	svc.Spec.LoadBalancerSourceRanges = []string{outside.IP.String() + "/32"}
	svc = w.createService(svc)
	// In this test the balancer's address is routed to a node.
	patch := func(text string, sub ...string) { // controllers may write the Service meanwhile
		t.Helper()
		var err error
		if svc, err = w.cs.CoreV1().Services(w.ns).Patch(t.Context(), "web", types.MergePatchType, []byte(text),
			metav1.PatchOptions{}, sub...); err != nil {
			t.Fatal(err)
		}
	}
	patch(fmt.Sprintf(`{"status": {"loadBalancer": {"ingress": [{"ip": %q}]}}}`, w1.IP), "status")
	w.awaitPod("web", requireReady)
	client := testenv.HTTP(outside)
	get := func(url string) (int, error) {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return 0, err
		}
		resp, err := client.Do(req)
		if err != nil {
			return 0, err
		}
		client.CloseIdleConnections() // the next is another connection
		return resp.StatusCode, resp.Body.Close()
	}
	expect := func(what, url string, want int) {
		t.Helper()
		testenv.Eventually(t, soon, func() error {
			got, err := get(url)
			if want == 0 && err == nil {
				err = errors.New("it answers")
			} else if want == 0 {
				return nil
			} else if err == nil && got != want {
				err = fmt.Errorf("status %d, want %d", got, want)
			}
			if err != nil {
				return fmt.Errorf("%s: %w", what, err)
			}
			return nil
		})
	}
	vip := fmt.Sprintf("http://%s:8089/", w1.IP)
	health := svc.Spec.HealthCheckNodePort
	expect("a client that is named", vip, 200)
	expect("health of the node with the pod", fmt.Sprintf("http://%s:%d/", w1.IP, health), 200)
	expect("health of a node without", fmt.Sprintf("http://%s:%d/", w2.IP, health), 503)
	nodePort := svc.Spec.Ports[0].NodePort
	expect("the node port of the node with the pod", fmt.Sprintf("http://%s:%d/", w1.IP, nodePort), 200)
	expect("the node port of a node without", fmt.Sprintf("http://%s:%d/", w2.IP, nodePort), 0)
	// Nodes read their counters periodically.
	w.awaitKctl([]string{"get", "--raw", "/api/v1/nodes/w1/proxy/metrics"},
		fmt.Sprintf(`keelson_service_connections_total{namespace=%q,service="web",port="http",protocol="tcp",`+
			`from="outside"}`, w.ns),
		"kubeproxy_sync_proxy_rules_duration_seconds_count", "kubeproxy_network_programming_duration_seconds_count")
	used := w.awaitKctl([]string{"net", "services", "-n", w.ns, "web", "--nodes"}, " 1/1 ", " w1 ")
	if fields := strings.Fields(used); len(fields) < 19 || fields[0] != "NAMESPACE" {
		t.Errorf("kctl net services shows no use of node w1, or not its endpoint:\n%s", used)
	}
	patch(`{"spec": {"loadBalancerSourceRanges": ["192.0.2.0/24"]}}`)
	expect("a client that is not named", vip, 0)
	expect("the node port, which names no clients", fmt.Sprintf("http://%s:%d/", w1.IP, nodePort), 200)
}

// F117 F118: a Service gets an address of a pool, a node responds for the address on the link, and
// clients outside of the cluster reach its pods there. A Service without a free address reports it,
// and gets the first address that becomes free.
func TestLoadBalancerAddresses(t *testing.T) {
	w := newNamespace(t)
	outside := testenv.Host(t, "registry")
	raw := outside.IP.As4()
	raw[3] = 240
	vip := netip.AddrFrom4(raw)
	w.createPool(fmt.Sprintf("{addresses: [%s], namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: %s}}}",
		vip,
		w.ns))
	p := newPod("web", hello)
	p.Labels = map[string]string{"app": "web"}
	w.createPod(p)
	w.createPod(sleeperPod("client"))
	w.createService(webService("web", v1.ServiceTypeLoadBalancer))
	w.awaitPod("web", requireReady)
	w.awaitPod("client", requireReady)
	client := testenv.HTTP(outside)
	testenv.Eventually(t, soon, func() error {
		resp, err := client.Get("http://" + vip.String() + "/")
		if err == nil {
			err = resp.Body.Close()
		}
		return err
	})
	svc, err := w.cs.CoreV1().Services(w.ns).Get(t.Context(), "web", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	node, ingress := svc.Annotations["keelson.dev/announced-by"], svc.Status.LoadBalancer.Ingress
	if node == "" || len(ingress) != 1 || ingress[0].IP != vip.String() || ingress[0].IPMode == nil ||
		*ingress[0].IPMode != v1.LoadBalancerIPModeVIP {
		t.Errorf("node %q responds for the address, status %+v", node, ingress)
	}
	kctl := kubectlPrograms()["kctl"]
	w.awaitKctl([]string{"-n", w.ns, "net", "trace", "client", vip.String() + ":80"}, "node "+node+" answers for it")
	w.createService(webService("second", v1.ServiceTypeLoadBalancer))
	testenv.Eventually(t, soon, func() error {
		out, err := testenv.Try(t, kctl, "-n", w.ns, "why", "service/second")
		if !strings.Contains(out, "no IPv4 address is free in pool e2e") {
			return fmt.Errorf("why says: %v %s", err, out)
		}
		return nil
	})
	if err := w.cs.CoreV1().Services(w.ns).Delete(t.Context(), "web", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, soon, func() error {
		s, err := w.cs.CoreV1().Services(w.ns).Get(t.Context(), "second", metav1.GetOptions{})
		if err == nil &&
			(len(s.Status.LoadBalancer.Ingress) != 1 || s.Status.LoadBalancer.Ingress[0].IP != vip.String()) {
			err = fmt.Errorf("second has %+v", s.Status.LoadBalancer.Ingress)
		}
		return err
	})
}

// createPool creates the lab's only pool of load balancer addresses and deletes it at the end of
// the test.
func (w testNamespace) createPool(text string) {
	w.Helper()
	maps := w.cs.CoreV1().ConfigMaps("kube-system")
	_, err := maps.Create(context.Background(),
		&v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "load-balancer-pools"}, Data: map[string]string{"e2e": text}},
		metav1.CreateOptions{})
	if err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() {
		if err := maps.Delete(context.Background(), "load-balancer-pools", metav1.DeleteOptions{}); err != nil {
			w.Error(err)
		}
	})
}
