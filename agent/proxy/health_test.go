package proxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/agent/fake"
	"keelson.dev/keelson/agent/proxy/servicemodel"
	"keelson.dev/keelson/internal/await"
)

// A load balancer that checks the health check node port of a Service receives the number of ready
// endpoints on this node only. The port is open as long as the Service has it.
func TestHealthCheckNodePort(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	objects := fake.NewCluster()
	opened := make(chan string, 8)
	checks := NewHealthChecks(nil)
	checks.listen = func(port int32) (net.Listener, error) {
		if port != 31000 {
			return nil, fmt.Errorf("port %d was asked for", port)
		}
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err == nil {
			opened <- ln.Addr().String()
		}
		return ln, err
	}
	model := servicemodel.NewModel(servicemodel.Location{Node: "w1"})
	show := func() {
		model.Replace(objects.Services(), objects.EndpointSlices())
		model.UpdatePorts()
		checks.setHealth(model.HealthChecks())
	}
	done := make(chan error, 1)
	go func() { done <- checks.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	}()
	svc := &v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"}, Spec: v1.ServiceSpec{
		Type: v1.ServiceTypeLoadBalancer, ExternalTrafficPolicy: v1.ServiceExternalTrafficPolicyLocal,
		HealthCheckNodePort: 31000}}
	objects.Put(svc)
	show()
	address := <-opened
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 10 * time.Second}
	says := func(code int, text string) {
		t.Helper()
		await.Until(ctx, t, await.Patience, time.Millisecond, "the health of the Service", func() error {
			resp, err := client.Get("http://" + address + "/healthz")
			if err != nil {
				return err
			}
			defer resp.Body.Close()
			body, err := io.ReadAll(resp.Body)
			if err == nil && (resp.StatusCode != code || !strings.Contains(string(body), text)) {
				err = fmt.Errorf("%d %s", resp.StatusCode, body)
			}
			return err
		})
	}
	says(503, `"localEndpoints":0`)
	here, there, no := "w1", "w2", false
	slice := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web-1",
		Labels: map[string]string{discoveryv1.LabelServiceName: "web"}},
		AddressType: discoveryv1.AddressTypeIPv4, Endpoints: []discoveryv1.Endpoint{
			{Addresses: []string{"10.244.1.5"}, NodeName: &here}, {Addresses: []string{"10.244.2.5"}, NodeName: &there},
			{Addresses: []string{"10.244.1.6"}, NodeName: &here,
				Conditions: discoveryv1.EndpointConditions{Ready: &no}}}}
	objects.Put(slice)
	show()
	says(200, `{"service":{"namespace":"default","name":"web"},"localEndpoints":1}`)
	gone := slice.DeepCopy()
	gone.Endpoints = gone.Endpoints[1:]
	objects.Put(gone)
	show()
	says(503, `"localEndpoints":0`)
	cluster := svc.DeepCopy()
	cluster.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyCluster
	objects.Put(cluster)
	show()
	await.Until(ctx, t, await.Patience, time.Millisecond, "the end of the health check port", func() error {
		c, err := net.Dial("tcp", address)
		if err == nil {
			c.Close()
			return errors.New("the port is still open")
		}
		return nil
	})
}
