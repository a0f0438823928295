package services_test

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/apiserver"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

// Node ports and the health check port of a Service are in the range of this cluster, and a Service
// keeps the ports and addresses that an update leaves out. F38
func TestServicePortsAreInTheRange(t *testing.T) {
	r := apiservertest.StartReplica(t, func(c *apiserver.Config) { c.Network.NodePorts = [2]int{20000, 20099} })
	services := r.Admin().CoreV1().Services("default")
	balancer := func(name string) *corev1.Service {
		return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer,
				ExternalTrafficPolicy: corev1.ServiceExternalTrafficPolicyLocal,
				Ports:                 []corev1.ServicePort{{Port: 80}}}}
	}
	const (
		outside = "provided port is not in the valid range. The range of valid ports is 20000-20099"
		health  = "spec.healthCheckNodePort: Invalid value: "
		failed  = ": failed to allocate requested HealthCheck NodePort "
	)
	for name, c := range map[string]struct {
		change func(*corev1.ServiceSpec)
		want   string // "" = created
	}{
		"node-port": {func(s *corev1.ServiceSpec) {
			s.Ports[0].NodePort = 30080
		}, "spec.ports[0].nodePort: Invalid value: 30080: " + outside},
		"no-port": {func(s *corev1.ServiceSpec) {
			s.Ports[0].NodePort = 70000
		}, "spec.ports[0].nodePort: Invalid value: 70000: " + outside},
		"inside": {func(s *corev1.ServiceSpec) {
			s.Ports[0].NodePort, s.HealthCheckNodePort = 20080, 20081
		}, ""},
		"health-port": {func(s *corev1.ServiceSpec) {
			s.HealthCheckNodePort = 30100
		}, health + "30100" + failed + "30100: " + outside},
		"no-health-port": {func(s *corev1.ServiceSpec) {
			s.HealthCheckNodePort = -1
		}, health + "-1" + failed + "-1: " + outside},
		"unused-health-port": {func(s *corev1.ServiceSpec) {
			s.ExternalTrafficPolicy, s.HealthCheckNodePort = "", 30100
		}, health + "30100: may only be set when"},
		"port-of-a-cluster-ip": {func(s *corev1.ServiceSpec) {
			s.Type, s.ExternalTrafficPolicy, s.Ports[0].NodePort = "", "", 30080
		}, "spec.ports[0].nodePort: Forbidden: may not be used when `type` is 'ClusterIP'"},
	} {
		s := balancer(name)
		c.change(&s.Spec)
		_, err := services.Create(apiservertest.Within(t), s, metav1.CreateOptions{})
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: %v, want %s", name, err, c.want)
		}
	}
	s, err := services.Create(apiservertest.Within(t), balancer("kept"), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	before := s.Spec.DeepCopy()
	if n := before.HealthCheckNodePort; n < 20000 || n > 20099 {
		t.Errorf("the Service was given the health check port %d", n)
	}
	for name, c := range map[string]struct {
		change func(*corev1.ServiceSpec)
		want   string // "" = nothing is changed
	}{
		"empty health port": {func(s *corev1.ServiceSpec) { s.HealthCheckNodePort = 0 }, ""},
		"empty node port":   {func(s *corev1.ServiceSpec) { s.Ports[0].NodePort = 0 }, ""},
		"empty clusterIPs":  {func(s *corev1.ServiceSpec) { s.ClusterIPs = nil }, ""},
		"empty clusterIP":   {func(s *corev1.ServiceSpec) { s.ClusterIP = "" }, ""},
		"empty addresses":   {func(s *corev1.ServiceSpec) { s.ClusterIP, s.ClusterIPs = "", nil }, ""},
		"another health port": {func(s *corev1.ServiceSpec) {
			s.HealthCheckNodePort++
		}, "spec.healthCheckNodePort: Forbidden: field is immutable"},
		"a health port outside": {func(s *corev1.ServiceSpec) {
			s.HealthCheckNodePort = 70000
		}, "spec.healthCheckNodePort: Forbidden: field is immutable"},
		"a node port outside": {func(s *corev1.ServiceSpec) {
			s.Ports[0].NodePort = 30080
		}, "spec.ports[0].nodePort: Invalid value: 30080: " + outside},
		"another clusterIP": {func(s *corev1.ServiceSpec) {
			s.ClusterIP = "10.96.0.250"
		}, `spec.clusterIPs[0]: Invalid value: ["10.96.0.250"]: may not change once set`},
		"another of clusterIPs": {func(s *corev1.ServiceSpec) {
			s.ClusterIPs = []string{"10.96.0.250"}
		}, "first value must match `clusterIP`"},
		"clusterIPs without one": {func(s *corev1.ServiceSpec) {
			s.ClusterIP, s.ClusterIPs = "", []string{"10.96.0.250"}
		}, "first value must match `clusterIP`"},
	} {
		changed := s.DeepCopy()
		changed.ResourceVersion = ""
		c.change(&changed.Spec)
		got, err := services.Update(apiservertest.Within(t), changed, metav1.UpdateOptions{})
		switch {
		case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
			t.Errorf("%s: %v, want %s", name, err, c.want)
		case c.want == "" && err != nil:
			t.Errorf("%s: %v", name, err)
		case c.want == "" && (got.Spec.HealthCheckNodePort != before.HealthCheckNodePort ||
			got.Spec.ClusterIPs[0] != before.ClusterIP ||
			got.Spec.ClusterIP != before.ClusterIP || got.Spec.Ports[0].NodePort != before.Ports[0].NodePort):
			t.Errorf("%s: the Service is now %+v", name, got.Spec)
		}
	}
}
