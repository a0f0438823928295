package core_test

import (
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/core"
	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

func TestHealthCheckNodePort(t *testing.T) {
	lb := func(rest string) string {
		return "{metadata: {name: a}, spec: {type: LoadBalancer, ports: [{port: 80, nodePort: 30001}], " + rest + "}}"
	}
	local := "externalTrafficPolicy: Local, "
	for _, c := range []struct{ name, text, want string }{
		{"good", lb(local + "healthCheckNodePort: 30002"), ""},
		{"policy", lb("healthCheckNodePort: 30002"),
			"spec.healthCheckNodePort: Invalid value: 30002: may only be set when `type` is 'LoadBalancer' and " +
				"`externalTrafficPolicy` is 'Local'"},
		{"any port", lb(local + "healthCheckNodePort: 80"), ""}, // the allocator has the range
		{"no port", lb(local + "healthCheckNodePort: 70000"),
			"spec.healthCheckNodePort: Invalid value: 70000: must be between 1 and 65535, inclusive"},
		{"own port", lb(local + "healthCheckNodePort: 30001"),
			"spec.healthCheckNodePort: Invalid value: 30001: provided port is already allocated"},
	} {
		want := []string{c.want}
		if c.want == "" {
			want = nil
		}
		kindstest.CheckErrors(t, c.name, kindstest.ValidationErrors[*corev1.Service](t, c.text), want...)
	}
	s := kindstest.Load[*corev1.Service](t, lb(local+"healthCheckNodePort: 30002"))
	held := core.ServiceReservations(s)
	if !slices.ContainsFunc(held, func(r api.Reservation) bool {
		return r == api.Reservation{Space: core.SpaceNodePorts, Value: "TCP-30002", Field: "spec.healthCheckNodePort"}
	}) {
		t.Errorf("it reserves %v", held)
	}
	if _, wrong := kindstest.RunUpdate(t, s, "", func(s *corev1.Service) {
		s.Spec.HealthCheckNodePort = 30003
	}); !slices.Equal(wrong, []string{"spec.healthCheckNodePort"}) {
		t.Errorf("changed: %q", wrong)
	}
	if got, wrong := kindstest.RunUpdate(t, s, "", func(s *corev1.Service) {
		s.Spec.ExternalTrafficPolicy = "Cluster"
	}); wrong != nil || got.Spec.HealthCheckNodePort != 0 {
		t.Errorf("no longer needed: %q, port %d", wrong, got.Spec.HealthCheckNodePort)
	}
}
