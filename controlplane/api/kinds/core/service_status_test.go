package core_test

import (
	"testing"

	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api/kinds"
)

// F117: a controller that reports a load balancer's address without ipMode is not refused: the mode is VIP.
func TestBalancerStatusWithoutMode(t *testing.T) {
	k := kinds.All().ByType(&corev1.Service{})
	old := &corev1.Service{Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer}}
	next := old.DeepCopy()
	next.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "192.0.2.1"}, {Hostname: "lb.example.com"}}
	k.Subresources["status"].PrepareUpdate(next, old)
	got := next.Status.LoadBalancer.Ingress
	if got[0].IPMode == nil || *got[0].IPMode != corev1.LoadBalancerIPModeVIP || got[1].IPMode != nil {
		t.Errorf("modes %v and %v, want VIP and none", got[0].IPMode, got[1].IPMode)
	}
}
