package core_test

import (
	"fmt"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/api/kinds/core"
	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

func TestServiceUpdate(t *testing.T) {
	stored := kindstest.Load[*corev1.Service](t,
		"{metadata: {name: a}, spec: {type: NodePort, clusterIP: 10.96.0.9, ports: [{port: 80, nodePort: 30080}]}}")
	held := func(s *corev1.Service) string { return fmt.Sprint(core.ServiceReservations(s)) }
	const all = "[{clusterips 10.96.0.9 spec.clusterIPs[0]} {nodeports TCP-30080 spec.ports[0].nodePort}]"
	if got := held(stored); got != all {
		t.Errorf("reserved %s", got)
	}
	for _, c := range []struct {
		name   string
		change func(*corev1.Service)
		held   string
		wrong  []string
	}{
		{"a manifest without addresses", func(s *corev1.Service) {
			s.Spec = corev1.ServiceSpec{Type: s.Spec.Type, Ports: []corev1.ServicePort{{Port: 80}}}
		}, all, nil},
		{"to ClusterIP", func(s *corev1.Service) {
			s.Spec.Type = corev1.ServiceTypeClusterIP
		}, "[{clusterips 10.96.0.9 spec.clusterIPs[0]}]", nil},
		{"to ExternalName", func(s *corev1.Service) {
			s.Spec.Type, s.Spec.ExternalName = "ExternalName", "a.b"
		}, "[]", nil},
		{"another address", func(s *corev1.Service) {
			s.Spec.ClusterIP, s.Spec.ClusterIPs = "10.96.0.10", []string{"10.96.0.10"}
		},
			"[{clusterips 10.96.0.10 spec.clusterIPs[0]} {nodeports TCP-30080 spec.ports[0].nodePort}]",
			[]string{"spec.clusterIPs[0]"}},
	} {
		got, wrong := kindstest.RunUpdate(t, stored, "", c.change)
		if held(got) != c.held || !slices.Equal(wrong, c.wrong) {
			t.Errorf("%s: holds %s, errors at %q", c.name, held(got), wrong)
		}
		if errs := kinds.All().ByType(got).Validation.Object(got); len(errs) > 0 {
			t.Errorf("%s: %v", c.name, errs)
		}
	}
}
