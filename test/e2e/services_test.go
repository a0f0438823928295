package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/test/bed"
)

// F115 F117: what a Service of type LoadBalancer says is so on the nodes, once somebody gave it an address: its clients, its
// traffic policy, its health check port; and the node's metrics count its connections.
func TestLoadBalancerPolicies(t *testing.T) {
	w := begin(t)
	p := pod("web", hello)
	p.Spec.NodeName, p.Labels = "w1", map[string]string{"app": "web"}
	w.createPod(p)
	outside, w1, w2 := bed.Host(t, "registry"), bed.Host(t, "w1"), bed.Host(t, "w2")
	svc := front("web", v1.ServiceTypeLoadBalancer)
	svc.Spec.Ports[0].Port = 8089
	svc.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal
	svc.Spec.LoadBalancerSourceRanges = []string{outside.IP.String() + "/32"}
	svc = w.createService(svc)
	// The address that the balancer has in this test is one that comes to the node.
	svc.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: w1.IP.String()}}
	svc, err := w.cs.CoreV1().Services(w.ns).UpdateStatus(context.Background(), svc, metav1.UpdateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	w.waitPod("web", isReady)
	client := bed.HTTP(outside)
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
		bed.Eventually(t, soon, func() error {
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
	metrics := bed.Must(t, clients()["kctl"], "get", "--raw", "/api/v1/nodes/w1/proxy/metrics")
	for _, want := range []string{fmt.Sprintf(`keelson_service_connections_total{namespace=%q,service="web",port="http",protocol="tcp",from="outside"}`, w.ns),
		"kubeproxy_sync_proxy_rules_duration_seconds_count", "kubeproxy_network_programming_duration_seconds_count"} {
		if !strings.Contains(metrics, want) {
			t.Errorf("the node's metrics lack %s", want)
		}
	}
	used := bed.Must(t, clients()["kctl"], "net", "services", "-n", w.ns, "web", "--nodes")
	if fields := strings.Fields(used); len(fields) < 19 || fields[0] != "NAMESPACE" || !strings.Contains(used, " 1/1 ") || !strings.Contains(used, " w1 ") {
		t.Errorf("kctl net services shows no use of node w1, or not its endpoint:\n%s", used)
	}
	svc.Spec.LoadBalancerSourceRanges = []string{"192.0.2.0/24"}
	if _, err := w.cs.CoreV1().Services(w.ns).Update(context.Background(), svc, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	expect("a client that is not named", vip, 0)
	expect("the node port, which names no clients", fmt.Sprintf("http://%s:%d/", w1.IP, nodePort), 200)
}
